"""What a run takes over from a checkpoint, without ranks and files."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron.hydraulis.errors import CheckpointError
from megatron.hydraulis.loop import checkpoints
from megatron.hydraulis.loop.checkpoints import RunCheckpoints

_STATE = {
    "sampler": {"position": 7},
    "data": [],
    "consumed_valid_samples": 4,
    "planner": {"num_marked_plans": 3},
    "num_skipped": 2,
    "num_skipped_in_a_row": 1,
}


def taken(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any] | None, **given: Any
) -> tuple[RunCheckpoints, Namespace]:
    """A run that took the state; None: of a checkpoint of plain Megatron."""
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints, "_set_rng_state", lambda path: None)
    unused: Any = MagicMock()
    run = RunCheckpoints(unused, unused, [], check_lock=unused)
    loaded: Any = MagicMock(path=Path("iter_0000005"))
    loaded.manifest = None if state is None else MagicMock(state=state)
    loaded.upstream = MagicMock(num_consumed_sequences=40)
    args = Namespace(**{"train_samples": None, "use_rope_scaling": False, **given})
    run._take_state(loaded, args)
    return run, args


def test_counters_and_the_place_in_the_data_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run, args = taken(monkeypatch, _STATE)
    assert run.sampler_state == {"position": 7}
    assert args.consumed_valid_samples == 4
    counters = run.counters
    assert counters.num_marked_plans == 3
    assert (counters.num_skipped, counters.num_skipped_in_a_row) == (2, 1)
    assert not run.begins_other_data


@pytest.mark.parametrize("missing", ["sampler", "planner", "num_skipped"])
def test_a_state_that_lacks_a_part_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {name: value for name, value in _STATE.items() if name != missing}
    with pytest.raises(CheckpointError, match=f"iter_0000005.*{missing}"):
        taken(monkeypatch, state)


def test_samples_cannot_end_a_run_that_did_not_count_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match="--train-iters"):
        taken(monkeypatch, _STATE, train_samples=100)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_positions_that_megatron_scaled_otherwise_are_named_at_the_takeover(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = taken(monkeypatch, None, use_rope_scaling=True, rope_scaling_factor=factor)
    assert run.num_consumed_elsewhere == 40
    printed = capsys.readouterr().out
    assert "written by plain Megatron" in printed
    assert ("give --rope-scaling-factor 8" in printed) == (factor != 8.0)
