"""Builds Transformer Engine for the stand-in and makes the environment of processes that use it.

As a program it only builds, which takes longer than the time limit of a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.cuda_stand_in import launch

_HERE = Path(__file__).resolve().parent
_FOLDER = _HERE.parents[2] / "build" / "te"


@cache
def folder() -> Path:
    """The folder of what `build.sh` builds; the first call downloads 280 MB and compiles."""
    subprocess.run(
        ["bash", str(_HERE / "build.sh"), sys.executable, str(_FOLDER), str(launch.libraries())],
        check=True,
    )
    return _FOLDER


def settings() -> dict[str, str]:
    """Environment variables that let processes on the stand-in import Transformer Engine."""
    return {
        "STAND_IN_TE": str(folder()),
        # cudnn-frontend looks up the runtime's functions there.
        "CUDNN_FRONTEND_CUDART_LIB_NAME": "libcuda.so.1",
        "CURAND_HOME": str(folder() / "curand"),
    }


def environment(**more: object) -> dict[str, str]:
    """`launch.environment` with Transformer Engine."""
    os.environ.update(settings())
    return launch.environment(**more)  # type: ignore[arg-type]


if __name__ == "__main__":
    print(f"Transformer Engine for the stand-in is in {folder()}")
