"""Ranks leave and return: 4, then 2, then 3 ranks train one run with one command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.elastic_job import losses_of
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import tiny_command, write_corpus
from tests.support.training_run import ROUNDING

pytestmark = pytest.mark.fault

NUM_ITERATIONS = 6
STRATEGIES = {"short": "4*tp1", "mixed": "tp2+2*tp1", "wide": "tp2pp2"}


def test_four_two_three_ranks_train_one_run(tmp_path: Path) -> None:
    pool = tmp_path / "pool.json"
    entries = [{"name": name, "replicas": text} for name, text in STRATEGIES.items()]
    pool.write_text(json.dumps({"num_ranks": 4, "ranks_per_node": 4, "strategies": entries}))

    def command(folder: Path, *extra: str) -> list[str]:
        return tiny_command(
            write_corpus(folder / "tiny"),
            folder / "run",
            *("--strategy-pool", str(pool), "--elastic", "--split", "100,0,0"),
            *("--train-iters", str(NUM_ITERATIONS), *extra),
        )

    alone = tmp_path / "alone"
    run_job(command(alone), 4, alone / "output").assert_succeeded()
    expected = losses_of(alone / "run")
    assert len(expected) == NUM_ITERATIONS

    folder = tmp_path / "changing"
    save = str(folder / "save")
    argv = command(
        folder, "--save", save, "--load", save, "--save-interval", "2", "--exit-interval", "2"
    )
    outputs = {}
    for num_ranks in (4, 2, 3):
        outcome = run_job(argv, num_ranks, folder / f"on_{num_ranks}")
        outcome.assert_succeeded()
        outputs[num_ranks] = outcome.stdout + outcome.stderr
    found = losses_of(folder / "run")
    assert sorted(found) == sorted(expected)
    for iteration, loss in expected.items():
        assert found[iteration] == pytest.approx(loss, rel=ROUNDING)

    assert "the strategies are for 4 ranks" not in outputs[4]
    for num_ranks, lines in {
        2: (
            "the strategies are for 4 ranks but there are 2",
            "strategy 'short': 4*tp1 becomes 2*tp1",
            "strategy 'mixed': tp2+2*tp1 becomes tp2",
            "strategy 'wide' is skipped: its tp2pp2 needs 4 ranks",
            "it was written by 4 ranks, now 2 go on",
        ),
        3: (
            "the strategies are for 4 ranks but there are 3",
            "strategy 'mixed': tp2+2*tp1 becomes tp2+tp1",
            "it was written by 2 ranks, now 3 go on",
        ),
    }.items():
        for line in lines:
            assert line in outputs[num_ranks], line
