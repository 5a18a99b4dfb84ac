"""Our own DeiT and BERT, lean and with the placement and kind of normalisation as a choice."""
