"""Steps before a distillation, each a separate run: dump, binarize, token counts, extract a student, reviews."""
