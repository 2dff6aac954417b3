"""The native engine: one sequence's logits never depend on what shares its step; and they are the reference's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inferflow.errors import ArgumentError, InferflowError
from inferflow.kernels import native
from inferflow.kernels import reference as ref
from inferflow.llm import LLM
from inferflow.runtime.batch import Span, StepBatch
from inferflow.runtime.engine import Engine
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.native import KV_TYPES, NativeExecutor
from tests import tiny

CONFIG = {
    **tiny.CONFIG, "hidden_size": 128, "intermediate_size": 208, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 307, "max_position_embeddings": 512,
}  # fmt: skip
WEIGHTS = ("f32", "bf16", "f16", "q8", "q4", "q3.5", "q3")
ISAS = tuple(native.isas())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("native"), CONFIG, tiny.tensors(CONFIG))


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [list(map(int, rng.integers(3, 300, n))) for n in rng.integers(1, 90, count)]


def ragged(executor: NativeExecutor, ids: list[list[int]], seed: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(sequence, position, logits) of every token, in steps of random chunks of random sequences: they join late and leave
    early."""
    rng = np.random.default_rng(seed)
    size = executor.block_size
    blocks = [-(-len(i) // size) for i in ids]
    cache = executor.cache(sum(blocks))
    order = rng.permutation(sum(blocks))
    tables = [tuple(map(int, order[sum(blocks[:n]) : sum(blocks[: n + 1])])) for n in range(len(ids))]
    past = [0] * len(ids)
    while any(p < len(i) for p, i in zip(past, ids, strict=True)):
        live = [n for n in range(len(ids)) if past[n] < len(ids[n])]
        chosen = [int(n) for n in rng.permutation(live)[: rng.integers(1, len(live) + 1)]]
        spans, tokens, positions = [], [], []
        for n in chosen:
            count = int(min(rng.choice([1, 1, 7, 64]), len(ids[n]) - past[n]))
            spans.append(Span(len(tokens), count, past[n], tables[n], len(ids[n])))
            tokens += ids[n][past[n] : past[n] + count]
            positions += range(past[n], past[n] + count)
        flat = [np.asarray(a, np.int64) for a in (tokens, positions, range(len(tokens)))]
        logits = executor.run(StepBatch(flat[0], flat[1], tuple(spans), flat[2]), cache).copy()
        for n, span in zip(chosen, spans, strict=True):
            for k in range(span.count):
                yield n, span.past + k, logits[span.start + k]
            past[n] += span.count


def check_invariance(llm: LLM, executor: NativeExecutor, count: int) -> None:
    ids = prompts(count)
    alone = []
    for sequence in ids:
        whole = llm.logits(sequence)
        for chunk in (1, 7, 64):
            np.testing.assert_array_equal(llm.logits(sequence, chunk=chunk), whole)
        alone.append(whole)
    seen = 0
    for n, position, logits in ragged(executor, ids, count):
        np.testing.assert_array_equal(logits, alone[n][position])
        seen += 1
    assert seen == sum(map(len, ids))


@pytest.mark.parametrize("quant", WEIGHTS)
@pytest.mark.parametrize("kv", KV_TYPES)
def test_logits_do_not_depend_on_the_batch(model: Path, quant: str, kv: str) -> None:
    with LLM(model, quant=quant, kv=kv) as llm:
        executor = llm.executor(kv=kv)
        assert isinstance(executor, NativeExecutor)
        check_invariance(llm, executor, {"f32": 2, "f16": 5, "bf16": 9, "int8": 32}[kv])


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_is_invariant_and_near_the_others(model: Path, isa: str) -> None:
    ids = prompts(3)[2]
    for quant in WEIGHTS:
        with LLM(model, quant=quant, kv="f32", isa=isa) as llm, LLM(model, quant=quant, kv="f32") as best:
            executor = llm.executor(kv="f32", isa=isa)
            assert isinstance(executor, NativeExecutor)
            assert executor.isa == isa
            check_invariance(llm, executor, 3)
            np.testing.assert_allclose(llm.logits(ids), best.logits(ids), atol=2e-3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_bit(model: Path, threads: int) -> None:
    ids = prompts(1)[0]
    with LLM(model, quant="q3.5") as llm, LLM(model, quant="q3.5", threads=threads) as other:
        np.testing.assert_array_equal(llm.logits(ids), other.logits(ids))


@pytest.mark.parametrize("quant", ["f32", "bf16", "f16"])
def test_float_weights_are_the_reference(model: Path, quant: str) -> None:
    ids = prompts(1)[0]
    with LLM(model, quant=quant, kv="f32") as llm, LLM(model, quant=quant, engine="reference") as definition:
        want = definition.logits(ids)
        assert np.abs(llm.logits(ids) - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("quant", ["q8", "q4", "q3.5", "q3"])
def test_low_bit_weights_are_the_reference_on_the_dequantised_ones(model: Path, quant: str) -> None:
    """Each product, given the same inputs: an activation on the edge between two integers may fall on either side of it when
    the inputs differ in their last bit, so whole models agree only as far as that."""
    ids = prompts(1)[0]
    with LLM(model, quant=quant, kv="f32") as llm:
        graph, weights = llm.model.graph, llm.model.weights
        linears = [node for node in graph.nodes if node.op == "linear"]
        names = {v: name for name, v in graph.names.items()}
        wanted = [names[v] for node in linears for v in (node.inputs[0], node.outputs[0]) if v in names]
        found = llm.forward(ids, wanted)
        checked = 0
        for node in linears:
            x, y = (found.get(names.get(v, "")) for v in (node.inputs[0], node.outputs[0]))
            stored = weights.stored(node.weights[0].key)
            if x is None or y is None:
                continue
            assert stored.group
            want = ref.round_activations(x, stored.group, stored.rotation) @ stored.widen().T
            assert np.abs(y - want).max() <= 1e-4 * np.abs(want).max()
            checked += 1
        assert checked >= len(linears) - 2  # the output has the rows selected, which have no name
        reference = Engine(graph, ReferenceExecutor(graph, weights, int8_activations=True), max_len=len(ids))
        got, want = llm.logits(ids), reference.forward(ids)["logits"]
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


def test_nan_in_one_sequence_harms_no_other(model: Path) -> None:
    """An embedding row of NaN: whoever uses that token has no logits, and everybody else has the same as alone."""
    weights = tiny.tensors(CONFIG)
    weights["model.embed_tokens.weight"][5] = np.nan
    folder = tiny.write(model.parent / "nan", CONFIG, weights)
    good, bad = [9, 10, 11, 12] * 10, [9, 5, 11, 12] * 10
    for quant in ("f32", "q3.5,token_embd=f32"):
        with LLM(folder, quant=quant) as llm:
            alone = llm.logits(good)
            executor = llm.executor()
            assert isinstance(executor, NativeExecutor)
            seen = {0: 0, 1: 0}
            for n, position, logits in ragged(executor, [good, bad], 1):
                seen[n] += 1
                if n == 0:
                    np.testing.assert_array_equal(logits, alone[position])
                elif position:
                    assert np.isnan(logits).all()
            assert seen == {0: 40, 1: 40}


def test_keys_that_overflow_the_cache_are_hinted_at(tmp_path: Path) -> None:
    weights = tiny.tensors()
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.k_proj.weight"] *= np.float32(1e6)
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"] *= np.float32(1e-6)
    path = tiny.write(tmp_path / "m", weights=weights)
    with (
        LLM(path, engine="native", kv="f16") as llm,
        pytest.raises(InferflowError, match=r"no finite logits .*overflow the float16 cache: try kv='bf16'.*--kv"),
    ):
        llm.generate([[3, 4, 5]], max_tokens=2)
    with LLM(path, engine="native", kv="bf16") as llm:
        assert len(llm.generate([[3, 4, 5]], max_tokens=2, ignore_eos=True)[0].ids) == 2


def test_threads_share_one_model(model: Path) -> None:
    with LLM(model, quant="q4") as llm:
        want = [llm.generate([p], max_tokens=8, ignore_eos=True)[0].ids for p in prompts(4)]
        got: dict[int, tuple[int, ...]] = {}

        def work(n: int) -> None:
            got[n] = llm.generate([prompts(4)[n]], max_tokens=8, ignore_eos=True)[0].ids

        team = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        assert [got[n] for n in range(4)] == want


SCRIPT = """
import os, sys
from inferflow import LLM
llm = LLM(sys.argv[1], quant="q4", threads=2)
want = llm.logits([5, 6, 7]).tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if llm.logits([5, 6, 7]).tobytes() == want else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert llm.logits([5, 6, 7]).tobytes() == want
print("fine")
"""


def test_a_forked_child_has_threads_of_its_own(model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity cannot be set here")
def test_threads_follow_the_affinity() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from inferflow.kernels import native; print(native.default_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_wrong_values_are_refused(model: Path) -> None:
    for options in (
        {"kv": "int4"},
        {"threads": 0},
        {"threads": 5000},
        {"isa": "sse9"},
        {"engine": "gpu"},
        {"quant": "q9"},
    ):
        with pytest.raises(ArgumentError, match=r"\(.+\)"):
            LLM(model, **options)  # type: ignore[arg-type]
