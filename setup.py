"""Packaging. `pip install .` gives the engine and the `inferflow` command; extras add what only some users need."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

PACKAGES = ["inferflow", "model_specs", "partition", "quant"]
EXTRAS = {
    "serve": ["starlette>=0.37", "uvicorn>=0.29"],
    "torch": ["torch>=2.4"],
    "cuda": ["cupy-cuda12x>=13.0", "nvidia-nccl-cu12>=2.20"],
    "test": [
        "accelerate>=1.0",  # transformers reads GGUF files with it
        "hypothesis>=6.100",
        "import-linter>=2.0",
        "mypy>=1.11",
        "pytest>=8.0",
        "pytest-xdist>=3.5",
        "ruff>=0.8",
        "sentencepiece>=0.2",
        "torch>=2.4",
        "transformers>=5.24",  # the oracle, with the families as it has them since then
        # A second opinion on GGUF files: llama.cpp with its wheels built (Linux, macOS, Windows).
        "xllamacpp>=0.2.14",
    ],
}

setup(
    name="inferflow",
    version="0.1.0",
    description="An LLM inference engine in which a TOML file says what a model is",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]),
    package_data={"inferflow": ["py.typed"], "model_specs": ["*.toml", "README.md"]},
    include_package_data=False,
    install_requires=[
        "click>=8.1",
        "gguf>=0.10",
        "huggingface-hub>=0.30",
        "jinja2>=3.1",
        "numpy>=1.26",
        "packaging>=23.0",
        "safetensors>=0.4.3",
        "tokenizers>=0.21",
        "tomli>=2.0; python_version < '3.11'",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["inferflow = inferflow.cli.main:main"]},
    zip_safe=False,
)
