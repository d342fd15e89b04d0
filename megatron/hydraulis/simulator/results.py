"""What a way to train comes to over all batches."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.simulator.accounts import IterationAccount, account
from megatron.hydraulis.simulator.regroup_times import RegroupCosts
from megatron.hydraulis.simulator.simulation import IterationTasks, Simulator
from megatron.hydraulis.simulator.stage_costs import StageCosts
from megatron.hydraulis.simulator.work import IterationWork

__all__ = ["PARTS", "Setting", "WayResult", "simulate_way"]

_MS_PER_S = 1e3
PARTS = ("work", "fill", "imbalance", "regroup", "planning")
"""What the time of a rank consists of; see accounts.py."""


def _keeps_all(_: int) -> bool:
    """Tasks of few iterations need no choice."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all ways have in common."""

    stage_costs: StageCosts
    regroup: RegroupCosts | None = None
    plan_ahead: int = 2
    overlaps_regrouping: bool = True
    keeps: Callable[[int], bool] = _keeps_all
    """Whether the tasks of an iteration, by its number, are kept with the results."""

    def simulator(self, cost_model: CostModel) -> Simulator:
        """One for the cost model of a way."""
        return Simulator(
            StageCosts(cost_model, self.stage_costs.shape),
            regroup=self.regroup,
            plan_ahead=self.plan_ahead,
            overlaps_regrouping=self.overlaps_regrouping,
        )


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """One way over all iterations."""

    name: str
    accounts: tuple[IterationAccount, ...]
    iterations: tuple[IterationTasks, ...]
    """Those of which the tasks were kept."""
    strategies: dict[str, str]
    """By name of a strategy in use, its text."""

    @property
    def time_s(self) -> float:
        """Of all iterations."""
        return math.fsum(each.time_ms for each in self.accounts) / _MS_PER_S

    @property
    def num_tokens(self) -> int:
        """Trained tokens of all iterations."""
        return sum(each.num_tokens for each in self.accounts)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens over time."""
        return self.num_tokens / self.time_s

    @property
    def padding_fraction(self) -> float:
        """Padding over trained tokens and padding, from 0 to 1."""
        num_padding = sum(each.num_padding for each in self.accounts)
        return num_padding / (self.num_tokens + num_padding)

    @property
    def imbalance(self) -> float:
        """Makespan over the rank-weighted mean of the replica times, mean over iterations."""
        return fmean(each.imbalance for each in self.accounts)

    @property
    def received_bytes(self) -> float:
        """A rank's, per iteration, mean over ranks and iterations."""
        return fmean(each.received_bytes for each in self.accounts)

    @property
    def shares(self) -> dict[str, float]:
        """By part, its share of the time of all ranks; they add up to 1."""
        totals_ms = {
            part: math.fsum(getattr(each, f"{part}_ms") for each in self.accounts) for part in PARTS
        }
        all_ms = math.fsum(each.num_ranks * each.time_ms for each in self.accounts)
        # Not below 0 by a rounding error.
        return {part: max(0.0, total_ms) / all_ms for part, total_ms in totals_ms.items()}

    @property
    def num_uses(self) -> Counter[str]:
        """By strategy, iterations with it."""
        return Counter(each.strategy for each in self.accounts)

    def to_json(self, reference: WayResult | None) -> dict[str, Any]:
        """Figures by name; the reference is what speed_up is taken over."""
        return {
            "way": self.name,
            "time_s": self.time_s,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_s,
            "speed_up": None if reference is None else reference.time_s / self.time_s,
            "utilisation": self.shares["work"],
            "shares": self.shares,
            "imbalance": self.imbalance,
            "padding_fraction": self.padding_fraction,
            "received_bytes_per_iteration": self.received_bytes,
            "strategies": [
                {"name": name, "replicas": self.strategies[name], "num_iterations": num}
                for name, num in self.num_uses.most_common()
            ],
            "iterations": [
                {
                    "iteration": each.iteration,
                    "strategy": each.strategy,
                    "time_s": each.time_ms / _MS_PER_S,
                    "makespan_s": each.makespan_ms / _MS_PER_S,
                    "replica_times_s": [ms / _MS_PER_S for ms in each.replica_times_ms],
                    "num_tokens": each.num_tokens,
                    "imbalance": each.imbalance,
                }
                for each in self.accounts
            ],
        }


def simulate_way(
    name: str,
    candidates: Sequence[tuple[CostModel, Sequence[IterationWork]]],
    setting: Setting,
) -> WayResult | None:
    """The candidate that takes the least time over all batches; None where there is none.

    Raises HydraulisError as Simulator.run and account do.
    """
    results = [_simulated(name, cost_model, works, setting) for cost_model, works in candidates]
    return min(results, key=lambda result: result.time_s, default=None)


def _simulated(
    name: str, cost_model: CostModel, works: Sequence[IterationWork], setting: Setting
) -> WayResult:
    simulator = setting.simulator(cost_model)
    accounts: list[IterationAccount] = []
    ended_ms = 0.0
    with _no_garbage_collection():
        iterations = simulator.run(works)
        for iteration in iterations:
            times = simulator.regroup_times(iteration.work.strategy)
            accounts.append(
                account(
                    iteration,
                    started_ms=ended_ms,
                    received_bytes=0.0 if times is None else times.received_bytes,
                )
            )
            ended_ms = iteration.end_ms
    return WayResult(
        name=name,
        accounts=tuple(accounts),
        iterations=tuple(each for each in iterations if setting.keeps(each.number)),
        strategies={work.strategy.name: str(work.strategy) for work in works},
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of tasks live until the last one has run; looking through them for
    garbage, of which there is none, would take as long as the simulation."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
