"""Packaging. `pip install .` gives the engine and the `inferflow` command; extras add what only some users need."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
README = HERE / "README.md"

PACKAGES = ["inferflow", "model_specs", "partition", "quant"]
EXTRAS = {
    "serve": ["starlette>=0.37", "uvicorn>=0.29"],
    "torch": ["torch>=2.4"],
    "cuda": ["cupy-cuda12x>=13.0", "nvidia-nccl-cu12>=2.20"],
    "plot": ["matplotlib>=3.8"],
    "structured": ["llguidance>=1.0"],
    "test": [
        "accelerate>=1.0",  # transformers reads GGUF files with it
        "httpx>=0.27",
        "hypothesis>=6.100",
        "import-linter>=2.0",
        "llguidance>=1.0",
        "matplotlib>=3.8",
        "mypy>=1.11",
        "openai>=1.50",  # a client that the server must please
        "pytest>=8.0",
        "pytest-xdist>=3.5",
        "ruff>=0.8",
        "selenium>=4.20",  # drives Chromium, where there is one, through the page
        "sentencepiece>=0.2",
        "starlette>=0.37",
        "torch>=2.4",
        "transformers>=5.24",  # the oracle, with the families as it has them since then
        "uvicorn>=0.29",
        # A second opinion on GGUF files: llama.cpp with its wheels built (Linux, macOS, Windows).
        "xllamacpp>=0.2.14",
    ],
}

CPU = "inferflow/kernels/cpu"
MACHINE = platform.machine().lower()
# Each instruction set is one translation unit with its own flags; everything else is compiled for the baseline.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
ISAS = {
    "x86_64": {"portable": [], "avx2": AVX2, "avx512": AVX512, "avx512vnni": [*AVX512, "-mavx512vnni", "-mavx512vbmi"]},
    "aarch64": {"portable": [], "neon": []},
}
ISAS["amd64"], ISAS["arm64"] = ISAS["x86_64"], ISAS["aarch64"]
FLAGS = [
    "-std=c++20",
    "-O3",
    "-fno-tree-slp-vectorize",  # the kernels are vectors already; GCC would keep arrays of pointers in them, by way of memory
    "-ffp-contract=off",
    "-fno-math-errno",
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Wno-maybe-uninitialized",  # false for AVX-512 intrinsics in GCC 12, as is the next
    "-Wno-uninitialized",
    "-Wno-psabi",  # vectors are passed within a unit only
]


class BuildLibraries(build_ext):
    """Plain shared libraries, loaded with ctypes: no Python in them, so one build serves every Python."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        def compile_one(source):
            isa = Path(source).stem.removeprefix("isa_")
            extra = ISAS.get(MACHINE, {}).get(isa, [])
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=[*FLAGS, *extra], depends=ext.depends
            )

        with ThreadPoolExecutor() as pool:
            objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(str(Path(target).parent))
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")


def library(name, folder, sources):
    headers = sorted(str(path.relative_to(HERE)) for path in (HERE / folder).glob("*.h"))
    # Optional: without a compiler the NumPy reference remains.
    return Extension(name, [f"{folder}/{source}" for source in sources], depends=headers, optional=True)


LIBRARIES = [
    library("inferflow.kernels.cpu.engine", CPU, [
        "dispatch.cpp", "engine.cpp", "pool.cpp", *(f"isa_{isa}.cpp" for isa in ISAS.get(MACHINE, {"portable": []})),
    ]),
    library("quant._search", "quant", ["search.cpp"]),
]  # fmt: skip

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
    package_data={"inferflow": ["py.typed", "server/*.html"], "model_specs": ["*.toml", "README.md"]},
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
    ext_modules=LIBRARIES,
    cmdclass={"build_ext": BuildLibraries},
    zip_safe=False,
)
