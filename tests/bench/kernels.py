"""How fast a product is by itself: ``python -m tests.bench.kernels``, for each format, instruction set and number of rows.

A matrix that fits the cache is multiplied over and over by one thread, then one as large as a model's by all threads. The
rates are in 10^9 weights a second, times the rows of activations; GB/s are of the weights' bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from ctypes import POINTER, c_void_p, cast, pointer

import numpy as np

from inferflow.kernels import native

PLANES = {"q3": 2, "q3.5": 3, "q4": 4}


class Product:
    """A matrix [rows, cols] of arbitrary codes and `tokens` quantised rows."""

    def __init__(self, form: str, rows: int, cols: int, tokens: int) -> None:
        size = 256 + 64 * PLANES[form] if form in PLANES else 1024
        tiles, groups = rows // native.TILE, cols // 64
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 256, tiles * groups * size + 64, dtype=np.uint8)
        start = -codes.ctypes.data % 64
        scales = np.ones(tiles * groups * 16, np.uint8)
        row_scales = np.ones(rows, np.float32)
        book = rng.integers(0, 64, 128, dtype=np.uint8)
        matrix = native.Matrix(
            format=native.FORMATS.index(form), group=64, rows=rows, cols=cols, padded=cols, stack=1, rotation=0,
            codes=codes.ctypes.data + start, scales=scales.ctypes.data, row_scales=row_scales.ctypes.data,
            codebook=book.ctypes.data,
        )  # fmt: skip
        self.bytes = tiles * groups * (size + 16)
        self.weights = rows * cols
        width = -(-(cols + 8 * groups) // 64) * 16
        activations = np.zeros((tokens, width), np.int32)
        activations.view(np.int8)[:, :cols] = rng.integers(-127, 128, (tokens, cols))
        activations.view(np.float32)[:, cols // 4 : cols // 4 + groups] = 1
        out = np.zeros((tokens, rows), np.float32)
        outs = native.Tensor(data=out.ctypes.data, buffer=-1, ndim=1, stride=rows)
        source = native.Tensor(data=activations.ctypes.data, buffer=-1, ndim=1, stride=width)
        args = native.LinearArgs(input=source, count=1, matrices=pointer(matrix), outs=pointer(outs))
        args.residuals = cast(None, POINTER(native.Tensor))
        self.ops = native.array(
            native.Op, [native.Op(code=native.OPCODES.index("linear"), args=cast(pointer(args), c_void_p))]
        )
        self.step = native.Step(tokens=tokens, rows=tokens)
        self.keep = (codes, scales, row_scales, book, matrix, activations, out, outs, source, args)

    def seconds(self, pool: native.Pool, isa: int, least: float = 0.05) -> float:
        """Of one product, over at least `least` seconds."""
        native.run(pool, isa, self.ops, 1, self.step)
        count, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < least or not count:
            native.run(pool, isa, self.ops, 1, self.step)
            count += 1
        return spent / count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--isa", nargs="+", default=[native.isa_name()], help="default: the best one")
    parser.add_argument("--formats", nargs="+", default=["q3", "q3.5", "q4", "q8"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    one, team = native.Pool(1), native.Pool()
    print(f"memory: {native.read_bandwidth():.1f} GB/s")
    for isa in options.isa:
        number = native.isas()[native.isa_name(isa)]
        for form in options.formats:
            small = {n: Product(form, 640, 1024, n) for n in options.tokens}
            large = Product(form, 16384, 8192, 1)
            times: dict[int, list[float]] = {n: [] for n in small}
            whole = []
            for _ in range(options.rounds):
                for n, product in small.items():
                    times[n].append(product.seconds(one, number))
                whole.append(large.seconds(team, number, 0.2))
            rates = "  ".join(f"{n}: {small[n].weights * n / statistics.median(t) / 1e9:.1f}" for n, t in times.items())
            took = statistics.median(whole)
            print(
                f"{isa} {form}, one thread in cache, rows: {rates};  {team.threads} threads, 128 M weights: "
                f"{large.weights / took / 1e9:.1f}, {large.bytes / took / 1e9:.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
