"""`joulelab experiments`: the experiments that ship with the package."""

from __future__ import annotations

from joulelab.cli.options import AsJson


def experiments(as_json: AsJson = False) -> None:
    """List the experiments that `joulelab run` knows by name."""
    from joulelab.runs.spec import EXPERIMENTS, experiment_names
    from joulelab.runs.yaml_text import read_mapping

    rows = {name: str(read_mapping(EXPERIMENTS / f"{name}.yaml").get("about", "")) for name in experiment_names()}
    if as_json:
        import json

        print(json.dumps([{"name": name, "about": about} for name, about in rows.items()], indent=2))
        return
    width = max(len(name) for name in rows)
    for name, about in rows.items():
        print(f"{name:<{width}}  {about}")
