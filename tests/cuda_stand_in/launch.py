"""Builds the stand-in's libraries and makes the environment of processes that run on it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_SOURCES = ("*.cpp", "*.c", "*.h", "*.sh", "shim/**/*.h")
_TOOLS = ("g++", "gcc", "nm")
_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_STAMP_CHARACTERS = 12
DEFAULT_TIMEOUT_S = 60.0


@cache
def why_not() -> str | None:
    """Why the stand-in cannot be built on this machine; None if it can."""
    torch = _folder_of_torch()
    if torch is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        return "the CUDA stand-in needs a CUDA build of torch"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the CUDA stand-in needs {' and '.join(missing)} to be built"
    if not list((torch.parent / "nvidia").rglob("cuda_runtime_api.h")):
        return "the CUDA stand-in needs the headers of torch's nvidia packages"
    return None


@cache
def libraries() -> Path:
    """The folder of the libraries, which are built on first use, in seconds."""
    folder = _ROOT / "build" / "cuda_stand_in" / _stamp()
    if not folder.exists():
        subprocess.run(
            ["bash", str(_HERE / "build.sh"), sys.executable, str(folder)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder


def environment(
    *,
    devices: int = 8,
    memory_bytes: int | None = None,
    log: Path | None = None,
    exchange: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **more: object,
) -> dict[str, str]:
    """The environment of a process on the stand-in, based on that of this process.

    Args:
        devices: that the process sees.
        memory_bytes: of each device; 80 GiB if None.
        log: log file with a line per call.
        exchange: a folder shared by all processes of a job, through which NCCL moves data; if None
            its calls do nothing.
        timeout_s: time after which an NCCL call that waits for other ranks ends its process.
        more: further variables, such as ``STAND_IN_LOG_KERNELS=1`` (README.md lists them).
    """
    preloaded = [libraries() / name for name in _LIBRARIES]
    python_path = [_ROOT]
    if folder := os.environ.get("STAND_IN_TE"):  # see te/
        preloaded.append(Path(folder) / "libte_stand_in.so")
        python_path.append(Path(folder) / "site")
    settings: dict[str, object] = {
        "LD_PRELOAD": " ".join(map(str, preloaded)),
        "STAND_IN_DEVICES": devices,
        "STAND_IN_TIMEOUT_S": int(timeout_s),
        # Kernels are never compiled, and none would run.
        "TORCH_COMPILE_DISABLE": 1,
        "TORCH_DISABLE_NATIVE_JIT": 1,  # operations that torch replaces by Triton's
        # A process that only asks whether there is CUDA can still be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": 1,
        # As the job scripts set.
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join(
            [*map(str, python_path), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
    }
    optional = {
        "STAND_IN_MEMORY_BYTES": memory_bytes,
        "STAND_IN_LOG": log,
        "STAND_IN_EXCHANGE": exchange,
    }
    settings |= {name: value for name, value in optional.items() if value is not None}
    return os.environ | {name: str(value) for name, value in (settings | more).items()}


def _folder_of_torch() -> Path | None:
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


def _stamp() -> str:
    """A hash of the sources and of what the libraries are built for."""
    digest = hashlib.sha256(f"{importlib.metadata.version('torch')} {sys.prefix}".encode())
    for path in sorted({path for pattern in _SOURCES for path in _HERE.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_STAMP_CHARACTERS]
