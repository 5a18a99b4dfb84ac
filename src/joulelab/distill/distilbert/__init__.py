"""Distillation of masked and causal language models in the way DistilBERT was made."""
