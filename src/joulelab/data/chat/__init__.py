"""Conversations and plain texts for causal language models: read, cleaned, encoded with a loss mask, stored, packed.

A row of a source is read and cleaned (`conversations`), rendered (`templates`), becomes token ids with a loss mask in a
store (`encoding`), and is packed with others into rows of one length, which make up batches (`packing`). Documents of a
row do not attend to each other (`attention`). `datasets` runs the first half of these steps in one call.
"""
