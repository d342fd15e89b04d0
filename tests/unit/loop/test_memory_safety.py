"""Limits after a rank ran out of memory: what is lowered, what is skipped, what ends the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron.hydraulis.cost_model.limits import SHARE_AFTER_FAILURE, Limits
from megatron.hydraulis.errors import OutOfMemoryError
from megatron.hydraulis.loop import memory_safety
from megatron.hydraulis.loop.memory_safety import MemorySafety
from megatron.hydraulis.runtime.memory import OutOfMemory
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

_LIMIT = 1000
_LARGE, _SMALL = Scheme(tp=2), Scheme()


@dataclasses.dataclass(frozen=True)
class FakePlanning:
    pool: Pool
    limits: Limits
    cost_model: Any = None


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def safety(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> MemorySafety:
    """The memory safety of rank 0, which watches one data set, ``safety.data``."""
    cost_model = MagicMock()
    cost_model.max_tokens.return_value = _LIMIT
    strategies = [Strategy.parse(text, num_ranks=2) for text in ("tp2", "2*tp1")]
    planning: Any = FakePlanning(Pool.of(*strategies), Limits(cost_model), cost_model)
    monkeypatch.setattr(memory_safety.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(memory_safety, "planners", lambda planning, *_, **__: planning.pool)
    hydraulis: Any = MagicMock(replay_plans=None)
    made = MemorySafety(planning, hydraulis, log=lines.append)
    made.data = MagicMock()  # type: ignore[attr-defined]
    made.watch(made.data, is_training=True)  # type: ignore[attr-defined]
    return made


def fail(
    safety: MemorySafety,
    monkeypatch: pytest.MonkeyPatch,
    iteration: int,
    *failures: tuple[Scheme, int],
) -> None:
    everyone = [
        OutOfMemory(
            rank=rank,
            strategy=str(scheme),
            scheme=scheme,
            context_size=1,
            micro_batch=0,
            num_tokens=num_tokens,
            held_bytes=1 << 30,
        )
        for rank, (scheme, num_tokens) in enumerate(failures)
    ]
    monkeypatch.setattr(memory_safety, "of_all_ranks", lambda own: [None, *everyone])
    safety.lower_after(iteration, MagicMock())


def limits(safety: MemorySafety) -> dict[str, int]:
    planning = safety.planning
    return {
        str(strategy): planning.limits.max_tokens(strategy, strategy.schemes[0])
        for strategy in planning.pool.strategies
    }


def test_a_failure_lowers_the_limit_of_its_scheme_alone(
    safety: MemorySafety, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    fail(safety, monkeypatch, 3, (_LARGE, 800), (_LARGE, 600))
    assert limits(safety) == {"tp2": int(600 * SHARE_AFTER_FAILURE), "2*tp1": _LIMIT}
    assert "iteration 3" in lines[-1]
    assert "1 other ranks" in lines[-1]
    assert "450 tokens" in lines[-1]


def test_the_data_is_planned_again_with_the_new_limits(
    safety: MemorySafety, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(safety, monkeypatch, 3, (_LARGE, 800))
    (call,) = safety.data.lower_limits.mock_calls  # type: ignore[attr-defined]
    pool, given, planner = call.args
    assert pool is safety.planning.pool
    assert planner is pool
    assert dict(given.measured) == {_LARGE: 600}
    assert call.kwargs == {"repeats_last": True}


def test_a_strategy_without_room_is_skipped_from_then_on(
    safety: MemorySafety, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    fail(safety, monkeypatch, 3, (_LARGE, 2))
    assert limits(safety) == {"2*tp1": _LIMIT}
    assert any("'tp2' is skipped" in line for line in lines)
    fail(safety, monkeypatch, 5, (_SMALL, 400))
    assert limits(safety) == {"2*tp1": 300}


def test_no_strategy_left_ends_the_run(
    safety: MemorySafety, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutOfMemoryError, match="any of the 2 strategies"):
        fail(safety, monkeypatch, 3, (_LARGE, 2), (_SMALL, 1))


def test_an_iteration_is_tried_twice_and_the_next_one_again(
    safety: MemorySafety, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(safety, monkeypatch, 3, (_LARGE, 800))
    fail(safety, monkeypatch, 4, (_LARGE, 600))
    with pytest.raises(OutOfMemoryError, match="again after its limit was lowered"):
        fail(safety, monkeypatch, 4, (_LARGE, 400))


def test_recorded_plans_cannot_be_lowered(
    safety: MemorySafety, monkeypatch: pytest.MonkeyPatch
) -> None:
    safety._hydraulis.replay_plans = Path("plans")  # type: ignore[misc]
    with pytest.raises(OutOfMemoryError, match="--replay-plans plans"):
        fail(safety, monkeypatch, 3, (_LARGE, 800))
