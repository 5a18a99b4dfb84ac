"""The tests of the recipe folders share the tiny models and texts of this folder: pytest puts it on the path."""
