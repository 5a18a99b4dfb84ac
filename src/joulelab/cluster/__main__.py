"""`python -m joulelab.cluster`: what a job script runs. It listens for the scheduler before it imports what is slow."""

import sys

from joulelab.cluster.time_limit_signal import TimeLimitSignal

if __name__ == "__main__":
    warned = TimeLimitSignal()
    from joulelab.cluster.job import main

    sys.exit(main(sys.argv[1:], warned))
