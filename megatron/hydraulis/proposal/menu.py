"""The schemes that proposed strategies are made of, and mixes of them.

A **mix** is a strategy without its placement: the number of replicas of every scheme of the menu.
Times depend on nothing else, so this is what the search works on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

__all__ = ["Menu", "Mix"]

Mix = tuple[int, ...]
"""Replicas of each scheme, shape (num_schemes,)."""


@dataclass(frozen=True, slots=True)
class Menu:
    """Admissible schemes, for a job of num_ranks ranks.

    Raises ConfigurationError when there is none.
    """

    num_ranks: int
    ranks_per_node: int
    schemes: tuple[Scheme, ...]
    costs: tuple[SchemeCost, ...]
    """Shape (num_schemes,)."""

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
    ) -> "Menu":
        """The schemes of a cost profile that can be in a best strategy.

        Left out are those not allowed (None allows all), those that are too large for the job,
        those that do not hold the model, and those that another one of as many ranks beats in
        everything. Where a profile has cp 1, 2, … up to some width, of the same tp, pp and layers,
        the scheme that divides this width anew for every micro-batch (``cp8~``) is one as well.
        Raises ConfigurationError for an allowed one that the profile lacks.
        """
        rows = {row.scheme: row for row in cost_model.schemes}
        known = (*rows, *_splitting(rows))
        for scheme in allowed or ():
            if scheme not in known:
                names = ", ".join(map(str, known))
                raise ConfigurationError(
                    f"--schemes: strategies are made of schemes of the cost profile but {scheme} "
                    f"is none of {names}; measure it or leave it out"
                )
        found = [
            (scheme, cost)
            for scheme in known
            if (allowed is None or scheme in allowed)
            and scheme.num_ranks <= num_ranks
            and (cost := _cost(scheme, cost_model)).longest > 0
        ]
        kept = [
            (scheme, cost)
            for index, (scheme, cost) in enumerate(found)
            if not any(
                other.num_ranks == scheme.num_ranks and _beats(rival, cost, place < index)
                for place, (other, rival) in enumerate(found)
                if place != index
            )
        ]
        return cls(
            num_ranks,
            ranks_per_node,
            tuple(scheme for scheme, _ in kept),
            tuple(cost for _, cost in kept),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of a replica of each scheme, shape (num_schemes,)."""
        return tuple(scheme.num_ranks for scheme in self.schemes)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence that some scheme holds."""
        return max(cost.longest for cost in self.costs)

    def num_idle(self, mix: Mix) -> int:
        """Ranks that a mix leaves idle."""
        return self.num_ranks - sum(n * size for n, size in zip(mix, self.sizes, strict=True))

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
        """The mix placed on the ranks; without a name it is called by its text."""
        return Strategy.parse(
            self.text(mix), self.num_ranks, name=name, ranks_per_node=self.ranks_per_node
        )

    def filled(self, mix: Mix, first: Sequence[int] = ()) -> Mix:
        """The mix with idle ranks put to use: schemes of these places first, then the largest.

        Ranks too few for any scheme stay idle.
        """
        counts, idle = list(mix), self.num_idle(mix)
        rest = sorted(range(len(counts)), key=lambda index: (-self.sizes[index], index))
        for index in (*first, *rest):
            num, idle = divmod(idle, self.sizes[index])
            counts[index] += num
        return tuple(counts)


def _splitting(schemes: Iterable[Scheme]) -> tuple[Scheme, ...]:
    """Schemes with ``~`` of whose groups every width is there."""
    there = set(schemes)
    wide = (s for s in there if s.cp > 1 and s.cp & (s.cp - 1) == 0)
    split = (Scheme(s.tp, s.cp, s.pp, s.layers, splits_cp=True) for s in wide)
    return tuple(sorted((s for s in split if there.issuperset(s.group_schemes)), key=str))


def _cost(scheme: Scheme, cost_model: ProfileCostModel) -> SchemeCost:
    """As the planner sees it, limits with padding included."""
    pool = Pool.of(Strategy.parse(str(scheme), scheme.num_ranks))
    return PoolCosts(pool, cost_model).replica_costs(pool.strategies[0])[0]


def _beats(rival: SchemeCost, cost: SchemeCost, wins_ties: bool) -> bool:
    """Whether a scheme is no worse in anything, and better in something unless it wins ties.

    Of a scheme that divides its width anew only bounds are known, so it beats none.
    """
    if rival.waves is not None:
        return False
    pairs = (
        (rival.coefficients.a_ms_per_token2, cost.coefficients.a_ms_per_token2),
        (rival.coefficients.b_ms_per_token, cost.coefficients.b_ms_per_token),
        (rival.coefficients.c_ms, cost.coefficients.c_ms),
        (rival.num_stages, cost.num_stages),
        (-rival.max_tokens, -cost.max_tokens),
        (-rival.longest, -cost.longest),
    )
    return all(mine <= theirs for mine, theirs in pairs) and (
        wins_ties or any(mine < theirs for mine, theirs in pairs)
    )
