"""A rank that raises during training ends the job on all ranks and reports its phase."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.loop import entry
from megatron.hydraulis.runtime.engine import RuntimeEngine
from tests.support.forked_job import run_job
from tests.support.overlap_probes import fault_in
from tests.support.tiny_corpus import tiny_command, write_corpus

pytestmark = pytest.mark.fault

NUM_RANKS, CULPRIT = 3, 1
STRATEGY = "pp2+tp1"
"""Ranks in the failing rank's pipeline wait for its messages; a replica of one rank does not."""
NUM_GOOD_ITERATIONS = 1
TIMEOUT_S = 45.0
"""Less than the minute after which collectives time out."""
WAY_OUT = "THE INTERPRETER'S WAY OUT"


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("gather", "gather of bucket "),
        ("forward", "phase 'forward-backward' of iteration"),
        ("scatter", "scatter of bucket "),
        ("optimizer", "phase 'optimizer' of iteration"),
    ],
)
def test_an_error_of_one_rank_ends_all_and_names_rank_and_phase(
    phase: str, where: str, tmp_path: Path
) -> None:
    def program(argv: Sequence[str]) -> None:
        forward_backward, optim_step = RuntimeEngine.forward_backward, RuntimeEngine.optim_step
        num_steps = 0

        def is_faulty() -> bool:
            return num_steps > NUM_GOOD_ITERATIONS and os.environ["RANK"] == str(CULPRIT)

        def faulty_gradients(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            with fault_in(phase, on_this_rank=is_faulty()):
                return forward_backward(*args, **kwargs)

        def faulty_update(*args: Any, **kwargs: Any) -> Any:
            with fault_in(phase, on_this_rank=is_faulty()):
                return optim_step(*args, **kwargs)

        # In a forked process.
        RuntimeEngine.forward_backward = faulty_gradients  # type: ignore[method-assign]
        RuntimeEngine.optim_step = faulty_update  # type: ignore[method-assign]
        atexit.register(print, WAY_OUT)
        entry.main(argv)

    argv = tiny_command(
        write_corpus(tmp_path / "tiny"),
        tmp_path / "run",
        *("--strategy", STRATEGY, "--split", "100,0,0", "--train-iters", "100000"),
    )
    # Without a launcher: the others end because the failing rank's connections are closed.
    outcome = run_job(
        argv,
        NUM_RANKS,
        tmp_path / "output",
        program=program,
        ends_others=False,
        timeout_s=TIMEOUT_S,
    )
    assert not outcome.timed_out, f"statuses {outcome.statuses}\n{outcome.stderr}"
    assert 0 not in outcome.statuses
    assert f"iteration {NUM_GOOD_ITERATIONS:8d}/" in outcome.stdout
    for rank, of_rank in outcome.ranks.items():
        assert (f"InjectedFault: injected in {phase}" in of_rank.stderr) == (rank == CULPRIT)
    stderr = outcome.ranks[CULPRIT].stderr
    assert where in stderr
    assert stderr.count("phase '") <= 1, "the place is named once"
    assert f"rank {CULPRIT}" in stderr
    # A normal exit would join threads and destroy groups, which wait for the other ranks.
    assert WAY_OUT not in outcome.ranks[CULPRIT].stdout
