"""The benchmark of the emulated cluster, from the command line to its figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.emulated_cluster import main
from tests.support.forked_job import run_job

pytestmark = pytest.mark.distributed

TIMEOUT_S = 100.0


def program(argv: Sequence[str]) -> None:
    raise SystemExit(main(argv))


def test_the_benchmark_runs_every_side_and_no_iteration_is_faster_than_modelled(
    tmp_path: Path,
) -> None:
    def row(tp: int, max_tokens: int) -> dict[str, float]:
        times = {"a_ms_per_token2": 1e-6 / tp, "b_ms_per_token": 0.02 / tp, "c_ms": 10.0}
        return {"tp": tp, "cp": 1, "pp": 1, **times, "max_tokens": max_tokens}

    profile, pool, figures = (tmp_path / f"{name}.json" for name in ("profile", "pool", "figures"))
    head = {"device": "imagined", "source": "made up", "date": "2026-01-01"}
    profile.write_text(json.dumps(head | {"schemes": [row(1, 3000), row(2, 5000)]}))
    strategies = [{"name": "long", "replicas": "tp2"}, {"name": "short", "replicas": "2*tp1"}]
    pool.write_text(json.dumps({"num_ranks": 2, "ranks_per_node": 2, "strategies": strategies}))
    argv = ["--iterations", "2", "--emulate-device", str(profile), "--emulate-scale", "0.5"]
    argv += ["--pool", str(pool), "--json", str(figures)]
    # It forks its ranks from one process.
    done = run_job(argv, 1, tmp_path / "output", program=program, timeout_s=TIMEOUT_S)
    done.assert_succeeded()
    printed = " ".join(done.stdout.split())
    assert "documents cut at 5,000 tokens" in printed
    assert "Time of a static side over that of the dynamic strategies" in printed
    found = json.loads(figures.read_text())
    _, *static = found["sides"]
    assert [side["name"] for side in found["sides"]] == [
        *("dynamic", "static, balanced", "static, fixed"),
    ]
    assert set(found["speed_ups"]) == {side["name"] for side in static}
    for side in found["sides"]:
        assert len(side["iterations"]) == 2
        for iteration in side["iterations"]:
            assert iteration["measured_s"] >= iteration["predicted_s"] > 0.0
            assert iteration["count"]["num_operations"] > 0
    for side in static:
        assert {iteration["strategy"] for iteration in side["iterations"]} == {"long"}
