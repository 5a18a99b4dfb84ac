"""A process that lives in the measured program's group and ends that group when `joulelab measure` is killed.

SIGKILL cannot be caught, so somebody else must notice it: this script's standard input is a pipe from `measure`, which
the kernel closes with it. The guard also holds the group: it exists before the program starts, can be given the
terminal without a race, and its number cannot be taken by a stranger. Stand-alone and standard library only, because
it is started as `python -I -S` and must be there in milliseconds.
"""

import os
import signal
import time

# What a person or scheduler sends to the group is for the program.
IGNORED = ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2", "PIPE", "ALRM")
GRACE_S = 2.0
READY = b"ready\n"


def main() -> None:
    for name in IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    os.write(1, READY)
    os.close(1)
    if os.read(0, 1):
        return  # `measure` has said goodbye
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
