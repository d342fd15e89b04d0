"""``scripts/finetune.sh`` as a whole: from conversations to an answer by ``transformers``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_script_runs_from_its_data_to_an_answer(tmp_path: Path) -> None:
    """In a folder that stands for the checkout, with the interpreter of the tests as its .venv;
    then its adapters."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("megatron", "hydraulis_patches", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = tmp_path / "scripts" / "environment.sh"
    environment.write_text(f"python={shlex.quote(sys.executable)}\n")
    for folder, exported, flags in (
        ("base", "model/model.safetensors", ()),
        ("lora", "adapter/adapter_model.safetensors", ("--lora-rank", "4")),
    ):
        run_dir = tmp_path / "runs" / "finetune" / folder
        done = subprocess.run(
            ["bash", "scripts/finetune.sh", "--train-iters", "2", "--lr-warmup-fraction=0", *flags],
            cwd=tmp_path,
            env={**os.environ, "RUN_DIR": str(run_dir)},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "⟦" in done.stdout
        assert (run_dir / exported).is_file()
        assert (run_dir / "train" / "metrics.jsonl").read_text().count("\n") == 2
        assert "question: What is json.dumps?\nanswer: " in done.stdout
