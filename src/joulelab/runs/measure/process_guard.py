"""A process in the measured program's process group that ends the group when `joulelab measure` is killed.

SIGKILL cannot be caught, so another process must detect it: the standard input of this script is a pipe from `measure`,
which the kernel closes. The guard also owns the group: it exists before the program starts, can receive the terminal
without a race, and its group number cannot be reused. It uses only the standard library, because it is started as
`python -I -S` and must be ready within milliseconds.
"""

import os
import signal
import time

# Signals to the group are meant for the program.
IGNORED = ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2", "PIPE", "ALRM")
GRACE_S = 2.0
READY = b"ready\n"


def main() -> None:
    for name in IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    os.write(1, READY)
    os.close(1)
    if os.read(0, 1):
        return  # `measure` has ended normally
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
