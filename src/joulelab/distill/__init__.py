"""Distillation: one runner, pipelines as recipe folders, losses as pure functions, teachers live or behind a cache."""
