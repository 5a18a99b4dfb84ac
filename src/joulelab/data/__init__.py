"""Data: sources that users name, token stores, tokenization, splits and batches.

Everything is a function of content and seed, so runs with the same settings see the same data.
"""
