"""A rank that is killed, frozen or raises: torchrun's agent starts the job again from the last
complete checkpoint, and the losses are those of a run that nothing happened to.

By default a rank is killed in every phase, and one is frozen; with HYPOTHESIS_PROFILE=nightly each
kind in every phase on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.hydraulis.loop import entry
from tests.support.changed_settings import with_settings
from tests.support.elastic_job import losses_of, run_elastic_job
from tests.support.fault_injector import PHASES, Action, FaultInjector, Phase
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import tiny_command, write_corpus

pytestmark = pytest.mark.fault

IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
NUM_RANKS = 3
STRATEGY = "pp2+tp1"
NUM_ITERATIONS = 4
TIMEOUT_S = 12.0
"""Of collectives: the time lost by a frozen rank. A loaded machine may take a second for one."""
NUM_SPARE_RESTARTS = 2
"""If a rank is so slow that the others consider it frozen, losses are the same anyway."""
FAULTS: dict[Action, tuple[Phase, ...]] = {
    "kill": PHASES,
    "freeze": PHASES if IS_NIGHTLY else ("scatter",),
    "raise": PHASES if IS_NIGHTLY else (),
}
FIRST_RANKS = range(NUM_RANKS) if IS_NIGHTLY else (1,)
"""Iteration of the first fault; the next rank fails in the next one."""


def command(prefix: str, folder: Path, *extra: str) -> list[str]:
    return tiny_command(
        prefix,
        folder / "run",
        *("--strategy", STRATEGY, "--split", "100,0,0", "--train-iters", str(NUM_ITERATIONS)),
        *("--save", str(folder / "save"), "--load", str(folder / "save"), "--save-interval", "1"),
        *("--exit-signal-handler", *extra),
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture(scope="module")
def expected(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run without faults."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_job(command(prefix, folder), NUM_RANKS, folder / "output").assert_succeeded()
    losses = losses_of(folder / "run")
    assert sorted(losses) == list(range(1, NUM_ITERATIONS + 1))
    return losses


@pytest.mark.parametrize("first_rank", FIRST_RANKS)
@pytest.mark.parametrize("action", [action for action, phases in FAULTS.items() if phases])
@pytest.mark.timeout(600)
def test_the_job_goes_on_from_its_last_checkpoint(
    action: Action, first_rank: int, prefix: str, expected: dict[int, float], tmp_path: Path
) -> None:
    injector = FaultInjector(tmp_path)
    phases = FAULTS[action]
    for number, phase in enumerate(phases):
        # Every fault happens in another start of the job.
        step = 2 + number * (NUM_ITERATIONS - 2) // len(phases)
        injector.fail_at((first_rank + number) % NUM_RANKS, step, phase, action)

    def program(argv: Sequence[str]) -> None:
        injector.install()
        entry.main(argv)

    # If rank 0 is frozen while planning, the others wait in its store, not in a collective.
    extra = ("--plan-ahead", "0") if first_rank == 0 else ()
    outcome = run_elastic_job(
        command(prefix, tmp_path, *extra),
        NUM_RANKS,
        tmp_path / "output",
        program=with_settings(program, distributed_timeout_minutes=TIMEOUT_S / 60.0),
        max_restarts=len(phases) + NUM_SPARE_RESTARTS,
        timeout_s=60.0 + 60.0 * len(phases),
    )
    outcome.assert_succeeded()
    assert len(injector.happened) == len(phases)
    assert outcome.num_starts > len(phases)
    assert losses_of(tmp_path / "run") == expected
    said = outcome.output("[1-9]*")
    assert "loaded " in said
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "4"
    if action == "freeze":
        # Before collectives timed out, a waiting rank named the rank that it waited for.
        said = outcome.output("0*stderr")
        reports = [line for line in said.splitlines() if line.startswith("hang: ")]
        if first_rank == 0:  # its process holds the store to which ranks report their phases
            assert reports
            assert all("missing: rank 0, in whose process it is" in line for line in reports)
        else:
            (report,) = reports
            assert f"missing: rank {first_rank}, silent for " in report
            assert "of iteration 2 (strategy 'pp2+tp1'" in report
