"""The models of the zoo by family: each entry has its sizes and the function that builds it."""
