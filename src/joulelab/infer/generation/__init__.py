"""Answers to prompts behind one call: from a model of our own, or from a server that speaks the OpenAI protocol."""
