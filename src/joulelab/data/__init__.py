"""What models learn from: where it lies, how it is split, how it is stored, and in which order it is read.

Everything here is a function of content and seed, so that two runs which should see the same data do see the same data.
"""
