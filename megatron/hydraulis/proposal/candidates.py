"""Candidate schemes for proposed strategies, mixes of them, and exchanges between mixes.

A **mix** is a strategy without its placement: the number of replicas of each candidate scheme.
Times depend on nothing else, so the search works on mixes.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, listed
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

_NUM_COMPARED, _MOST_OVER_SHORTEST = 16, 64.0
"""Lengths at which two schemes are compared, and the longest of them over the shortest: of shorter
sequences only the rank time counts."""

_LEAST_CONSTANT_MS = 1e-3

_NUM_SPLITTING = 3
"""Schemes with ``~`` and ep or fs that are bounded and planned, for each of two lengths that they
must hold: there are over a hundred on 64 ranks."""
_NUM_WEIGHED = 64
"""Lengths, each of an equal share of the tokens, at which these are compared."""

FloatArray = npt.NDArray[np.float64]
Mix = tuple[int, ...]
"""Replicas of each scheme, shape (num_schemes,)."""


@dataclass(frozen=True)
class Candidates:
    """The schemes that may be in a best strategy of a job of num_ranks ranks.

    Raises ConfigurationError if there are none.
    """

    num_ranks: int
    ranks_per_node: int
    schemes: tuple[Scheme, ...]
    costs: tuple[SchemeCost, ...]
    """Shape (num_schemes,)."""
    overheads_ms: tuple[float, ...]
    """Shape (num_schemes,): of a strategy of as many replicas of the scheme as the job has room
    for."""

    def __post_init__(self) -> None:
        if not self.schemes:
            raise ConfigurationError(
                f"a pool needs a scheme of at most {self.num_ranks} ranks that holds the model "
                f"but the cost profile has 0 of them; measure more schemes or start more ranks"
            )

    @classmethod
    def of(
        cls,
        cost_model: ProfileCostModel,
        num_ranks: int,
        ranks_per_node: int,
        allowed: Sequence[Scheme] | None = None,
        batches: Sequence[Sequence[int]] = (),
        longest: int = 0,
    ) -> "Candidates":
        """The schemes of a cost profile that may be in a best strategy.

        Excluded are schemes that are not allowed (None allows all), are too large for the job, do
        not hold the model, or are worse than another one in everything, see `_Paces.rivals`; with
        batches pipelines are compared with the time that filling them takes. Schemes that divide
        their width per micro-batch (``cp8~``) are included, see `_splitting`. longest:
        tokens of a sequence that some scheme must hold, if the batches have none as long. Raises
        ConfigurationError for an allowed scheme that the profile lacks.
        """
        rows = (row.scheme for row in cost_model.schemes)
        replicas = (scheme for scheme in rows if scheme.as_replica == scheme)
        known = (*replicas, *_splitting(cost_model, num_ranks))
        for scheme in allowed or ():
            if scheme not in known:
                names = list(map(str, known))
                nearest = difflib.get_close_matches(str(scheme), names, n=len(names), cutoff=0.0)
                raise ConfigurationError(
                    f"--schemes: strategies are made of schemes of the cost profile but {scheme} "
                    f"is none of {listed(nearest)}; measure it or leave it out"
                )
        overhead_ms = partial(
            _overhead_ms, cost_model=cost_model, num_ranks=num_ranks, ranks_per_node=ranks_per_node
        )
        found = [
            _Rated(scheme, cost, overhead_ms)
            for scheme in known
            if (allowed is None or scheme in allowed)
            and scheme.num_ranks <= num_ranks
            and (cost := _cost(scheme, cost_model)).longest > 0
        ]
        iteration_ms = _least_iteration_ms(found, num_ranks, batches)
        paces = _Paces([(one.scheme, one.cost) for one in found], iteration_ms)
        kept = [
            mine
            for index, mine in enumerate(found)
            if not any(
                _is_beaten(mine, found[place], place < index, is_better=is_better)
                for place, is_better in paces.rivals(index)
            )
        ]
        if allowed is None and batches:
            kept = _without_slow_waves(kept, num_ranks, iteration_ms, batches, longest)
        return cls(
            num_ranks,
            ranks_per_node,
            tuple(one.scheme for one in kept),
            tuple(one.cost for one in kept),
            tuple(one.overhead_ms for one in kept),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of a replica of each scheme, shape (num_schemes,)."""
        return tuple(scheme.num_ranks for scheme in self.schemes)

    @cached_property
    def _largest_first(self) -> tuple[int, ...]:
        """Indices of the schemes."""
        return tuple(sorted(range(len(self.sizes)), key=lambda i: (-self.sizes[i], i)))

    @cached_property
    def plain(self) -> tuple[int, ...]:
        """Indices of the schemes without ``~``. The others have only bounds before they
        are planned, which would mislead the search: they only replace what it finds. All indices if
        there is no other scheme."""
        plain = tuple(i for i, scheme in enumerate(self.schemes) if not scheme.splits_cp)
        return plain or tuple(range(len(self.schemes)))

    def wave_mixes(self, mix: Mix) -> Iterator[Mix]:
        """Mixes with a scheme with ``~``: alone, and in the place of a mix's largest replicas."""
        present = [index for index in self._largest_first if mix[index]]
        for index in sorted(set(range(len(self.sizes))) - set(self.plain)):
            yield self.filled((0,) * len(mix), (index,))
            made = _with_room(self, mix, index, 1, present[0], present)
            if made is not None:
                yield self.filled(tuple(made), present)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence that some scheme holds."""
        return max(cost.longest for cost in self.costs)

    def num_idle(self, mix: Mix) -> int:
        """Ranks that a mix leaves idle."""
        return self.num_ranks - int(math.sumprod(mix, self.sizes))

    def is_static(self, mix: Mix) -> bool:
        """True for a mix of one scheme, which `Scheme.is_static`, on all ranks."""
        used = [scheme for num, scheme in zip(mix, self.schemes, strict=True) if num]
        return len(used) == 1 and used[0].is_static and not self.num_idle(mix)

    def limit(self, mix: Mix) -> int:
        """Most tokens of a sequence that a mix holds; 0 without replicas."""
        return max((c.longest for n, c in zip(mix, self.costs, strict=True) if n), default=0)

    def text(self, mix: Mix) -> str:
        """The mix in strategy notation, large replicas first."""
        order = sorted(
            (index for index, num in enumerate(mix) if num),
            key=lambda index: (
                -self.schemes[index].tp,
                -self.schemes[index].num_ranks,
                str(self.schemes[index]),
            ),
        )
        terms = [(mix[index], str(self.schemes[index])) for index in order]
        if self.num_idle(mix):
            terms.append((self.num_idle(mix), "idle"))
        return "+".join(what if num == 1 else f"{num}*{what}" for num, what in terms)

    def strategy(self, mix: Mix, *, name: str | None = None) -> Strategy:
        """The mix placed on the ranks; the default name is its text."""
        return Strategy.parse(
            self.text(mix), self.num_ranks, name=name, ranks_per_node=self.ranks_per_node
        )

    def filled(self, mix: Mix, first: Sequence[int] = ()) -> Mix:
        """The mix with idle ranks filled: schemes with these indices first, then the largest.

        Ranks that are too few for any scheme remain idle.
        """
        counts, idle = list(mix), self.num_idle(mix)
        for index in (*first, *self._largest_first):
            if not idle:
                break
            num, idle = divmod(idle, self.sizes[index])
            counts[index] += num
        return tuple(counts)


def _splitting(cost_model: ProfileCostModel, num_ranks: int) -> tuple[Scheme, ...]:
    """Schemes with ``~`` for which all widths of groups are among the schemes.

    With ep they are Megatron's usual layout, expert parallelism over data-parallel ranks. Without
    it, and without fs, which makes room for groups that are no replicas, narrower ones than half of
    the job hardly differ from groups of fixed widths.
    """
    return tuple(
        scheme
        for scheme in cost_model.splitting_schemes
        if scheme.distributes_parameters or (scheme.pp == 1 and 2 * scheme.num_ranks >= num_ranks)
    )


def _cost(scheme: Scheme, cost_model: ProfileCostModel) -> SchemeCost:
    """Cost of a replica in the planner, whose limits include padding."""
    pool = Pool.of(Strategy.parse(str(scheme), scheme.num_ranks))
    # The overhead depends on the whole job.
    return PoolCosts(pool, replace(cost_model, regroup=None)).replica_costs(pool.strategies[0])[0]


def _overhead_ms(
    scheme: Scheme, cost_model: ProfileCostModel, num_ranks: int, ranks_per_node: int
) -> float:
    """The overhead of a strategy of as many replicas of the scheme as possible."""
    num_replicas, num_idle = divmod(num_ranks, scheme.num_ranks)
    text = f"{num_replicas}*{scheme}" + (f"+{num_idle}*idle" if num_idle else "")
    return cost_model.overhead_ms(Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node))


@dataclass(frozen=True, eq=False)
class _Rated:
    """A scheme with its cost and overhead."""

    scheme: Scheme
    cost: SchemeCost
    _overhead_ms: Callable[[Scheme], float]

    @cached_property
    def overhead_ms(self) -> float:
        """Computed if needed: it takes a hundredth of a second."""
        return self._overhead_ms(self.scheme)


def _least_iteration_ms(
    rated: Sequence[_Rated], num_ranks: int, batches: Sequence[Sequence[int]]
) -> float:
    """Mean over batches of their work at the best rates, over all ranks; inf without batches."""
    if not batches or not rated:
        return math.inf
    a_ms = min(one.scheme.num_ranks * one.cost.coefficients.a_ms_per_token2 for one in rated)
    b_ms = min(one.scheme.num_ranks * one.cost.coefficients.b_ms_per_token for one in rated)
    all_ranks = Coefficients(a_ms, b_ms, 0.0, rated[0].cost.coefficients.window)
    return math.fsum(map(all_ranks.time_ms, batches)) / len(batches) / num_ranks


def _is_beaten(mine: _Rated, rival: _Rated, wins_ties: bool, *, is_better: bool) -> bool:
    """Returns whether a rival of at most the same paces, and a lower one if is_better, has no more
    overhead, and is better in something unless it wins ties."""
    if rival.overhead_ms > mine.overhead_ms:
        return False
    return wins_ties or is_better or rival.overhead_ms < mine.overhead_ms


class _Paces:
    """Time of one sequence alone, and rank time per token over an iteration, of many schemes.

    With v micro-batches of p stages, W ms of work take ``(1 + (p-1)/v)·(W + v·c)``, least for
    ``v = sqrt((p-1)·W/c)``, but v is at least what the tokens need. c is that of the first form:
    constants matter in short micro-batches, which the device bounds. Without an iteration's time
    micro-batches are full.
    """

    def __init__(self, schemes: Sequence[tuple[Scheme, SchemeCost]], iteration_ms: float) -> None:
        self._schemes, self._iteration_ms = schemes, iteration_ms
        costs = [cost for _, cost in schemes]
        self._times = [cost.coefficients for cost in costs]
        num_forms = max((1 + len(times.others) for times in self._times), default=1)
        # Shape (num_forms, num_schemes, 1): schemes with fewer forms repeat the first one.
        self._a_ms, self._b_ms, self._c_ms = (
            np.array(
                [
                    [(form.a_ms_per_token2, form.b_ms_per_token, form.c_ms) for form in of_scheme]
                    for of_scheme in (
                        ((times, *times.others) + (times,) * num_forms)[:num_forms]
                        for times in self._times
                    )
                ],
                dtype=np.float64,
            )
            .reshape(-1, num_forms, 3)
            .transpose(2, 1, 0)[..., None]
        )
        self._num_ranks, self._num_stages, self._max_tokens, self._longest = (
            np.array([(s.num_ranks, c.num_stages, c.max_tokens, c.longest) for s, c in schemes])
            .reshape(-1, 4)
            .T[..., None]
        )
        self._has_waves = np.array([cost.waves is not None for cost in costs])

    def of(self, lengths: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of sequences of these lengths, both of shape (num_schemes, num_lengths)."""
        times = self._times[0]  # the window is the model's, not a scheme's
        per_token = lengths if times.window is None else times.squared(lengths) / lengths
        per_token_ms = self._a_ms * per_token + self._b_ms
        alone_ms = self._num_stages * (per_token_ms * lengths + self._c_ms).max(axis=0)
        per_token_ms, c_ms = per_token_ms.max(axis=0), self._c_ms[0]
        full_ms = per_token_ms * self._max_tokens
        if math.isinf(self._iteration_ms):
            paced_ms = per_token_ms * (1.0 + c_ms / full_ms)
        else:
            least_ms = np.maximum(c_ms, _LEAST_CONSTANT_MS)
            best = np.sqrt((self._num_stages - 1) * self._iteration_ms / least_ms)
            num = np.maximum(best, self._iteration_ms / full_ms)
            filling = 1.0 + (self._num_stages - 1) / num
            paced_ms = per_token_ms * filling * (1.0 + num * c_ms / self._iteration_ms)
        return alone_ms, self._num_ranks * paced_ms

    def rivals(self, index: int) -> Iterator[tuple[int, bool]]:
        """Other schemes that are worse than one in no pace, and whether they are better in one.

        Compared are, for sequences of every length that it holds, both paces, and ranks; without an
        iteration's time also stages. Its replicas must give way to whole ones of the rival. Only
        bounds are known of a scheme that divides its width per micro-batch, so it beats none, and
        none beats it.
        """
        if self._has_waves[index]:
            return
        longest = self._longest[index, 0]
        lengths = np.geomspace(longest / _MOST_OVER_SHORTEST, longest, _NUM_COMPARED)
        compared = [*self.of(lengths), self._num_ranks]
        if math.isinf(self._iteration_ms):
            compared.append(self._num_stages)
        rows = np.hstack(compared)
        is_able = ~self._has_waves & (self._longest[:, 0] >= longest)
        is_able &= self._num_ranks[index] % self._num_ranks[:, 0] == 0
        is_able[index] = False
        is_no_worse = is_able & (rows <= rows[index]).all(axis=1)
        for place in np.flatnonzero(is_no_worse).tolist():
            yield place, bool((rows[place] < rows[index]).any())


def _without_slow_waves(
    rated: Sequence[_Rated],
    num_ranks: int,
    iteration_ms: float,
    batches: Sequence[Sequence[int]],
    longest: int,
) -> list[_Rated]:
    """All but the slower schemes with ``~`` and ep or fs.

    The fastest `_NUM_SPLITTING` that hold the longest sequence of all remain, and as many that hold
    that of half of the batches. Of schemes that differ in cp only the narrowest counts, whose
    replicas do not wait for each other, and of the fastest also that of all ranks, which has no
    replicas to balance.
    """
    lengths = np.sort(np.concatenate([np.asarray(batch, dtype=np.float64) for batch in batches]))
    share = np.cumsum(lengths) / lengths.sum()
    weighed = lengths[np.searchsorted(share, (np.arange(_NUM_WEIGHED) + 0.5) / _NUM_WEIGHED)]
    split = [one for one in rated if one.scheme.splits_cp and one.scheme.distributes_parameters]
    of_batches = [max(batch) for batch in batches]
    kept: list[_Rated] = [one for one in rated if one not in split]
    for limit in (max(longest, *of_batches), int(np.median(of_batches))):
        narrowest: dict[object, _Rated] = {}
        for one in split:  # narrow ones first
            if one.cost.longest >= limit:
                narrowest.setdefault(one.scheme.apart_from_cp, one)
        paces_ms = {
            one: _wave_pace_ms(one.scheme, one.cost, weighed[weighed <= limit], iteration_ms)
            + one.overhead_ms * num_ranks / (lengths.sum() / len(batches))
            for one in narrowest.values()
        }
        fastest = sorted(paces_ms, key=lambda one: paces_ms[one])[:_NUM_SPLITTING]
        of_fastest = {one.scheme.apart_from_cp for one in fastest[:1]}
        widest = [
            one
            for one in split
            if one.scheme.num_ranks == num_ranks and one.scheme.apart_from_cp in of_fastest
        ]
        kept += [one for one in dict.fromkeys((*fastest, *widest)) if one not in kept]
    return kept


def _wave_pace_ms(
    scheme: Scheme, cost: SchemeCost, lengths: FloatArray, iteration_ms: float
) -> float:
    """Mean rank time per token if every sequence is in its best group, see `_Paces`."""
    assert cost.waves is not None
    groups = [
        (
            scheme.of_context_group(group.size),
            SchemeCost(group.coefficients, group.room_tokens, cost.num_stages),
        )
        for group in cost.waves.usable
    ]
    _, paces_ms = _Paces(groups, iteration_ms).of(lengths)
    rooms = np.array([alone.max_tokens for _, alone in groups])[:, None]
    return float(np.where(lengths <= rooms, paces_ms, np.inf).min(axis=0).mean())


def neighbours(candidates: Candidates, mix: Mix) -> tuple[Mix, ...]:
    """Every mix one exchange away, each once, in a fixed order.

    All exchanges, whether ``2*tp4`` for ``tp8``, pp for tp or a pipeline for many single ranks,
    remove replicas to make room for those of another scheme, and fill the ranks that remain.
    Numbers of replicas double, so that a large job does not change one replica at a time.
    """
    present = [index for index, num in enumerate(mix) if num]
    found: dict[Mix, None] = {}
    for added in candidates.plain:
        for taken in present:
            if taken == added:
                continue
            for num in _doubling(mix[taken]):
                counts = list(mix)
                counts[taken] -= num
                _add_filled(candidates, counts, (added,), present, found)
            for num in _doubling(candidates.num_ranks // candidates.sizes[added]):
                made = _with_room(candidates, mix, added, num, taken, present)
                if made is not None:
                    _add_filled(candidates, made, (), [taken, added, *present], found)
    found.pop(mix, None)
    return tuple(found)


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4, … and most."""
    num = 1
    while num < most:
        yield num
        num *= 2
    if most:
        yield most


def _with_room(
    candidates: Candidates, mix: Mix, added: int, num: int, taken: int, present: list[int]
) -> list[int] | None:
    """The mix with num more replicas of added; those of taken go first. None without room."""
    counts = list(mix)
    missing = num * candidates.sizes[added] - candidates.num_idle(mix)
    for index in (taken, *(other for other in present if other not in (taken, added))):
        if missing <= 0:
            break
        removed = min(counts[index], -(-missing // candidates.sizes[index]))
        counts[index] -= removed
        missing -= removed * candidates.sizes[index]
    if missing > 0:
        return None
    counts[added] += num
    return counts


def _add_filled(
    candidates: Candidates,
    counts: list[int],
    first: tuple[int, ...],
    others: list[int],
    found: dict[Mix, None],
) -> None:
    """Adds the mixes whose idle ranks are filled with the first schemes, then one of the others."""
    for other in dict.fromkeys(others):
        filled = candidates.filled(tuple(counts), (*first, other))
        if any(filled):
            found[filled] = None
