"""Preference distillation: candidates are judged, made into pairs, and the student learns from the pairs."""
