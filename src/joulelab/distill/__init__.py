"""Distillation: losses as pure functions, teachers behind a cache, and pipelines that are short stories of stages."""
