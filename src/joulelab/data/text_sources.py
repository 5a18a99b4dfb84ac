"""What can be said of a source of text before anything of it is read, by a login node too."""

from __future__ import annotations

from joulelab import lookup
from joulelab.data import samples, sources
from joulelab.errors import ConfigError

# Subsets of sample:reviews, by the value of its `source` column.
REVIEW_SOURCES = {"short": ("rotten_tomatoes",), "long": ("imdb",), "all": ("rotten_tomatoes", "imdb")}


def check_source(source: str, subset: str) -> sources.Source:
    """What can be known before anything is read: that it is there, and that it has such a subset."""
    found = sources.parse(source)
    if found.kind in ("file", "folder") and subset != "all":
        raise ConfigError(f"subset '{subset}' of {source}: files and folders have no subsets", "set data.subset=all")
    if found.kind == "sample":
        sample = samples.find(found.name)
        if sample.kind != "labelled-text":
            raise ConfigError(
                f"sample:{found.name} is a model ({sample.kind}), not labelled text", "use sample:reviews"
            )
        if subset not in REVIEW_SOURCES:
            raise lookup.unknown("subset", subset, REVIEW_SOURCES, "subsets of sample:reviews: short, long, all")
    return found
