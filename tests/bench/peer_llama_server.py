"""llama.cpp's own HTTP server, from the `xllamacpp` wheel, until its stdin is closed.

    python -m tests.bench.peer_llama_server MODEL.gguf PORT --slots 16 --length 512

A slot holds one sequence. Its cache of the states of old prompts is off: no prompt comes twice, so it would cost and not help.
"""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    for name, default in (("slots", 16), ("length", 512), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    import xllamacpp  # type: ignore[import-untyped]

    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.port = options.port
    parameters.ui = False
    parameters.verbosity = 1  # errors only
    parameters.n_parallel = options.slots
    parameters.n_ctx = options.slots * options.length
    parameters.cache_ram_mib = 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(parameters)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
