"""Saved and resumed: the same run, bit by bit on the same ranks, to rounding on others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.hydraulis.checkpoint.manifest import Manifest
from tests.support.checkpoints import whole_tensors
from tests.support.training_run import MAIN_FLAGS, ROUNDING, Launch, Run

pytestmark = pytest.mark.distributed

SAVED_AT = 2
NUM_RANKS = 4


def write_pool(path: Path, num_ranks: int, **strategies: str) -> str:
    entries = [{"name": name, "replicas": text} for name, text in strategies.items()]
    content = {"num_ranks": num_ranks, "ranks_per_node": num_ranks, "strategies": entries}
    path.write_text(json.dumps(content))
    return str(path)


def lengths_of(run: Run) -> dict[int, list[int]]:
    """Of the sequences of every planned iteration."""
    return {
        plan.iteration: sorted(
            length
            for replica in plan.replicas
            for micro_batch in replica.micro_batches
            for length in micro_batch.lengths
        )
        for plan in run.plans
    }


@pytest.fixture(scope="module")
def pool_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pool") / "pool.json"
    return write_pool(path, NUM_RANKS, short="4*tp1", mixed="tp2+pp2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def uninterrupted(launch: Launch, pool_file: str, saved: Path) -> Run:
    schedule = ("--strategy-pool", pool_file, "--strategy-schedule", "mixed,short,short")
    save = ("--save", str(saved), "--save-interval", str(SAVED_AT))
    return launch(None, NUM_RANKS, *schedule, *save, *MAIN_FLAGS)


@pytest.fixture(scope="module")
def resumed(launch: Launch, pool_file: str, uninterrupted: Run, saved: Path) -> tuple[Run, Path]:
    schedule = ("--strategy-pool", pool_file, "--strategy-schedule", "mixed,short,short")
    load = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    again = saved.parent / "saved_again"
    save = ("--save", str(again), "--save-interval", str(SAVED_AT), "--async-save")
    run = launch(None, NUM_RANKS, *schedule, *load, *save, "--keep-last", "1", *MAIN_FLAGS)
    return run, again


def test_resumed_on_the_same_ranks_the_run_is_the_same_bit_by_bit(
    uninterrupted: Run, resumed: tuple[Run, Path], saved: Path
) -> None:
    run, again = resumed
    assert [r.iteration for r in run.records] == [3, 4]
    assert run.losses == uninterrupted.losses[SAVED_AT:]
    assert [r.learning_rate for r in run.records] == [
        r.learning_rate for r in uninterrupted.records[SAVED_AT:]
    ]
    before = {plan.iteration: plan.digest for plan in uninterrupted.plans}
    assert {p.iteration: p.digest for p in run.plans} == {i: before[i] for i in (2, 3)}
    last = "iter_0000004"
    expected, found = whole_tensors(saved / last), whole_tensors(again / last)
    assert expected.keys() == found.keys()
    differing = [key for key in expected if not torch.equal(expected[key], found[key])]
    assert differing == []
    states = [Manifest.read(folder / last).state for folder in (saved, again)]
    assert states[0] == states[1]


def test_only_the_last_is_kept_and_named(resumed: tuple[Run, Path], saved: Path) -> None:
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert sorted(p.name for p in saved.iterdir() if p.is_dir()) == [
        "iter_0000002",
        "iter_0000004",
    ]
    _, again = resumed
    assert [p.name for p in again.iterdir() if p.is_dir()] == ["iter_0000004"]


@pytest.mark.parametrize(("num_ranks", "strategy"), [(2, "tp2"), (3, "pp2+tp1")])
def test_other_ranks_go_on_with_the_same_sequences(
    launch: Launch, uninterrupted: Run, saved: Path, num_ranks: int, strategy: str
) -> None:
    load = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    run = launch(strategy, num_ranks, *load, *MAIN_FLAGS)
    assert [r.iteration for r in run.records] == [3, 4]
    assert run.losses == pytest.approx(uninterrupted.losses[SAVED_AT:], rel=ROUNDING)
    before = lengths_of(uninterrupted)
    assert lengths_of(run) == {i: before[i] for i in (2, 3)}
    assert [r.consumed_samples for r in run.records] == [
        r.consumed_samples for r in uninterrupted.records[SAVED_AT:]
    ]
    assert f"written by {NUM_RANKS} ranks, now {num_ranks} go on" in run.outcome.stdout
