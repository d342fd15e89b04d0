"""scripts/environment.sh, which makes .venv ready."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_an_environment_that_is_a_link_is_not_cleared(tmp_path: Path) -> None:
    """The folder behind the link may be another checkout's environment."""
    project, others = tmp_path / "project", tmp_path / "others"
    (project / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "environment.sh", project / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    (others / "bin").mkdir(parents=True)
    (others / "bin" / "activate").write_text("theirs\n")
    (project / ".venv").symlink_to(others)
    done = subprocess.run(
        ["bash", "-c", "source scripts/environment.sh"],
        cwd=project,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"is a link to {others}; remove the link" in done.stderr
    assert (others / "bin" / "activate").read_text() == "theirs\n"
