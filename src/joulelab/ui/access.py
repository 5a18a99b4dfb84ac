"""Who may use the local web view: a token, the names it is reached by, and the same origin; headers of every response.

Any web page that a browser shows can send requests to 127.0.0.1, and every user of a shared login node can connect to
it. Three checks refuse them, each before a page is computed:

- `Host` must be a name of this machine, or the address that the request was sent to: a foreign name that resolves to
  127.0.0.1 (DNS rebinding) is refused.
- `Origin`, which a browser adds to requests of scripts and forms, must be this server; changes require it.
- The token is in the printed address. It is exchanged for a cookie and removed from the address, so that it is not
  kept in the history. Comparison takes the same time for every wrong token.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Vega compiles its expressions with `new Function`, hence 'unsafe-eval'; scripts come from this server only, and none
# is inline, so text of a run cannot become one. vega-embed adds a style element.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_SAFE_METHODS = ("GET", "HEAD")


def new_token() -> str:
    return secrets.token_urlsafe(32)


class Access:
    """ASGI middleware that lets through what passes all checks."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str] = LOOPBACK) -> None:
        self._app = app
        self._token = token
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope)
        refusal = self._refusal(request) or self._exchange(request) or self._without_token(request)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The refusal of a request that no page of this server sends; None if it is allowed."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        # The address of the connection is safe: it is not a name that somebody else can make resolve to this machine.
        server = request.scope.get("server") or ("", 0)
        if _name(host) not in {*self._hosts, str(server[0]).lower()}:
            return _refused(f"unknown host name '{_name(host)[:80]}': open the address that `joulelab ui` printed")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _refused("request from another origin")
        if origin is None and request.method not in _SAFE_METHODS and not _bearer(request):
            return _refused("request to change something without an Origin header")
        return None

    def _exchange(self, request: Request) -> Response | None:
        """Exchange the token of the printed address for a cookie."""
        given = request.query_params.get("token")
        if given is None or request.method not in _SAFE_METHODS:
            return None
        if not self._is_token(given):
            return _refused(_NO_TOKEN)
        rest = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
        response = RedirectResponse(request.url.path + (f"?{rest}" if rest else ""), status_code=303)
        response.set_cookie(_cookie(request), self._token, httponly=True, samesite="strict")
        return response

    def _without_token(self, request: Request) -> Response | None:
        given = _bearer(request) or request.cookies.get(_cookie(request))
        return None if given is not None and self._is_token(given) else _refused(_NO_TOKEN)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


_NO_TOKEN = "token missing or wrong: open the address that `joulelab ui` printed, which contains it"


def _refused(why: str) -> Response:
    return PlainTextResponse(f"refused: {why}\n", status_code=403)


def _name(host: str) -> str:
    """Without the port, which differs behind an SSH tunnel."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _bearer(request: Request) -> str | None:
    """For scripts: `Authorization: Bearer TOKEN`, which no page of another site can send."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else None


def _cookie(request: Request) -> str:
    """Browsers send cookies of a host to all its ports: servers on two ports need two names."""
    server = request.scope.get("server") or ("", 0)
    return f"joulelab-{server[1]}"
