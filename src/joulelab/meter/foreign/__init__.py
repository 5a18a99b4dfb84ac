"""Logs that others wrote, and old ones of our own: read by content, placed in time, and summed per device."""
