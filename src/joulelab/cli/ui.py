"""`joulelab ui`: the local web view of the store."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Annotated

import typer

from joulelab.cli.options import RunsDir, existing_store
from joulelab.lookup import require_extra


def ui(
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port to listen on; 0 takes any free one (default: 8765 or the next free)."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen on. Any address other than 127.0.0.1 lets other machines connect."
        ),
    ] = "127.0.0.1",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show runs, live power and energy, and comparisons in the browser, until Ctrl-C.

    Prints an address with a token, which every request needs. The pages only read the store, except for Stop, which
    asks a running run to save a checkpoint and end. They need no network and no torch. On a login node, forward the
    port and open the printed address on your machine:

      ssh -L 8765:127.0.0.1:8765 LOGIN-NODE

    Examples:

      joulelab ui --open

      joulelab ui --port 9000 --runs-dir /scratch/me/runs
    """
    require_extra("joulelab ui", "ui")
    require_extra("joulelab ui", "report")
    from joulelab.ui.access import LOOPBACK, new_token
    from joulelab.ui.web_app import bind, serve

    store = existing_store(runs_dir)
    listening = bind(host, port)
    number, token = listening.getsockname()[1], new_token()
    everywhere = host in ("0.0.0.0", "::", "")
    name = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{number}/?token={token}"
    print(f"store {store.absolute()}", file=sys.stderr)
    print(address, flush=True)
    if host not in LOOPBACK:
        print("warning: reachable from other machines, without encryption; prefer an SSH tunnel", file=sys.stderr)
    print("Ctrl-C ends it.", file=sys.stderr, flush=True)
    if open_page:
        import webbrowser

        webbrowser.open(address)
    with suppress(OSError):
        os.nice(5)  # a run on the same machine comes first
    names = {*LOOPBACK, host, socket.gethostname(), socket.getfqdn()} if host not in LOOPBACK else set(LOOPBACK)
    with suppress(KeyboardInterrupt):
        serve(store, token, listening, sorted(names))
