"""What is wrong with files of ours that cannot be opened, in words."""

from __future__ import annotations


def words_for(error: Exception) -> str:
    """A key that a file lacks is told by Python as the bare key."""
    return f"it does not say {error.args[0]}" if isinstance(error, KeyError) and error.args else str(error)
