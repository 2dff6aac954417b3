"""How much memory the cache takes: what was asked for, or what is free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryPlan", "free_memory", "plan_memory"]

SHARE = 0.75  # of what is free: weights that are mapped are not in memory yet


@dataclass(frozen=True)
class MemoryPlan:
    """`blocks` of the cache, and why so many, as a sentence."""

    blocks: int
    reason: str


def plan_memory(
    block_bytes: int, block_size: int, max_len: int, slots: int, asked: int | None, free: int | None
) -> MemoryPlan:
    """Blocks for `slots` sequences of `max_len` tokens, as far as `free` bytes allow it (None: nobody knows), and for one in
    any case; `asked` blocks, where the user says how many."""
    one = -(-max_len // block_size)
    wanted = one * slots
    affordable = wanted if free is None or not block_bytes else int(SHARE * free) // block_bytes
    blocks = max(one, min(wanted, affordable)) if asked is None else asked
    size = f"{blocks} blocks of {block_size} tokens, {_bytes(blocks * block_bytes)}"
    if asked is not None:
        why = "as asked"
    elif blocks < wanted:
        why = f"of {_bytes(free or 0)} that are free; {wanted} would hold {slots} sequences of {max_len} tokens"
    else:
        why = f"for {slots} sequences of {max_len} tokens"
    return MemoryPlan(blocks, f"KV cache: {size}, {why}")


def free_memory() -> int | None:
    """Bytes that this process may still use, within its control group; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:  # "max" is no number, and there may be no group
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(numbers["file"])  # pages of files go when they are in the way
    except (OSError, ValueError, KeyError):
        return kilobytes * 1024
    return max(0, min(kilobytes * 1024, limit - used))


def _bytes(number: int) -> str:
    unit, size = ("GB", 1e9) if number >= 1e9 else ("MB", 1e6)
    return f"{number / size:.4g} {unit}"
