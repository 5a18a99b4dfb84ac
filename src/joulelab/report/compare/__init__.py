"""Compare runs: one row per method, differences to the baseline, break-even and verdict."""
