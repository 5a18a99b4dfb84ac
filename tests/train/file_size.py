"""A limit on the size of files."""

import resource
from contextlib import contextmanager


@contextmanager
def file_size_limit(limit):
    """As a quota does: writing more than this to a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
