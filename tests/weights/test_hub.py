"""Hub repositories: what is fetched of which, and the real library's cache without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferflow.errors import FetchError
from inferflow.weights.hub import HuggingFaceHub, _bar
from inferflow.weights.locate import locate
from tests.weights.fakes import FakeHub

QUANTS = ["README.md", "mmproj-F16.gguf", "tiny-BF16.gguf", "tiny-F16.gguf", "tiny-Q4_0.gguf", "tiny-Q4_0_4_8.gguf"]
QUANTS += ["tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", *(f"Q8_0/tiny-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2))]
CONFIG = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
]
CODE = ["modeling_tiny.py", "README.md", ".gitattributes", "training_args.bin", "onnx/model.onnx", "onnx/config.json"]


@pytest.mark.parametrize(
    ("weights", "left_out"),
    [
        (["model.safetensors"], ["pytorch_model.bin", "onnx/model.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"], []),
        (["model.safetensors"], ["consolidated.safetensors"]),
        (["weights.safetensors"], ["model.gguf"]),
        (["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"], ["x.gguf", "rng.bin"]),
    ],
)
def test_only_what_a_model_needs_is_fetched(weights: list[str], left_out: list[str], tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, [*CONFIG, *weights, *CODE, *left_out])
    assert locate("org/name", hub=hub) == tmp_path
    assert sorted(hub.fetched) == sorted([*CONFIG, *weights])
    assert not hub.local


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q4_k_s", "tiny-Q4_K_S.gguf"),
        ("F16", "tiny-F16.gguf"),
        ("bf16", "tiny-BF16.gguf"),
        ("Q4_0", "tiny-Q4_0.gguf"),
        ("Q8_0", "Q8_0/tiny-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_quant_picks_one_gguf(quant: str, file: str, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, QUANTS)
    assert locate(f"org/name-GGUF:{quant}", hub=hub) == tmp_path / file
    assert hub.fetched == tuple(name for name in QUANTS if name.startswith(file[:13]) and name.endswith(file[-5:]))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/name", "7 GGUF models fit: .*tiny-BF16.gguf.*org/name:PART"),
        ("org/name:Q4_K", r"2 GGUF models fit: tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf"),
        ("org/name:Q9", "no GGUF model's name contains 'Q9': .*tiny-Q4_0.gguf"),
    ],
)
def test_a_quant_that_fits_none_or_several_lists_the_choices(model: str, words: str, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, QUANTS)
    with pytest.raises(FetchError, match=words) as caught:
        locate(model, hub=hub)
    assert "mmproj" not in str(caught.value)
    assert hub.fetched == ()


def test_a_repository_with_one_gguf_needs_no_quant(tmp_path: Path) -> None:
    assert locate("org/name", hub=FakeHub(tmp_path, ["a.gguf", "README.md"])) == tmp_path / "a.gguf"


@pytest.mark.parametrize(
    ("files", "model", "words"),
    [
        (["README.md", "x.py"], "org/name", "there is no config.json .* in the repository"),
        (["config.json", "model.safetensors"], "org/name:Q4_0", "there is no GGUF file in the repository"),
        ([], "org/name", "is empty"),
        (["a-00001-of-00002.gguf"], "org/name", "split into 2 files, of which 1"),
    ],
)
def test_a_repository_without_a_model_is_told(files: list[str], model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=words):
        locate(model, hub=FakeHub(tmp_path, files))


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_cache_serves(offline: bool, tmp_path: Path) -> None:
    locate("org/name", hub=FakeHub(tmp_path, ["config.json", "model.safetensors"]))
    down = FakeHub(tmp_path, [], up=False)
    assert locate("org/name", hub=down, offline=offline) == tmp_path
    assert down.local
    with pytest.raises(FetchError, match="offline is asked for" if offline else "cannot be reached"):
        locate("org/name", hub=FakeHub(tmp_path / "empty", [], up=False), offline=offline)


def test_a_path_mistaken_for_a_repository_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/tiny-chat").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FetchError, match=r"did you mean 'models/tiny-chat'\?"):
        locate("models/tiny-chta", hub=FakeHub(tmp_path / "none", [], up=False))


def test_the_real_library_serves_its_cache_offline(tmp_path: Path) -> None:
    home = tmp_path / "hub/models--org--name"
    snapshot = home / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs/main").write_text("a" * 40)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    code = "import sys; from inferflow.weights.locate import FetchError, locate\n"
    code += "try: print(locate(sys.argv[1]))\nexcept FetchError as error: print('refused:', error)"

    def run(model: str) -> str:
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", code, model]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    assert run("org/name") == str(snapshot)
    assert run("org/other").startswith("refused: org/other: HF_HUB_OFFLINE is set and it is not in the cache")
    assert run("org/--").startswith("refused: org/--: ")


def test_the_real_librarys_refusals_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    raised: list[Exception] = [errors.HFValidationError("x"), OSError("cable cut"), RuntimeError("a\nb")]
    words = ["no such repository", "cannot be reached: OSError: cable cut", "cannot be reached: RuntimeError: a"]
    for error, word in zip(raised, words, strict=True):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
        with pytest.raises(FetchError, match=word):
            HuggingFaceHub().listing("org/name")


def test_the_librarys_bar_counts_bytes_once_and_draws_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    bar = _bar(lambda *step: seen.append(step))
    wire = bar(total=0, unit="B", name="huggingface_hub.snapshot_download.transfer")
    disk = bar(total=0, unit="B", name="huggingface_hub.snapshot_download")
    files = bar(["a", "b"], total=2)
    disk.total = 100
    for which in (wire, disk, files):
        which.update(40)
    disk.update(60)
    assert list(files) == ["a", "b"]
    assert seen == [("download", 40, 100), ("download", 100, 100)]
    assert capfd.readouterr() == ("", "")
