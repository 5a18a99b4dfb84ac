"""Conversations and plain texts for causal language models: read, cleaned, encoded with their labels, stored, packed.

A row of a source (`rows`) is cleaned (`cleaning`), becomes token ids of which some are trained (`encoding`), lies in a
store (`store`), is packed with others into rows of one length (`packing`) and reaches the loop in batches (`batches`),
whose documents do not see each other (`attention`). `prepare` walks the first half of that way in one call.
"""
