"""Prints what the checks run on as JSON: devices, links, versions, settings."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from typing import Any

import torch

from megatron.hydraulis.library.devices import constants_of_this_rank
from megatron.hydraulis.loop.preflight import installed_driver

PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "apex", "numpy", "highspy")
SETTINGS = ("CUDA_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_", "HYDRAULIS_")
"""Beginnings of the environment variables that matter."""
COMMAND_LIMIT_S = 20.0


def describe() -> dict[str, Any]:
    """Everything that a reader of the results needs to know of the machine."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": installed_driver() or _output("nvidia-smi", "--query-gpu=driver_version"),
        **{package: _version(package) for package in PACKAGES},
        "cpu_cores": os.cpu_count(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
        "devices": [],
    }
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = torch.backends.cudnn.version()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found["devices"].append(
                {
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "compute_capability": f"{properties.major}.{properties.minor}",
                }
            )
        constants = constants_of_this_rank(has_cuda=True, speaks=False)
        found["cost_constants"] = constants.name
        found["peak_flops_per_s"] = constants.peak_flops_per_s
    found["topology"] = _output("nvidia-smi", "topo", "-m")
    found["nvidia_smi"] = _output("nvidia-smi")
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """The output of a command, or why it has none."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not there: {error}"
    return (result.stdout or result.stderr).strip()


if __name__ == "__main__":
    print(json.dumps(describe()))
