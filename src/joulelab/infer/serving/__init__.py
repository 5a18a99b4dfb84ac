"""A small OpenAI-compatible server, and the load that measures any such server."""
