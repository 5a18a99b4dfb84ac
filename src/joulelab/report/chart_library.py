"""The chart library that every page carries: Vega, Vega-Lite and vega-embed as one script.

It comes out of the package that is installed anyway, which takes a second to put it together; the result is kept in the
user's cache, under the package's version and its own hash, and anything that does not match is made anew.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version

from joulelab.runs.paths import cache_folder


@cache
def chart_library() -> str:
    kept = _kept()
    if kept is not None:
        return kept
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if "</script" in script.lower():  # would end the element it is put into
        script = script.replace("</script", "<\\/script")
    with suppress(OSError, RuntimeError):  # a cache that cannot be written costs a second, and no more
        _keep(script)
    return script


def _stem() -> str:
    return f"charts-{version('vl-convert-python')}"


def _kept() -> str | None:
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # no home, no right to read, something else in its place
        for path in cache_folder().glob(f"{_stem()}-*.js"):
            script = path.read_text(encoding="utf-8")
            if path.stem == f"{_stem()}-{_hash(script)}":
                return script
    return None


def _keep(script: str) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_stem()}.{os.getpid()}.tmp"
    temporary.write_text(script, encoding="utf-8")
    temporary.replace(folder / f"{_stem()}-{_hash(script)}.js")


def _hash(script: str) -> str:
    return hashlib.sha256(script.encode()).hexdigest()[:16]
