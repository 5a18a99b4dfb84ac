"""Power logs of other tools and earlier versions: detected by content, placed in time, and summed per device."""
