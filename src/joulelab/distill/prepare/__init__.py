"""Steps before a distillation, each a run of its own: dump, binarize, token counts, extract a student, reviews."""
