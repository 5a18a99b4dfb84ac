"""Inputs of every modality, made from a seed: fresh at every step, the same in every run, and learnable.

Each kind hides a rule that a small model finds within a few steps, so that a falling loss says the training works.
"""
