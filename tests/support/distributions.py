"""The project's wheel and source distribution, built from a clean copy of its files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools replaces sys.argv
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


def build_distributions(folder: Path) -> tuple[Path, Path]:
    """Build into a folder; returns the paths of the wheel and of the source distribution."""
    copy = folder / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("megatron", "hydraulis_patches"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist
