"""A new pipeline as a contributor would add it: one folder with the four files, and one line in `lookup`."""
