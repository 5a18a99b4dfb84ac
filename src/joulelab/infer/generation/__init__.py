"""Answers to prompts behind one interface: from a local model, or from a server with the OpenAI protocol."""
