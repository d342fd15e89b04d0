"""From lengths, a cost profile and a cluster to a pool of strategies."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.proposal.batches import Regime, regimes_of
from megatron.hydraulis.proposal.explore import Explorer
from megatron.hydraulis.proposal.fluid import FluidModel
from megatron.hydraulis.proposal.judge import Judge
from megatron.hydraulis.proposal.menu import Menu, Mix
from megatron.hydraulis.proposal.refine import Refiner
from megatron.hydraulis.proposal.result import (
    PoolMember,
    PoolSize,
    Proposal,
    RegimeChoice,
)
from megatron.hydraulis.strategy import Pool

__all__ = ["propose"]

_MS_PER_S = 1e3
_NUM_ROUNDS = 5
"""Of searching regimes by the estimate and learning from the planner's bounds."""
_LEARNT_BATCHES = 6
"""Batches that mixes are bounded for to learn from them."""
_LEARNT_PER_MEMBER, _SHORTLIST_PER_MEMBER = 1, 2
"""New mixes that are bounded in a round, and for all batches in the end, per strategy."""
_MAX_IMPROVEMENTS = 1
_MIN_REGIME_SHARE = 1.0 / 32.0
"""Of all batches: a smaller regime is searched together with the next longer one."""

OnProgress = Callable[[str, int, int], None]
"""What is being done, how many of it are done, how many there are."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The parts of a proposal that work on the same data."""

    menu: Menu
    judge: Judge
    explorer: Explorer
    refiner: Refiner
    regimes: tuple[Regime, ...]


def propose(
    menu: Menu,
    cost_model: ProfileCostModel,
    batches: Sequence[Sequence[int]],
    *,
    max_strategies: int,
    longest: int,
    seed: int = 0,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Proposal:
    """The pool of at most max_strategies with the least mean predicted time over the batches.

    batches: shape (num_batches, …), lengths in tokens; longest: tokens of the longest sequence of
    the corpus, drawn or not, which the pool has to hold. Same arguments, same pool.

    Raises ConfigurationError for fewer than one strategy, PlanError when no scheme holds the
    longest sequence.
    """
    start_s = time.perf_counter()
    if max_strategies < 1:
        raise ConfigurationError(
            f"a pool holds at least 1 strategy but --max-strategies is {max_strategies}; raise it"
        )
    longest = max(longest, *(max(batch) for batch in batches))
    if longest > menu.longest:
        raise PlanError(
            f"a sequence must fit one micro-batch but the longest has {longest} tokens and the "
            f"largest limit of {len(menu.schemes)} admissible schemes is {menu.longest}; lower "
            f"--seq-length or measure a scheme with a larger tp or cp"
        )
    steps = _steps(menu, cost_model, batches, longest, seed)
    _explore(steps, max_strategies, on_progress)
    _bound(steps, max_strategies, on_progress)
    on_progress("plans", 0, 2)
    chosen = steps.refiner.settled_pool(max_strategies)
    on_progress("plans", 1, 2)
    larger = steps.refiner.settled_pool(max_strategies + 1, chosen)
    on_progress("plans", 2, 2)
    one_more = larger if len(larger) > len(chosen) else None
    return _result(steps, chosen, one_more, time.perf_counter() - start_s)


def _steps(
    menu: Menu,
    cost_model: ProfileCostModel,
    batches: Sequence[Sequence[int]],
    longest: int,
    seed: int,
) -> _Steps:
    judge = Judge(menu, cost_model, batches, seed=seed)
    explorer = Explorer(menu, FluidModel(menu, batches), len(batches), longest)
    return _Steps(
        menu,
        judge,
        explorer,
        Refiner(menu, judge, explorer, longest),
        regimes_of(
            batches,
            [cost.longest for cost in menu.costs],
            min_batches=max(1, int(_MIN_REGIME_SHARE * len(batches))),
        ),
    )


def _explore(steps: _Steps, max_strategies: int, on_progress: OnProgress) -> None:
    num_regimes, done = len(steps.regimes), 0
    total = _NUM_ROUNDS * (num_regimes + 1) + max_strategies + 1
    for _ in range(_NUM_ROUNDS):
        for regime in steps.regimes:
            on_progress("search", done, total)
            steps.explorer.search_regime(regime)
            done += 1
        _learn(steps, max_strategies)
        done += 1
    steps.explorer.grow(max_strategies + 1, lambda size: on_progress("search", done + size, total))


def _learn(steps: _Steps, max_strategies: int) -> None:
    """Better estimates from the planner's bounds of some mixes, for some batches."""
    size, judge = max_strategies + 1, steps.judge
    known = {mix for mix, _, _ in judge.judged()}
    num_batches = len(judge.batches)
    for mix in steps.explorer.shortlist(size, _LEARNT_PER_MEMBER * size, known):
        estimates_ms = steps.explorer.estimates_ms(mix)
        for batch in range(0, num_batches, -(-num_batches // _LEARNT_BATCHES)):
            if judge.holds(mix, batch):
                judge.bounded(mix, batch, float(estimates_ms[batch]))
    steps.explorer.learn(
        [(mix, batch, bounded.expected_ms) for mix, batch, bounded in judge.judged()]
    )


def _bound(steps: _Steps, max_strategies: int, on_progress: OnProgress) -> None:
    size = max_strategies + 1
    shortlist = steps.explorer.shortlist(size, _SHORTLIST_PER_MEMBER * size)
    num = len(shortlist) + _MAX_IMPROVEMENTS
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress("bounds", done, num)

    steps.refiner.add(shortlist, advance)
    for _ in range(_MAX_IMPROVEMENTS):
        improved = steps.refiner.improve(max_strategies)
        advance()
        if not improved:
            break


def _result(
    steps: _Steps,
    chosen: Sequence[int],
    one_more: Sequence[int] | None,
    seconds: float,
) -> Proposal:
    refiner, menu = steps.refiner, steps.menu
    fastest = np.array(chosen)[refiner.times_ms[list(chosen)].argmin(axis=0)]
    by_use = sorted(chosen, key=lambda row: (-int((fastest == row).sum()), row))
    names = {row: f"P{place}" for place, row in enumerate(by_use, start=1)}
    mean_ms = refiner.mean_ms(chosen)
    members = []
    for row in by_use:
        without_ms = refiner.mean_ms([other for other in chosen if other != row])
        mine = np.flatnonzero(fastest == row)
        members.append(
            PoolMember(
                name=names[row],
                replicas=menu.text(refiner.mixes[row]),
                longest_tokens=menu.limit(refiner.mixes[row]),
                num_batches=len(mine),
                mean_s=float(refiner.times_ms[row, mine].mean()) / _MS_PER_S if len(mine) else None,
                gain_s=(without_ms - mean_ms) / _MS_PER_S if np.isfinite(without_ms) else None,
            )
        )
    by_gain = refiner.order(chosen)
    sizes = []
    for num in range(1, len(chosen) + 1):
        of_size_ms = refiner.mean_ms(by_gain[:num])
        if np.isfinite(of_size_ms):
            named = tuple(names[row] for row in by_gain[:num])
            sizes.append(PoolSize(names=named, mean_s=of_size_ms / _MS_PER_S))
    return Proposal(
        pool=Pool.of(*(menu.strategy(refiner.mixes[row], name=names[row]) for row in by_use)),
        members=tuple(members),
        mean_s=mean_ms / _MS_PER_S,
        sizes=tuple(sizes),
        one_more_s=None if one_more is None else refiner.mean_ms(one_more) / _MS_PER_S,
        one_more=None if one_more is None else _added(menu, refiner.mixes, chosen, one_more),
        regimes=tuple(_choice(regime, steps, chosen, names) for regime in steps.regimes),
        num_batches=len(steps.judge.batches),
        num_mixes=steps.explorer.num_mixes,
        num_bounds=steps.judge.num_bounds,
        num_plans=steps.judge.num_plans,
        seconds=seconds,
    )


def _added(
    menu: Menu, mixes: Sequence[Mix], chosen: Sequence[int], one_more: Sequence[int]
) -> tuple[str, ...]:
    """What the larger pool has and the chosen one has not."""
    return tuple(menu.text(mixes[row]) for row in one_more if row not in chosen)


def _choice(
    regime: Regime, steps: _Steps, chosen: Sequence[int], names: dict[int, str]
) -> RegimeChoice:
    refiner = steps.refiner
    batches = list(regime.batches)
    means = refiner.times_ms[:, batches].mean(axis=1)
    best = int(means.argmin())
    of_pool = refiner.times_ms[np.ix_(list(chosen), batches)].min(axis=0)
    return RegimeChoice(
        above_tokens=regime.above,
        up_to_tokens=regime.up_to,
        num_batches=len(batches),
        replicas=steps.menu.text(refiner.mixes[best]),
        name=names.get(best),
        mean_s=float(means[best]) / _MS_PER_S,
        pool_mean_s=float(of_pool.mean()) / _MS_PER_S,
    )
