"""The web server of `joulelab ui`: pages of the store, of runs and of comparisons, and their live updates.

Everything is read from the store; the only change that a page can request is to stop a run. Updates are server-sent
events: one long response that the browser reconnects to. Work that takes time runs in threads.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import joulelab
from joulelab.cluster.submission import stop_run, stop_text
from joulelab.cluster.watch import LiveRun, flags, now_tiles
from joulelab.errors import JoulelabError, NotFoundError, UsageError
from joulelab.report.compare.method_rows import select
from joulelab.report.page import (
    SCRIPTS,
    TEMPLATES,
    Page,
    chart_library,
    page_context,
    render,
    selection_page,
    template_environment,
)
from joulelab.report.page import figure_data as spec_of
from joulelab.report.store_page import stored_runs, trend_figure
from joulelab.runs.index import IndexReporter
from joulelab.runs.paths import GROUPS_FOLDER
from joulelab.runs.record import RunRecord
from joulelab.runs.store import load_record
from joulelab.ui.access import LOOPBACK, Access
from joulelab.ui.run_view import FIGURES, POLL_S, ReportSoFar, RunFeed, devices_grid, hosts_grid
from joulelab.ui.store_view import REFRESH_S, TITLES, StoreView, group_facts

HERE = Path(__file__).parent
DEFAULT_PORT = 8765
_PORTS_TRIED = 20
_MOST_FEEDS = 64
_MOST_COMPARED = 200


class Server:
    """The pages over one store."""

    def __init__(self, store: Path, stopping: Callable[[], bool] = lambda: False) -> None:
        self.store = store.absolute()
        self._stopping = stopping
        self._view = StoreView(self.store)
        self._feeds: dict[str, RunFeed] = {}
        # one report at a time: they are the expensive part, and the machine may be measuring
        self._workers = ThreadPoolExecutor(1, "joulelab-report")
        self._templates = template_environment(HERE / "templates")
        self._assets = assets()

    def app(self, token: str, hosts: Sequence[str] = LOOPBACK) -> Access:
        routes = [
            Route("/", self._store_page),
            Route("/api/runs", self._runs),
            Route("/api/groups", self._groups),
            Route("/api/trend", self._trend),
            Route("/api/runs/events", self._store_events),
            Route("/runs/{run_id}", self._run_page),
            Route("/api/runs/{run_id}/events", self._run_events),
            Route("/api/runs/{run_id}/stop", self._stop, methods=["POST"]),
            Route("/groups/{group_id}", self._group_page),
            Route("/compare", self._compare_page),
            Route("/report.html", self._offline_page),
            Route("/assets/{name}", self._asset),
        ]
        handlers: dict[Any, Any] = {JoulelabError: self._failed, 404: self._not_found}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return Access(app, token, hosts)

    def _html(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        values = {"version": joulelab.__version__, "store": str(self.store), **values}
        return HTMLResponse(self._templates.get_template(template).render(**values), status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, JoulelabError)
        status = 404 if isinstance(error, NotFoundError) else 400
        if request.url.path.startswith("/api/"):
            return JSONResponse({"error": error.message, "hint": error.hint}, status)
        return self._html("problem.html.j2", status, message=error.message, hint=error.hint or "")

    async def _not_found(self, request: Request, error: Exception) -> Response:
        return self._html("problem.html.j2", 404, message="there is no such page", hint="")

    # The store

    async def _store_page(self, request: Request) -> Response:
        return self._html("store.html.j2", columns=TITLES.split("|"), **_EMPTY)

    async def _runs(self, request: Request) -> Response:
        text = await run_in_threadpool(self._view.changes, 0)
        return Response(text, media_type="application/json")

    async def _groups(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(group_facts, self.store))

    async def _trend(self, request: Request) -> Response:
        def figure() -> dict[str, Any] | None:
            found = trend_figure(stored_runs(self.store, IndexReporter(lambda text: None)))
            return None if found is None else {**spec_of(found), "caption": found.caption}

        return JSONResponse(await run_in_threadpool(figure))

    async def _store_events(self, request: Request) -> Response:
        since = _number(request, "since")

        async def events() -> AsyncIterator[str]:
            seen = since
            while not self._stopping():
                text = await run_in_threadpool(self._view.changes, seen)
                version = json.loads(text[: text.index(",")] + "}")["version"]
                if '"rows":[],"gone":[],"groups":null' not in text:
                    yield _event("changes", text)
                else:
                    yield ": nothing new\n\n"
                seen = version
                await asyncio.sleep(REFRESH_S / 2)  # a change is at most this much older than a refresh

        return _stream(events())

    # A run

    def folder(self, run_id: str) -> Path:
        return _named(self.store, run_id, "run")

    async def _run_page(self, request: Request) -> Response:
        folder = self.folder(request.path_params["run_id"])
        return await run_in_threadpool(self._run_html, folder)

    def _run_html(self, folder: Path) -> Response:
        record = load_record(folder)
        if record.status not in ("running", "queued"):
            page = selection_page(select(self.store, [str(folder)]), self.store)
            return self._report(page, [("run", folder.name)], record)
        live, number, report = self._feed(folder).poll()
        parts = self._live_parts(live, report) | self._report_parts(report)
        return self._html(
            "run.html.j2",
            record=record,
            parts=parts,
            number=number,
            figures=FIGURES,
            specs=report.specs(),
            stopping=stop_text(folder),
            **_EMPTY_DATA,
        )

    def _feed(self, folder: Path) -> RunFeed:
        feed = self._feeds.pop(folder.name, None) or RunFeed(folder, self._workers)
        self._feeds[folder.name] = feed  # the latest last
        for name in list(self._feeds)[:-_MOST_FEEDS]:
            del self._feeds[name]
        return feed

    def _live_parts(self, live: LiveRun, report: ReportSoFar) -> dict[str, str]:
        module = self._templates.get_template("live.html.j2").module
        grids = [grid for grid in (hosts_grid(live), devices_grid(live)) if grid and grid.rows]
        return {
            "now": str(module.tiles(now_tiles(live))),  # type: ignore[attr-defined]  # macros of the template
            "budgets": str(module.budgets(live.budgets)),  # type: ignore[attr-defined]
            "flags": str(module.flags(flags(live))),  # type: ignore[attr-defined]
            "devices": str(module.grids(grids)),  # type: ignore[attr-defined]
            "age": report.age_text(),
        }

    def _report_parts(self, report: ReportSoFar) -> dict[str, str]:
        module = self._templates.get_template("live.html.j2").module
        return {
            "tiles": str(module.tiles(report.tiles)),  # type: ignore[attr-defined]
            "remarks": str(module.flags(report.remarks)),  # type: ignore[attr-defined]
            "numbers": str(module.grids(report.grids)),  # type: ignore[attr-defined]
        }

    async def _run_events(self, request: Request) -> Response:
        folder = self.folder(request.path_params["run_id"])

        async def events() -> AsyncIterator[str]:
            sent: dict[str, str] = {}
            seen = _number(request, "since")
            waited = False
            while not self._stopping():
                feed = self._feed(folder)
                try:
                    live, number, report = await run_in_threadpool(feed.poll)
                except (JoulelabError, OSError):  # it was removed; the page loads again and states the problem
                    yield _event("ended", json.dumps({"status": "unreadable"}))
                    return
                if live.over or (waited and live.status != "queued"):
                    yield _event("ended", json.dumps({"status": live.status}))
                    return
                waited = live.status == "queued"
                parts = self._live_parts(live, report)
                message: dict[str, Any] = {}
                if number != seen:
                    parts |= self._report_parts(report)
                    message["figures"], seen = report.specs(), number
                message["parts"] = {name: html for name, html in parts.items() if sent.get(name) != html}
                sent |= parts
                yield _event("update", json.dumps(message))
                await asyncio.sleep(POLL_S)

        return _stream(events())

    async def _stop(self, request: Request) -> Response:
        folder = self.folder(request.path_params["run_id"])
        return JSONResponse({"stopped": await run_in_threadpool(stop_run, folder)})

    # Comparisons

    async def _group_page(self, request: Request) -> Response:
        return await run_in_threadpool(self._comparison, [("group", request.path_params["group_id"])])

    async def _compare_page(self, request: Request) -> Response:
        return await run_in_threadpool(self._comparison, request.query_params.multi_items())

    def _comparison(self, named: Sequence[tuple[str, str]]) -> Response:
        return self._report(self._page(named), named)

    def _page(self, named: Sequence[tuple[str, str]]) -> Page:
        """The page that `joulelab report` writes of the same runs."""
        folders = [self.folder(name) for kind, name in named if kind == "run"]
        folders += [_named(self.store / GROUPS_FOLDER, name, "group") for kind, name in named if kind == "group"]
        if not folders:
            raise UsageError("no runs were selected", "select runs in the table, then Compare")
        if len(folders) > _MOST_COMPARED:
            raise UsageError(
                f"{len(folders)} runs were selected; at most {_MOST_COMPARED} fit on a page", "select fewer"
            )
        options = dict(named)
        selection = select(self.store, [str(folder) for folder in folders], options.get("baseline"))
        return selection_page(selection, self.store, options.get("quality"))

    def _report(self, page: Page, named: Sequence[tuple[str, str]], record: RunRecord | None = None) -> Response:
        address = f"/report.html?{urlencode(list(named))}"
        return self._html("report.html.j2", offline=address, record=record, **page_context(page))

    async def _offline_page(self, request: Request) -> Response:
        def written() -> tuple[str, str]:
            page = self._page(request.query_params.multi_items())
            return render(page), page.identity[0] if page.identity else "report"

        text, name = await run_in_threadpool(written)
        safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name)
        return HTMLResponse(text, headers={"content-disposition": f'attachment; filename="{safe}.html"'})

    async def _asset(self, request: Request) -> Response:
        found = self._assets.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("there is no such file\n", 404)
        kind, content = found
        text = await run_in_threadpool(content)
        return Response(text, media_type=kind, headers={"cache-control": "private, max-age=3600"})


_EMPTY_DATA: dict[str, Any] = {
    "data": {"datasets": {}, "scopes": [], "pue": None, "pues": [], "stages": [], "views": {}, "data": {}}
}
_EMPTY: dict[str, Any] = {**_EMPTY_DATA, "specs": {}}


def assets() -> dict[str, tuple[str, Callable[[], str]]]:
    """Name -> media type and content. Only these names are served, so no path leads elsewhere."""

    def joined(paths: Sequence[Path]) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)

    script, style = "text/javascript", "text/css"
    own = HERE / "assets"
    return {
        "charts.js": (script, chart_library),
        "report.js": (script, partial(joined, [TEMPLATES / name for name in SCRIPTS])),
        "page.css": (style, partial(joined, [TEMPLATES / "page.css", own / "ui.css"])),
        **{path.name: (script, partial(joined, [path])) for path in sorted(own.glob("*.js"))},
    }


def _named(parent: Path, name: str, kind: Literal["run", "group"]) -> Path:
    """The folder of a run or group: a name without separators, so nothing outside can be named."""
    folder = parent / name
    found = False
    if name not in ("", ".", "..") and "/" not in name:
        with suppress(OSError, ValueError):  # too long for a name, or no valid one
            found = (folder / f"{kind}.json").is_file()
    if not found:
        raise NotFoundError(f"unknown {kind} '{name[:120]}'", "it may have been removed")
    return folder


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    return int(text) if text.isdecimal() and len(text) < 16 else 0


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _stream(events: AsyncIterator[str]) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket: on the given port, else on the first free one from the default port on."""
    ports = [port] if port is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED))
    problem: OSError | None = None
    no_address = UsageError(
        f"cannot listen on {host}: it is not an address of this machine",
        "choose another --host: 127.0.0.1, or 0.0.0.0 for all addresses",
    )
    try:
        socket.getaddrinfo(host or None, 0)
    except (socket.gaierror, UnicodeError):
        raise no_address from None
    for number in ports:
        try:
            return socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise no_address from None
            problem = error
        except OverflowError:
            raise UsageError(f"--port {number}: expected a number from 0 to 65535") from None
    reason = problem.strerror if problem else ""
    where = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    raise UsageError(f"cannot listen on {host}, {where}: {reason}", "choose another --port; 0 takes any free one")


def serve(store: Path, token: str, listening: socket.socket, hosts: Sequence[str] = LOOPBACK) -> None:
    """Until a signal ends it."""
    server: uvicorn.Server
    pages = Server(store, stopping=lambda: server.should_exit)
    config = uvicorn.Config(
        pages.app(token, hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
        limit_concurrency=200,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listening])
