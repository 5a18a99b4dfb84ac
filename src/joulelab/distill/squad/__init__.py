"""Question answering on SQuAD files: DistilBERT's second distillation step."""
