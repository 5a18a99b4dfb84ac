"""Measure a program or a block of Python code: the run around it, its windows and its result."""
