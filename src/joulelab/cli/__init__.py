"""One verb per file: parse, call, print."""
