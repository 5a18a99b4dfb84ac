"""The run: a checked spec goes in, a folder comes out, and everything downstream reads the folder."""
