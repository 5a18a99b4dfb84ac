"""Trackers of the loop's phases: one class each, several at once."""
