"""Records in; tables, comparisons, verdicts and one offline HTML file out. Nothing here measures."""
