"""Writing what a user asked for: errors of the system name his file or folder, never one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import system_error

__all__ = ["PREFIX", "writing"]

PREFIX = ".inferflow-"  # of files and folders that stand beside an output until it is whole


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes an InferflowError about `path`; one about a file that is neither `path` nor made for it by us
    stays as it is."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            named = Path(str(error.filename))
            if named != path and not any(part.startswith(PREFIX) for part in named.parts):
                raise
        raise system_error(error, str(path)) from None
