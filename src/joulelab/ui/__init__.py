"""The local web view: a table of runs, live runs, comparisons (`joulelab ui`), and the live chart of a notebook.

Pages are the report's templates with a live part; numbers come from the same functions as those of the commands.
"""
