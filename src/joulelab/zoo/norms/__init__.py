"""DeiT and BERT encoders with selectable kind and placement of normalization."""
