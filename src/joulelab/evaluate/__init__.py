"""Quality: what the joules bought."""
