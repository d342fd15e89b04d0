"""From the terms of a strategy's text to replicas on the ranks of a job."""

from collections.abc import Iterable, Sequence

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.notation import Term
from megatron.hydraulis.placement import place
from megatron.hydraulis.scheme import Replica, Scheme

__all__ = ["place_terms"]


def place_terms(
    terms: Sequence[Term], num_ranks: int, ranks_per_node: int, *, label: str
) -> tuple[Replica, ...]:
    """The replicas in the order of the text: named ranks first taken out, then the rest placed.

    Raises StrategyError, which names the label, when the terms do not name every rank of the job
    once and when a replica lists a rank twice.
    """
    _check_num_ranks(terms, num_ranks, label)
    wanted: list[tuple[Scheme, tuple[int, ...] | None]] = []
    for term in terms:
        if term.scheme is None:
            continue
        size = term.scheme.num_ranks
        for copy in range(term.num_copies):
            start = copy * size
            ranks = None if term.ranks is None else term.ranks[start : start + size]
            wanted.append((term.scheme, ranks))
    named = {rank for _, ranks in wanted if ranks is not None for rank in ranks}
    free = [rank for rank in range(num_ranks) if rank not in named]
    open_schemes = [scheme for scheme, ranks in wanted if ranks is None]
    if sum(scheme.num_ranks for scheme in open_schemes) > len(free):
        # Cannot happen with distinct ranks inside the job; which of the two it is, and where,
        # Strategy says itself once the replicas stand.
        free += range(num_ranks, num_ranks + sum(scheme.num_ranks for scheme in open_schemes))
    placed = iter(place(open_schemes, free, ranks_per_node))
    try:
        return tuple(
            Replica(scheme, next(placed) if ranks is None else ranks) for scheme, ranks in wanted
        )
    except StrategyError as error:
        raise StrategyError(f"strategy {label!r}: {error}") from None


def _plural(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def _check_num_ranks(terms: Iterable[Term], num_ranks: int, label: str) -> None:
    num_replicas = num_used = num_idle = 0
    for term in terms:
        if term.scheme is None:
            num_idle += term.num_copies
        else:
            num_replicas += term.num_copies
            num_used += term.num_copies * term.scheme.num_ranks
    num_named = num_used + num_idle
    use = "uses" if num_replicas == 1 else "use"
    what = f"{_plural(num_replicas, 'replica')} {use} {_plural(num_used, 'rank')}"
    if num_idle:
        what += f", {num_idle} more {'is' if num_idle == 1 else 'are'} idle,"
    if num_named > num_ranks:
        fix = "remove idle ranks" if num_used <= num_ranks else "remove a replica"
        raise StrategyError(
            f"strategy {label!r}: {what} but the job has {num_ranks}; "
            f"{fix} or start {_plural(num_named, 'rank')}"
        )
    if num_named < num_ranks:
        num_missing = num_ranks - num_named
        idle = "idle" if num_missing == 1 else f"{num_missing}*idle"
        raise StrategyError(
            f"strategy {label!r}: {what} but the job has {num_ranks}, all to be used or named "
            f"idle; append '+{idle}', add a replica or start {_plural(num_named, 'rank')}"
        )
