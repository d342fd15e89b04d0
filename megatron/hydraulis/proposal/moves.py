"""Steps from one mix to others: replicas of some schemes exchanged for replicas of another.

All exchanges are of the same kind, whether they trade ``2*tp4`` for ``tp8``, pp for tp or one
pipeline for many single ranks: room is made for some replicas of a scheme by taking others away,
and ranks that are left over are put to use. Numbers double, so that a large job does not move one
replica at a time.
"""

from collections.abc import Iterator

from megatron.hydraulis.proposal.menu import Menu, Mix

__all__ = ["neighbours"]


def neighbours(menu: Menu, mix: Mix) -> tuple[Mix, ...]:
    """Every mix one exchange away, each once, in a fixed order."""
    present = [index for index, num in enumerate(mix) if num]
    found: dict[Mix, None] = {}
    for added in range(len(mix)):
        for taken in present:
            if taken == added:
                continue
            for num in _doubling(mix[taken]):
                _keep_filled(menu, _without(mix, taken, num), added, present, found)
            for num in _doubling(menu.num_ranks // menu.sizes[added]):
                made = _with_room(menu, mix, added, num, taken, present)
                if made is not None:
                    _keep_filled(menu, made, None, [taken, added, *present], found)
    found.pop(mix, None)
    return tuple(found)


def _doubling(most: int) -> Iterator[int]:
    num = 1
    while num <= most:
        yield num
        num *= 2
    if num < 2 * most:
        # The power above most stands for all of them.
        yield most


def _without(mix: Mix, index: int, num: int) -> list[int]:
    counts = list(mix)
    counts[index] -= num
    return counts


def _with_room(
    menu: Menu, mix: Mix, added: int, num: int, taken: int, present: list[int]
) -> list[int] | None:
    """num more replicas of a scheme, room made by those of taken first; None without room."""
    counts = list(mix)
    missing = num * menu.sizes[added] - menu.num_idle(mix)
    for index in (taken, *(other for other in present if other not in (taken, added))):
        if missing <= 0:
            break
        removed = min(counts[index], -(-missing // menu.sizes[index]))
        counts[index] -= removed
        missing -= removed * menu.sizes[index]
    if missing > 0:
        return None
    counts[added] += num
    return counts


def _keep_filled(
    menu: Menu, counts: list[int], first: int | None, others: list[int], found: dict[Mix, None]
) -> None:
    """Put what is idle to use: the first scheme as far as it goes, each of the others next."""
    mix = tuple(counts)
    begin = () if first is None else (first,)
    for other in dict.fromkeys(others):
        filled = menu.filled(mix, (*begin, other))
        if any(filled):
            found[filled] = None
