"""Pools of strategies: from a file, fitted to another number of ranks, with balanced layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy.notation import parse_scheme, parse_terms
from megatron.hydraulis.strategy.scheme import Replica, Scheme
from megatron.hydraulis.strategy.strategy import Strategy, whole_nodes

_FORMAT_VERSION = 1
MADE_FOR = "made_for"
"""Key of a pool file: what a run proposed the pool for."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The strategies that a run may use.

    Raises StrategyError if there is none, two have the same name, or one is for a job of another
    size.
    """

    num_ranks: int
    ranks_per_node: int
    strategies: tuple[Strategy, ...]

    def __post_init__(self) -> None:
        nodes = whole_nodes(self.num_ranks, self.ranks_per_node, "pool")
        object.__setattr__(self, "ranks_per_node", nodes)
        if not self.strategies:
            raise StrategyError("pool: a pool needs at least 1 strategy but has 0; add one")
        names = [strategy.name for strategy in self.strategies]
        for strategy in self.strategies:
            if names.count(strategy.name) > 1:
                raise StrategyError(
                    f"pool: names must differ but {names.count(strategy.name)} strategies are "
                    f"called {strategy.name!r}; rename all but one of them"
                )
            job = (strategy.num_ranks, strategy.ranks_per_node)
            if job != (self.num_ranks, self.ranks_per_node):
                raise StrategyError(
                    f"strategy {strategy.name!r}: is for {job[0]} ranks, {job[1]} a node, but "
                    f"its pool for {self.num_ranks} ranks, {self.ranks_per_node} a node; "
                    f"write it for the pool's ranks"
                )

    @classmethod
    def of(cls, *strategies: Strategy) -> "Pool":
        """A pool of at least one strategy, for the job of the first; raises StrategyError."""
        job = (strategies[0].num_ranks, strategies[0].ranks_per_node) if strategies else (1, 1)
        return cls(*job, strategies)

    @property
    def shares_weights(self) -> bool:
        """True if cp ranks share weights in some strategy."""
        return any(strategy.shares_weights for strategy in self.strategies)

    @property
    def tp_lcm(self) -> int:
        """The least common multiple of all tp degrees: into how many atoms parameters divide."""
        return math.lcm(*(scheme.tp for strategy in self.strategies for scheme in strategy.schemes))

    @property
    def ep_lcm(self) -> int:
        """The least common multiple of all ep degrees."""
        return math.lcm(*(scheme.ep for strategy in self.strategies for scheme in strategy.schemes))

    @property
    def groups(self) -> tuple[Scheme, ...]:
        """The schemes as which micro-batches may run, each once: see `Scheme.group_schemes`."""
        schemes = (scheme for strategy in self.strategies for scheme in strategy.schemes)
        return tuple(dict.fromkeys(group for each in schemes for group in each.group_schemes))

    def strategy(self, name: str) -> Strategy:
        """The strategy of this name; StrategyError if there is none."""
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        known = ", ".join(repr(strategy.name) for strategy in self.strategies)
        raise StrategyError(
            f"strategy {name!r}: not among the pool's {len(self.strategies)} strategies; "
            f"use one of {known}"
        )

    def check_model(self, shape: ModelShape) -> None:
        """Raise StrategyError unless every strategy divides a model of this shape evenly."""
        for strategy in self.strategies:
            strategy.check_model(shape)

    def to_json(self) -> dict[str, Any]:
        """The content of a pool file; from_json is its inverse."""
        return {
            "num_ranks": self.num_ranks,
            "ranks_per_node": self.ranks_per_node,
            "strategies": [strategy.to_json() for strategy in self.strategies],
        }

    @classmethod
    def read(cls, path: str | Path) -> "Pool":
        """Read a pool file; StrategyError names the file and what is wrong."""
        content = read_json(path, "pool file", StrategyError)
        try:
            return cls.from_json(content)
        except StrategyError as error:
            raise StrategyError(f"pool file {path}: {error}") from None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Pool":
        """Read the content of a pool file; StrategyError names a missing or unknown key.

        ``{"num_ranks": 64, "ranks_per_node": 8, "strategies": [{"name": "S1",
        "replicas": "tp16+2*tp8pp3", "max_tokens": {"tp16": 43520}}]}``; max_tokens (see
        Strategy.token_limits), ``"version": 1`` and ``"made_for"``, by which a run recognises its
        own proposal, are optional.
        """
        pool = JsonObject(content, "pool", StrategyError)
        pool.check_version(_FORMAT_VERSION)
        num_ranks, ranks_per_node = pool.integer("num_ranks"), pool.integer("ranks_per_node")
        entries = [
            pool.nested(entry, f"strategy {index} of the pool")
            for index, entry in enumerate(pool.array("strategies"))
        ]
        if pool.has(MADE_FOR):
            pool.value(MADE_FOR)
        pool.check_all_read()
        strategies = tuple(_strategy_of(entry, num_ranks, ranks_per_node) for entry in entries)
        return cls(num_ranks, ranks_per_node, strategies)


def _strategy_of(entry: JsonObject, num_ranks: int, ranks_per_node: int) -> Strategy:
    """A strategy of a pool file."""
    name, text = entry.text("name"), entry.text("replicas")
    strategy = Strategy.parse(text, num_ranks, name=name, ranks_per_node=ranks_per_node)
    if entry.has("max_tokens"):
        limits = entry.nested(entry.value("max_tokens"), f"max_tokens of strategy {name!r}")
        strategy = replace(
            strategy,
            token_limits=tuple(
                (parse_scheme(key, label=f"{name}, max_tokens of {key}"), limits.integer(key))
                for key in limits.keys
            ),
        )
    entry.check_all_read()
    return strategy


def fit_pool(
    pool: Pool, num_ranks: int, ranks_per_node: int, *, num_layers: int
) -> tuple[Pool, tuple[str, ...]]:
    """The pool for another number of ranks, with the strategies' names, and a line per change.

    A strategy whose largest replica does not fit is dropped. If none is left, the pool has a
    strategy for every scheme whose tp divides the pool's tp_lcm and whose pp divides the layers;
    planning skips those that do not hold the longest sequence.

    num_layers: of the model.
    """
    if pool.num_ranks == num_ranks:
        return pool, ()
    changes = [f"the strategies are for {pool.num_ranks} ranks but there are {num_ranks}"]
    fitted: dict[str, Strategy] = {}
    for strategy in pool.strategies:
        schemes = _fill(_largest_first(strategy), num_ranks)
        if not schemes:
            largest = _largest_first(strategy)[0]
            changes.append(
                f"strategy {strategy.name!r} is skipped: its {largest} needs {largest.num_ranks} "
                f"ranks"
            )
            continue
        try:
            found = _strategy(schemes, num_ranks, ranks_per_node, strategy.name)
        except StrategyError as error:
            changes.append(f"strategy {strategy.name!r} is skipped: {error}")
            continue
        if str(found) in fitted:
            same = fitted[str(found)].name
            changes.append(
                f"strategy {strategy.name!r} is skipped: it becomes the same as {same!r}"
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
    return Pool.of(*fitted.values()), tuple(changes)


def num_ranks_of(text: str) -> int:
    """Ranks that a strategy text needs, idle ones included. Raises StrategyError."""
    terms = parse_terms(text, label=text.strip())
    named = [rank for term in terms for rank in term.ranks or ()]
    used = sum(term.num_copies * (term.scheme.num_ranks if term.scheme else 1) for term in terms)
    return max(used, *(rank + 1 for rank in named)) if named else used


def _largest_first(strategy: Strategy) -> list[Scheme]:
    schemes = [replica.scheme for replica in strategy.replicas]
    return sorted(schemes, key=lambda scheme: -scheme.num_ranks)


def _fill(schemes: list[Scheme], num_ranks: int) -> list[Scheme]:
    """Repeats the schemes, largest first, while they fit; none if the first does not."""
    if schemes[0].num_ranks > num_ranks:
        return []
    filled: list[Scheme] = []
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
    """A strategy of as many replicas as fit, for each scheme."""
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


ChooseLayers = Callable[[Scheme, int | None], Scheme]
"""Takes a scheme without layers and its strategy's ``max_tokens`` for it, if any; returns the
scheme with layers, or unchanged for the even split."""


def balance_pool(pool: Pool, choose: ChooseLayers) -> Pool:
    """The pool with chosen layers for every pipeline that lists none.

    Strategies keep their names, unless the name is their text.
    """
    return Pool.of(*(_balance(strategy, choose) for strategy in pool.strategies))


def _balance(strategy: Strategy, choose: ChooseLayers) -> Strategy:
    chosen = {
        scheme: choose(scheme, dict(strategy.token_limits).get(scheme))
        if scheme.layers is None and scheme.pp > 1
        else scheme
        for scheme in strategy.schemes
    }
    limits: dict[Scheme, int] = {}
    for scheme, limit in strategy.token_limits:
        # Two schemes may become the same one: the lower limit holds.
        limits[chosen[scheme]] = min(limit, limits.get(chosen[scheme], limit))
    balanced = replace(
        strategy,
        replicas=tuple(
            Replica(chosen[replica.scheme], replica.ranks) for replica in strategy.replicas
        ),
        token_limits=tuple(limits.items()),
    )
    return replace(balanced, name=str(balanced)) if strategy.name == str(strategy) else balanced
