"""Bytes of regrouping for the strategies of a pool: by formula, by plan, against ZeRO-1.

Counted from the transfer plans; nothing is run. `docs/regrouping.md` explains the terms.

    python -m benchmarks.regroup_bytes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

import numpy as np
from rich.table import Table

from benchmarks.inputs import MODEL, POOL
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.terminal import figures_table, results_console
from megatron.hydraulis.transfer.amounts import LayoutAmounts, LinkElements, StrategyAmounts
from megatron.hydraulis.transfer.canonical import CanonicalLayout, model_parameters
from megatron.hydraulis.transfer.collective import Collective, amounts_by_rank, collective_of
from megatron.hydraulis.transfer.ranges import best_owner_orders, held_ranges, num_elements
from megatron.hydraulis.transfer.role import Role, roles_of

PARAMETER_BYTES = 2
"""bf16 on the wire."""
GRADIENT_BYTES = 4
"""fp32 on the wire."""
BYTES_PER_GB = 1e9
WIDTH = 170
"""Columns of the output if it is not a terminal."""


def zero1_degree(strategy: Strategy) -> int | None:
    """dp, over which ZeRO-1 would shard; None if replicas differ or ranks are idle.

    As in Megatron dp includes context-parallel ranks. A ZeRO-1 rank receives P_local·(1 - 1/dp) in
    an iteration's parameter all-gather and sends as much in its gradients' reduce-scatter
    (Rajbhandari et al., arXiv 1910.02054, §7).
    """
    if not strategy.is_homogeneous:
        return None
    (scheme,) = strategy.schemes
    return strategy.num_ranks // (scheme.tp * scheme.pp)


@dataclass(frozen=True)
class StrategyTraffic:
    """Bytes of one strategy's regrouping; lists are by rank."""

    strategy: Strategy
    layout: CanonicalLayout
    """With its order of owners."""
    num_layers: int
    tied_embeddings: bool

    @cached_property
    def roles(self) -> list[Role | None]:
        """The roles by rank."""
        return roles_of(self.strategy, self.num_layers, self.tied_embeddings)

    @cached_property
    def held_bytes(self) -> list[int]:
        """Parameters."""
        of_role = {
            role: PARAMETER_BYTES
            * sum(num_elements(held_ranges(self.layout, b, role)) for b in self.layout.buckets)
            for role in dict.fromkeys(self.roles)
        }
        return [of_role[role] for role in self.roles]

    @property
    def gather_bytes(self) -> list[int]:
        """Received in one step."""
        return [each.received * PARAMETER_BYTES for each in self._links(Collective.ALL_TO_ALL)[0]]

    @property
    def scatter_bytes(self) -> list[int]:
        """Sent in one step."""
        return [each.sent * GRADIENT_BYTES for each in self._links(Collective.ALL_TO_ALL)[1]]

    @property
    def estimate_bytes(self) -> list[float]:
        """P_local·(1 - 1/N): the gather if a rank owned 1/N of what it holds."""
        return [held * (1 - 1 / self.layout.num_ranks) for held in self.held_bytes]

    @property
    def zero1_bytes(self) -> float | None:
        """Mean over ranks, received by ZeRO-1's all-gather; None if ZeRO-1 cannot run it."""
        degree = zero1_degree(self.strategy)
        return None if degree is None else mean(self.held_bytes) * (1 - 1 / degree)

    @property
    def kind(self) -> Collective:
        """The collective that the runtime would use."""
        return collective_of(self.amounts)

    @property
    def amounts(self) -> StrategyAmounts:
        """The amounts that the ranks exchange."""
        per_node = self.strategy.ranks_per_node
        return StrategyAmounts(LayoutAmounts(self.layout, per_node), self.roles)

    def links(self, collective: Collective) -> list[LinkElements[int]]:
        """Elements exchanged in a gather by this collective."""
        return self._links(collective)[0]

    def _links(self, collective: Collective) -> list[list[LinkElements[int]]]:
        """Elements exchanged in gather and scatter by this collective."""
        totals = np.zeros((2, 4, self.layout.num_ranks), dtype=np.int64)
        amounts = self.amounts
        for buckets in amounts.equal_buckets:
            both = amounts_by_rank(collective, amounts, buckets[0])
            totals += len(buckets) * np.stack([[*vars(each).values()] for each in both])
        return [[LinkElements(*of_rank) for of_rank in each.T.tolist()] for each in totals]


@dataclass(frozen=True)
class PoolTraffic:
    """A pool's strategies, with owners in the order of the ranks and with chosen owners."""

    pool: Pool
    shape: ModelShape
    commonest: str
    """The strategy for which a run would choose its owners."""

    @cached_property
    def layout(self) -> CanonicalLayout:
        """Rank r owns share r."""
        return CanonicalLayout.build(
            model_parameters(self.shape),
            num_atoms=self.pool.tp_lcm,
            num_ranks=self.pool.num_ranks,
        )

    def by_number(self, strategy: Strategy) -> StrategyTraffic:
        """The traffic with owners in the order of the ranks."""
        return self._traffic(strategy, self.layout)

    def chosen_for_itself(self, strategy: Strategy) -> StrategyTraffic:
        """The traffic with the owners that are best for this strategy."""
        return self._traffic(strategy, self._chosen(strategy))

    def chosen_for_commonest(self, strategy: Strategy) -> StrategyTraffic:
        """The traffic with the owners that are best for the pool's commonest strategy."""
        return self._traffic(strategy, self._layout_for_commonest)

    @cached_property
    def _layout_for_commonest(self) -> CanonicalLayout:
        return self._chosen(self.pool.strategy(self.commonest))

    def _chosen(self, strategy: Strategy) -> CanonicalLayout:
        roles = roles_of(strategy, self.shape.num_layers, self.shape.tied_embeddings)
        return self.layout.with_owner_orders(best_owner_orders(self.layout, roles))

    def _traffic(self, strategy: Strategy, layout: CanonicalLayout) -> StrategyTraffic:
        return StrategyTraffic(strategy, layout, self.shape.num_layers, self.shape.tied_embeddings)


def volume_table(traffic: PoolTraffic) -> Table:
    """Bytes that a rank receives in a gather, by formula and by plan, compared with ZeRO-1."""
    table = figures_table(
        "Gather: GB that a rank receives in an iteration (mean / max), bf16",
        ("", "strategy"),
        (
            "P_local",
            "P_local\n·(1-1/N)",
            "owners by\nnumber",
            "chosen for\nthis strategy",
            f"chosen for\n{traffic.commonest}",
            "ZeRO-1",
            "by number\n/ ZeRO-1",
            "chosen\n/ ZeRO-1",
            "scatter, sent\n(fp32)",
        ),
        caption="ZeRO-1 (means): P_local·(1 - 1/dp), for strategies of equal replicas. The "
        "previous strategy does not matter.",
    )
    for strategy in traffic.pool.strategies:
        by_number = traffic.by_number(strategy)
        chosen = traffic.chosen_for_itself(strategy)
        commonest = traffic.chosen_for_commonest(strategy)
        zero1 = by_number.zero1_bytes
        table.add_row(
            strategy.name,
            str(strategy),
            _mean_and_max(by_number.held_bytes),
            _mean_and_max(by_number.estimate_bytes),
            *(_mean_and_max(each.gather_bytes) for each in (by_number, chosen, commonest)),
            "-" if zero1 is None else f"{zero1 / BYTES_PER_GB:.3f}",
            *(
                "-" if zero1 is None else f"{mean(each.gather_bytes) / zero1:.3f}"
                for each in (by_number, chosen)
            ),
            _mean_and_max(by_number.scatter_bytes),
        )
    return table


def link_table(traffic: PoolTraffic) -> Table:
    """Bytes inside nodes and across them, in one step and in two."""
    table = figures_table(
        f"Gather by link: GB that a rank receives inside its node and across (mean / max), nodes "
        f"of {traffic.pool.ranks_per_node}",
        ("", "strategy", "owners", "used"),
        ("one step\ninside", "one step\nacross", "two steps\ninside", "two steps\nacross", "saved"),
        caption="Owners are chosen for the strategy of the row. In two steps relays receive for "
        "others.",
    )
    owners: dict[str, Callable[[Strategy], StrategyTraffic]] = {
        "by number": traffic.by_number,
        "chosen": traffic.chosen_for_itself,
    }
    for strategy in traffic.pool.strategies:
        for name, of_strategy in owners.items():
            found = of_strategy(strategy)
            kinds = (Collective.ALL_TO_ALL, Collective.TWO_STEP)
            one_step, two_steps = map(found.links, kinds)
            across = [sum(each.received_across for each in kind) for kind in (one_step, two_steps)]
            saved = 1 - across[1] / across[0] if across[0] else 0.0
            is_first = name == next(iter(owners))
            table.add_row(
                strategy.name if is_first else "",
                str(strategy) if is_first else "",
                name,
                found.kind.value,
                *_received(one_step),
                *_received(two_steps),
                f"{saved:.1%}",
            )
    return table


def _received(links: Sequence[LinkElements[int]]) -> Iterator[str]:
    yield _mean_and_max([each.received_inside * PARAMETER_BYTES for each in links])
    yield _mean_and_max([each.received_across * PARAMETER_BYTES for each in links])


def _mean_and_max(num_bytes: Sequence[float]) -> str:
    return f"{mean(num_bytes) / BYTES_PER_GB:.3f} / {max(num_bytes) / BYTES_PER_GB:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    options = _parser().parse_args(arguments)
    console = results_console(WIDTH)
    pool, shape = Pool.read(options.pool), ModelShape.read(MODEL)
    pool.check_model(shape)
    traffic = PoolTraffic(pool, shape, options.commonest or pool.strategies[0].name)
    console.print(
        f"{shape.num_parameters / 1e9:.1f} G parameters in {len(traffic.layout.buckets)} "
        f"buckets, {pool.num_ranks} ranks, T = {pool.tp_lcm} atoms"
    )
    console.print(volume_table(traffic))
    console.print(link_table(traffic))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regroup_bytes",
        description="Bytes of regrouping a model, counted from transfer plans.",
    )
    parser.add_argument("--pool", type=Path, default=POOL, help="pool file (default: %(default)s)")
    parser.add_argument(
        "--commonest",
        metavar="NAME",
        help="the pool's strategy for which owners are chosen (default: the first)",
    )
    return parser


if __name__ == "__main__":
    main()
