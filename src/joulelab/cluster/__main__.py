"""`python -m joulelab.cluster`: entry point of job scripts. Signal handlers are installed before the slow imports."""

import sys

from joulelab.cluster.slurm import TimeLimitSignal

if __name__ == "__main__":
    time_limit = TimeLimitSignal()
    from joulelab.cluster.job import main

    sys.exit(main(sys.argv[1:], time_limit))
