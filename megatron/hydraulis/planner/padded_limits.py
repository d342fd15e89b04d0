"""Limits kept with the padding of context parallelism, after packing by tokens alone.

With cp > 1 a sequence takes up to 2·cp - 1 tokens more of its row than it has. Dispatch and packing
count tokens without them, so that their bounds hold as they are: the few micro-batches that then
turn out too large are relieved here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.candidate import Candidate
from megatron.hydraulis.planner.packing import Packing, SchemeCost
from megatron.hydraulis.planner.replica_plan import MicroBatch
from megatron.hydraulis.scheme import Scheme

__all__ = ["with_padding"]

Pack = list[tuple[int, int]]
"""Sequences of a micro-batch and their lengths."""


def with_padding(
    candidate: Candidate,
    costs: Sequence[SchemeCost],
    max_tokens: Callable[[Scheme], int],
) -> Candidate:
    """The candidate, packings changed where a row with its padding is above the limit.

    costs: shape (num_replicas,). Micro-batches with context groups of their own are left as they
    are. Every sequence must fit a row by itself.
    """
    return replace(
        candidate,
        packings=tuple(
            _relieved(packing, cost, replica.scheme, max_tokens(replica.scheme))
            for packing, cost, replica in zip(
                candidate.packings, costs, candidate.strategy.replicas, strict=True
            )
        ),
    )


def _relieved(packing: Packing, cost: SchemeCost, scheme: Scheme, limit: int) -> Packing:
    if scheme.cp == 1 or all(
        micro_batch.groups or scheme.row_tokens(micro_batch.lengths) <= limit
        for micro_batch in packing.micro_batches
    ):
        return packing
    packs: list[Pack] = []
    left: Pack = []
    for micro_batch in packing.micro_batches:
        rising = sorted(
            zip(micro_batch.sequences, micro_batch.lengths, strict=True), key=lambda part: part[1]
        )
        while scheme.row_tokens([length for _, length in rising]) > limit:
            left.append(rising.pop(0))
        packs.append(rising)
    for part in sorted(left, key=lambda part: -part[1]):
        fitting = [
            pack
            for pack in packs
            if scheme.row_tokens([length for _, length in (*pack, part)]) <= limit
        ]
        if fitting:
            min(fitting, key=lambda pack: _time_ms(pack, cost)).append(part)
        else:
            packs.append([part])
    packs.sort(key=lambda pack: -_time_ms(pack, cost))
    return Packing(
        micro_batches=tuple(
            MicroBatch(tuple(index for index, _ in pack), tuple(length for _, length in pack))
            for pack in packs
        ),
        time_ms=pipeline_time_ms([_time_ms(pack, cost) for pack in packs], cost.num_stages),
    )


def _time_ms(pack: Pack, cost: SchemeCost) -> float:
    return cost.coefficients.time_ms(length for _, length in pack)
