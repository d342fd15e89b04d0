"""The program benchmarks.regroup_bytes on a pool of four ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.regroup_bytes import main
from tests.support.planning import LLAMA_32B


def test_both_tables_name_every_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = {
        "num_ranks": 4,
        "ranks_per_node": 2,
        "strategies": [
            {"name": "even", "replicas": "4*tp1"},
            {"name": "mixed", "replicas": "tp2+2*tp1"},
        ],
    }
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(pool))
    main(["--pool", str(path), "--commonest", "mixed"])
    printed = capsys.readouterr().out
    assert printed.count("4*tp1") == printed.count("tp2+2*tp1") == 2
    # All four need everything, in bf16; other ranks own three quarters of it.
    held_gb = LLAMA_32B.num_parameters * 2 / 1e9
    assert f"{held_gb:.3f} / {held_gb:.3f}" in printed
    assert f"{held_gb * 3 / 4:.3f}" in printed
    assert "all_gather" in printed
    assert "two_step" in printed
