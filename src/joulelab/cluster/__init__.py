"""Where a run runs: job scripts for Slurm, what happens inside a job, and how one is watched and cancelled."""
