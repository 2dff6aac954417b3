"""Figures that users feel: ``python -m tests.bench.promises DIR``, of a quantised model's directory.

* steps a second of a two-layer, 64-wide model, driven from Python one step at a time;
* from the start of the process to the first token, and the peak of memory against weights + cache;
* decode with a niced process that keeps one processor busy, against decode alone, in turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from inferflow.llm import LLM
from inferflow.runtime.engine import Engine
from inferflow.runtime.sampler import SamplingParams
from tests import tiny

ROUNDS = 5
TINY = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 1024}


def median(measure: Callable[[], float], rounds: int = ROUNDS) -> float:
    return statistics.median(measure() for _ in range(rounds))


def steps_a_second(engine: Engine, steps: int) -> float:
    """Greedy decode of one sequence."""
    engine.add([5, 6, 7], SamplingParams(max_tokens=steps, ignore_eos=True))
    engine.step()
    began = time.perf_counter()
    count = 0
    while engine.running:
        engine.step()
        count += 1
    return count / (time.perf_counter() - began)


def tiny_steps() -> float:
    with tempfile.TemporaryDirectory() as folder, LLM(tiny.write(Path(folder) / "m", TINY, tiny.tensors(TINY))) as llm:
        return median(lambda: steps_a_second(llm.engine, 250))


def first_token(folder: str) -> float:
    """Seconds from the start of ``inferflow generate -m DIR -n 1`` to the first byte of the answer, modules compiled before."""
    command = [sys.executable, "-m", "inferflow.cli", "generate", "Hello", "-m", folder, "-n", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if process.returncode or not first:
        raise RuntimeError(f"generate ended with status {process.returncode}")
    return seconds


PEAK = """
import sys
from pathlib import Path
from inferflow import LLM
with LLM(sys.argv[1], max_model_len=1024) as llm:
    llm.generate([list(range(10, 522))], max_tokens=64, ignore_eos=True)
    weights = sum(f.stat().st_size for f in Path(sys.argv[1]).glob("*.safetensors"))
    cache = sum(a.nbytes for a in llm.engine.cache.arrays) / llm.engine.pool.blocks * (576 / llm.engine.block_size)
peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
print(peak, weights, cache)
"""


def beside_a_busy_process(folder: str) -> tuple[float, float]:
    """(tokens a second alone, beside a niced process that never rests), medians of rounds in turns."""
    alone, beside = [], []
    with LLM(folder, max_model_len=512) as llm:
        for _ in range(ROUNDS):
            alone.append(steps_a_second(llm.engine, 64))
            busy = subprocess.Popen([sys.executable, "-c", "import os; os.nice(10)\nwhile True: pass"])
            time.sleep(0.3)
            beside.append(steps_a_second(llm.engine, 64))
            busy.kill()
            busy.wait()
    return statistics.median(alone), statistics.median(beside)


def main() -> None:
    folder = sys.argv[1]
    print(f"two layers, 64 wide: {tiny_steps():.0f} steps/s")
    first_token(folder)  # into the page cache
    print(f"first token: {median(lambda: first_token(folder)):.2f} s from the start of the process")
    done = subprocess.run([sys.executable, "-c", PEAK, folder], check=True, capture_output=True, text=True)
    peak, weights, cache = (float(n) / 1e6 for n in done.stdout.split())
    limit = 1.2 * (weights + cache) + 100
    print(f"peak memory {peak:.0f} MB: weights {weights:.0f}, cache in use {cache:.0f}, limit {limit:.0f}")
    alone, beside = beside_a_busy_process(folder)
    print(
        f"decode {alone:.0f} tokens/s; beside a niced busy process {beside:.0f} ({beside / alone:.0%}), {os.cpu_count()} cpus"
    )


if __name__ == "__main__":
    main()
