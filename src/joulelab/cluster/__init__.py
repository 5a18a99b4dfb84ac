"""Runs on Slurm: job scripts, their submission, execution inside a job, watching, cancelling, accounting."""
