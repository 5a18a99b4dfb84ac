"""Tables for the terminal, Markdown, LaTeX, CSV and the page."""
