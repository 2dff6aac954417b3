"""The house rules that no linter knows: what an import costs, where model families may be named, how long files are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGES = ("inferflow", "model_specs", "partition", "quant")
THERE = [name for name in PACKAGES if (ROOT / name / "__init__.py").exists()]
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
MAX_LINES = 450

FAMILIES = """
llama mistral mixtral qwen gemma phi gpt2 gptj gpt_neo neox bigcode falcon mpt bloom opt stablelm starcoder olmo cohere
granite glm nemotron exaone smollm ernie deepseek dbrx arcee seed_oss apertus hunyuan gpt_oss
"""


def families() -> set[str]:
    """The words above, and what the shipped specs are called and match."""
    words = set(re.findall(r"\w+", FAMILIES))
    for path in (ROOT / "model_specs").glob("*.toml"):
        match = tomllib.loads(path.read_text(encoding="utf-8")).get("match")
        if match:
            words |= {path.stem, *match.get("model_type", ())}
    return words


def pattern(words: set[str]) -> re.Pattern[str]:
    """Finds a family's name in lower-case text. Long names also inside a word (``tinyllama``); short ones, and one that
    begins an English word, by themselves only; the verb in ``opt-in`` is none. ``_`` stands for any joint."""
    parts = []
    for word in sorted(words):
        body = re.escape(word.lower()).replace("_", "[-_ .]?")
        inside_words = len(word) >= 5 and word != "cohere"
        parts.append(body if inside_words else rf"(?<![a-z]){body}(?![a-z])")
    return re.compile("|".join(parts).replace("(?<![a-z])opt(?![a-z])", "(?<![a-z])opt(?![a-z]|[- ](?:in|out))"))


def text_files(folder: Path) -> list[Path]:
    """All files but what builds and Python leave behind."""
    built = {".so", ".pyd", ".pyc", ".o"}
    return [p for p in folder.rglob("*") if p.is_file() and p.suffix not in built and "__pycache__" not in p.parts]


def test_the_pattern_finds_families_and_only_these() -> None:
    find = pattern(families()).search
    for text in (
        "llama",
        "tinyllama-1b",
        "qwen2_moe",
        "an opt model",
        "gpt-oss",
        "gpt_oss",
        "phi3",
        "class phi:",
        "glm4",
    ):
        assert find(text), text
    for text in ("option", "optional", "opt-in", "dolphin", "coherent", "compute", "philosophy", "adopt", "gpt"):
        assert not find(text), text


def test_no_model_family_is_named_in_the_engine() -> None:
    find, offences = pattern(families()).search, []
    files = text_files(ROOT / "inferflow")
    assert len(files) > 10
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if find(path.name.lower()):
            offences.append(name)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if hit := find(line.lower()):
                offences.append(f"{name}:{number}: {hit[0]}")
    assert offences == []


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_nothing_in_the_engine_imports_torch_or_transformers() -> None:
    out = python(
        "import sys, pkgutil, importlib, inferflow\n"
        "names = [m.name for m in pkgutil.walk_packages(inferflow.__path__, 'inferflow.')]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__') and not name.startswith('inferflow.server'):\n"
        "        importlib.import_module(name)\n"
        "print(len(names), sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    count, _, loaded = out.strip().partition(" ")
    assert int(count) > 10
    assert loaded == "[]"


def test_import_inferflow_is_light() -> None:
    heavy = {"torch", "transformers", "huggingface_hub", "jinja2", "tokenizers", "asyncio", "http.client"}
    out = python(f"import sys, inferflow\nprint(sorted({heavy!r} & set(sys.modules)))")
    assert out.strip() == "[]"


@pytest.mark.parametrize("package", [*THERE, "tests"])
def test_files_are_short(package: str) -> None:
    files = [path for path in text_files(ROOT / package) if path.suffix in SOURCES]
    assert files
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_every_package_is_typed_and_has_an_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert sorted(settings["importlinter"]["root_packages"]) == THERE
    assert sorted(settings["mypy"]["files"]) == THERE
