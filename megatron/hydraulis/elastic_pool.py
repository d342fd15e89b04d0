"""A pool for another number of ranks than there are: what of it can go on with those there are.

Every strategy keeps its schemes, largest first, as far as the ranks go, and begins again while
they last: ``tp2+2*tp1`` is ``tp2`` on 2 ranks, ``tp2+tp1`` on 3 and ``tp2+2*tp1+tp2+tp1`` on 7.
What the model learns does not depend on it, only how long an iteration takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.notation import parse_terms
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["FittedPool", "fit_pool", "num_ranks_of"]


@dataclass(frozen=True)
class FittedPool:
    """Strategies for the ranks that there are."""

    pool: Pool
    changes: tuple[str, ...]
    """What is not as it was given, a line each; none where nothing had to be changed."""


def fit_pool(pool: Pool, num_ranks: int, ranks_per_node: int, *, num_layers: int) -> FittedPool:
    """The pool for another number of ranks, with the strategies' names.

    A strategy whose largest replica does not fit is dropped. If that leaves none, there is a
    strategy for every scheme whose tp divides one of the pool and whose pp cuts the layers evenly:
    planning leaves out those that do not hold the longest sequence.

    Args:
        pool: for any number of ranks.
        num_ranks: that there are.
        ranks_per_node: of these; all, where they are fewer.
        num_layers: of the model.
    """
    if pool.num_ranks == num_ranks:
        return FittedPool(pool, ())
    changes = [f"the strategies are for {pool.num_ranks} ranks but there are {num_ranks}"]
    fitted: dict[str, Strategy] = {}
    for strategy in pool.strategies:
        schemes = _fill(_largest_first(strategy), num_ranks)
        if not schemes:
            largest = _largest_first(strategy)[0]
            changes.append(
                f"strategy {strategy.name!r} is left out: its {largest} needs {largest.num_ranks} "
                f"ranks"
            )
            continue
        try:
            found = _strategy(schemes, num_ranks, ranks_per_node, strategy.name)
        except StrategyError as error:
            changes.append(f"strategy {strategy.name!r} is left out: {error}")
            continue
        if str(found) in fitted:
            same = fitted[str(found)].name
            changes.append(
                f"strategy {strategy.name!r} is left out: it becomes the same as {same!r}"
            )
            continue
        if strategy.name == str(strategy):
            found = replace(found, name=str(found))
        fitted[str(found)] = found
        lost = ", without its own max_tokens" if strategy.token_limits else ""
        changes.append(f"strategy {strategy.name!r}: {strategy} becomes {found}{lost}")
    if not fitted:
        for found in _every_scheme(pool, num_ranks, ranks_per_node, num_layers):
            fitted[str(found)] = found
        changes.append(f"no strategy is left, so {', '.join(fitted)} may be used instead")
    return FittedPool(Pool.of(*fitted.values()), tuple(changes))


def num_ranks_of(text: str) -> int:
    """Ranks that a strategy is written for, idle ones included. Raises StrategyError."""
    terms = parse_terms(text, label=text.strip())
    named = [rank for term in terms for rank in term.ranks or ()]
    used = sum(term.num_copies * (term.scheme.num_ranks if term.scheme else 1) for term in terms)
    return max(used, *(rank + 1 for rank in named)) if named else used


def _largest_first(strategy: Strategy) -> list[Scheme]:
    schemes = [replica.scheme for replica in strategy.replicas]
    return sorted(schemes, key=lambda scheme: -scheme.num_ranks)


def _fill(schemes: list[Scheme], num_ranks: int) -> list[Scheme]:
    """As many as the ranks hold, over and over again; none if the first does not fit."""
    filled: list[Scheme] = []
    if schemes[0].num_ranks > num_ranks:
        return filled
    left = num_ranks
    while left >= min(scheme.num_ranks for scheme in schemes):
        for scheme in schemes:
            if scheme.num_ranks <= left:
                filled.append(scheme)
                left -= scheme.num_ranks
    return filled


def _strategy(
    schemes: Sequence[Scheme], num_ranks: int, ranks_per_node: int, name: str | None = None
) -> Strategy:
    terms = [str(scheme) for scheme in schemes]
    idle = num_ranks - sum(scheme.num_ranks for scheme in schemes)
    terms += ["idle"] * idle
    return Strategy.parse("+".join(terms), num_ranks, name=name, ranks_per_node=ranks_per_node)


def _every_scheme(
    pool: Pool, num_ranks: int, ranks_per_node: int, num_layers: int
) -> list[Strategy]:
    """One strategy for each scheme that leaves fewer ranks idle than a replica has."""
    found = []
    for tp in range(1, num_ranks + 1):
        for pp in range(1, num_ranks // tp + 1):
            if pool.tp_lcm % tp or num_layers % pp:
                continue
            scheme = Scheme(tp=tp, pp=pp)
            try:
                found.append(_strategy(_fill([scheme], num_ranks), num_ranks, ranks_per_node))
            except StrategyError:
                continue  # its tp does not fit into nodes
    return found
