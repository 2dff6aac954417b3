"""Specs that ask for too much are refused, in seconds and within memory that any machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .bombs import BOMBS

SECONDS = 15  # of processor time, on a machine that is busy with other things; three are usual for the longest


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[float, str]]:
    """What was said of each bomb, and after how many seconds; all in one process with little memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("bombs.py"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (seconds, text) for name, seconds, text in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb(said: dict[str, tuple[float, str]], name: str) -> None:
    seconds, text = said[name]
    assert BOMBS[name][1] in text
    assert "ESCAPED" not in text
    assert seconds < SECONDS
    assert max(map(len, text.split("\n"))) < 1000
    assert len(text) < 4000
