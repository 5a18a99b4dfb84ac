"""Questions on paragraphs in SQuAD's format: read, cut into windows of tokens, stored and batched."""
