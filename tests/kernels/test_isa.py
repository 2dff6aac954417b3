"""Instruction sets: the baseline holds none of the newer ones' instructions, so that it starts on any processor."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inferflow.kernels import native

from .native_ops import ISAS

LIBRARY = Path(native.__file__).parent / "cpu" / "engine.so"
BASELINE = {"dispatch.cpp", "engine.cpp", "pool.cpp", "isa_portable.cpp"}


def files_of_functions() -> dict[int, str]:
    """Address -> source file of every local function; "" for those that are visible to the linker."""
    out = subprocess.run(["readelf", "-sW", LIBRARY], capture_output=True, text=True, check=True).stdout
    found, current = {}, ""
    for line in out.split(".symtab")[1].splitlines():
        parts = line.split()
        if len(parts) < 8:
            continue
        if parts[3] == "FILE":
            current = parts[7]
        elif parts[3] == "FUNC" and parts[6] != "UND":
            found[int(parts[1], 16)] = current if parts[4] == "LOCAL" else ""
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64 instructions")
@pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("readelf")), reason="needs binutils")
def test_the_baseline_holds_no_newer_instructions() -> None:
    files = files_of_functions()
    out = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    wide: dict[str, int] = {}
    count: dict[str, int] = {}
    current = "?"
    for line in out.splitlines():
        if head := re.match(r"([0-9a-f]{16}) <", line):
            current = files.get(int(head[1], 16), "?")
        elif re.search(r"%[yz]mm|\{%k|\tv[a-z]", line):
            wide[current] = wide.get(current, 0) + 1
        count[current] = count.get(current, 0) + 1
    assert count.keys() >= {
        "engine.cpp",
        "pool.cpp",
        "isa_portable.cpp",
        "isa_avx2.cpp",
        "isa_avx512.cpp",
        "isa_avx512vnni.cpp",
        "",
    }
    assert wide["isa_avx512.cpp"] > 1000
    assert {file: n for file, n in wide.items() if file in {*BASELINE, "", "?"}} == {}


def test_the_best_instruction_set_comes_first() -> None:
    names = list(native.isas())
    order = ["avx512vnni", "avx512", "avx2", "neon", "portable"]
    assert names == [name for name in order if name in names]
    assert names[-1] == "portable"
    assert native.isa_name() == names[0]


@pytest.mark.parametrize("isa", ["avx512vnni", "avx512", "avx2", "neon", "portable"])
def test_this_instruction_set_is_tested_here(isa: str) -> None:
    if isa not in native.isas():
        pytest.skip(f"this build or this processor has no {isa}: its kernels are not run by these tests")
    assert isa in ISAS
