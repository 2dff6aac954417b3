"""The thread pool: every unit of every operation runs once, and before any unit of the next one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferflow.kernels import native

from .native_ops import NOTHING, Steps, tensor

SPANS = 400


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_operations_of_few_and_of_many_units_in_turn(threads: int) -> None:
    """A recurrence S ← S + 1 of as many tiny units as there are sequences counts how often each has run. Between two of them
    three units so short that a thread comes too late for them, and must not mistake the next operation's for theirs."""
    isa = native.isas()["portable"]
    ones, state = np.ones((SPANS, 1, 1), np.float32), np.zeros((SPANS, 1, 1, 1), np.float32)
    out, joined = np.empty_like(ones), np.empty(3, np.float32)
    x, decay = tensor(ones), tensor(ones[:, 0])
    count = native.RecurrenceArgs(x, x, x, decay, NOTHING, tensor(out), state.ctypes.data, 1, 1, 1, 1, 0)
    parts = native.array(native.Tensor, [tensor(ones[0, 0], native.NONE)] * 3)
    join = native.ConcatArgs(tensor(joined, native.NONE), 3, parts)
    codes = [native.OPCODES.index(name) for name in ("concat", "recurrence")]
    pair = [native.Op(code, 0, ctypes.addressof(args)) for code, args in zip(codes, (join, count), strict=True)]
    rounds, repeats = 50, 300
    ops = native.array(native.Op, pair * rounds)
    pool, step = native.Pool(threads), Steps([1] * SPANS, [1] * SPANS)
    for n in range(repeats):
        native.run(pool, isa, ops, len(ops), step.struct)
        assert (state == (n + 1) * rounds).all()


GROUPS = {  # files of a control group file system, and the lines of /proc/self/cgroup that point into it
    "v2": ({"a/b/cpu.max": "150000 100000"}, "0::/a/b\n", 2),
    "v2, set above": ({"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 1),
    "v2, seen as the root": ({"cpu.max": "300000 100000"}, "0::/../x\n", 3),
    "v1": ({"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, "4:memory:/z\n3:cpu:/a\n", 3),
    "v1, two controllers": (
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/a\n", 1,
    ),
    "no limit": ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, "3:cpu:/a\n", None),
    "nonsense": ({"a/cpu.max": "many few", "cpu.max": ""}, "0::/a\n", None),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_quotas_of_control_groups(case: str, tmp_path: Path) -> None:
    files, lines, expected = GROUPS[case]
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(lines)
    assert min(native._quotas(tmp_path / "own", tmp_path / "cgroup"), default=None) == expected


def test_a_process_under_a_quota_of_one_processor_uses_one_thread() -> None:
    """In a real control group, where this user may make one."""
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    group = (root if v2 else root / "cpu") / f"inferflow-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if v2:
            (group / "cpu.max").write_text("100000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("100000")
        program = (
            f"import os, pathlib; pathlib.Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
            "from inferflow.kernels import native; print(native.Pool().threads)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        if "OSError" in done.stderr or "PermissionError" in done.stderr:
            pytest.skip("processes cannot be moved into control groups here")
        assert done.stdout.strip() == "1", done.stderr
    except OSError as error:
        pytest.skip(f"no quota can be set here: {error}")
    finally:
        group.rmdir()
