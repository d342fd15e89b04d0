"""The parallel sizes of a Megatron job, and the strategy that takes their place."""

import argparse
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.strategy.scheme import Scheme
from megatron.hydraulis.strategy.strategy import Strategy, replica_scheme

SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Attributes of upstream's arguments."""


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Sizes of equal replicas, as Megatron's options give them.

    In Megatron a rank holds 1 / (ep·etp) of a layer's experts: experts are distributed over ep
    ranks, which replicas may share, and each is cut by etp. A scheme has whole experts or cuts them
    by tp, so ep·etp becomes the ep of the scheme: a rank holds the same share.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """None, Megatron's default: tp."""
    num_experts: int = 0
    """Experts of a layer; 0 for a model without experts, to which ep and etp do not apply."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> "MegatronLayout":
        """The sizes in upstream's arguments."""
        sizes = {name: getattr(args, dest) for name, dest in SIZES.items()}
        return cls(**sizes, num_experts=args.num_experts or 0)

    @property
    def _ep(self) -> int:
        return self.ep if self.num_experts else 1

    @property
    def _num_shares(self) -> int:
        """Ranks that together hold a layer's experts once in Megatron."""
        return self.ep * (self.etp or self.tp) if self.num_experts else 1

    def _num_ranks(self, num_shares: int) -> int:
        """Ranks of the smallest job in which so many ranks share a layer's experts."""
        return math.lcm(self.tp * self.cp, num_shares) * self.pp

    def _schemes(self, num_ranks: int | None) -> Iterator[Scheme]:
        """The schemes with whole experts, by ascending ep, then the one without ep. They have any
        size for a job that Megatron's replicas do not fill."""
        if num_ranks is None or num_ranks % self._num_ranks(self._ep):
            num_ranks = 0
        for ep in (*range(2, self.num_experts + 1), 1):
            with suppress(StrategyError):
                scheme = replica_scheme(tp=self.tp, cp=self.cp, pp=self.pp, ep=ep)
                scheme.experts_per_rank(self.num_experts)
                if num_ranks % scheme.num_ranks == 0:
                    yield scheme

    def scheme(self, num_ranks: int | None) -> Scheme:
        """The scheme of every replica of a job of num_ranks ranks; None if they are unknown.

        Its ranks hold as many experts as Megatron's or fewer, or else as few as possible: see
        `note`. Raises StrategyError for an ep that does not divide the experts.
        """
        if self.num_experts % self._ep:
            raise StrategyError(
                "ranks hold equal numbers of experts but --expert-model-parallel-size is "
                f"{self.ep} and --num-experts {self.num_experts}; use a size that divides "
                f"{self.num_experts}"
            )
        num_shares = self._num_shares
        if self._ep == 1 and num_shares <= self.tp:
            return Scheme(self.tp, self.cp, self.pp)
        schemes = list(self._schemes(num_ranks))
        enough = [scheme for scheme in schemes if _num_shares_of(scheme) >= num_shares]
        if enough:
            return min(enough, key=_num_shares_of)
        return max(schemes, key=_num_shares_of)

    def note(self, scheme: Scheme) -> str:
        """Note on a scheme whose ranks hold more experts than Megatron's; else empty."""
        num_here = _num_shares_of(scheme)
        if not self.num_experts or num_here >= self._num_shares:
            return ""
        here = f"1/{num_here}" if num_here > 1 else "all"
        return (
            f"experts: in Megatron a rank holds 1/{self._num_shares} of each layer's "
            f"{self.num_experts} (--expert-model-parallel-size {self.ep} times "
            f"--expert-tensor-parallel-size {self.etp or self.tp}), in {scheme} {here}, "
            "the nearest share of whole experts on tp·cp ranks; if memory is short, use more "
            "pipeline stages, or --strategy with a larger tp and no ep"
        )

    def num_usable_ranks(self, num_ranks: int) -> int:
        """The most of num_ranks ranks that equal replicas can use; all if none can."""
        for num_shares in (self._num_shares, self._ep):
            used = num_ranks - num_ranks % self._num_ranks(num_shares)
            if used:
                return used
        return num_ranks

    def check_ranks(self, num_ranks: int) -> None:
        """Raise StrategyError where Megatron refuses a job of num_ranks ranks for its sizes of
        experts, except where only its default of etp does: see `note`."""
        num_holders = self.ep * (self.etp or 1) if self.num_experts else 1
        num_per_stage = num_ranks // self.pp
        if num_ranks % (self.tp * self.cp * self.pp) or num_per_stage % num_holders == 0:
            return
        sizes = f"--expert-model-parallel-size {self.ep}"
        if self.etp is not None:
            sizes += f" times --expert-tensor-parallel-size {self.etp}"
        raise StrategyError(
            f"groups of {num_holders} ranks hold a layer's experts ({sizes}) and must fill a stage "
            f"but it has {num_per_stage} ranks; give sizes whose product divides {num_per_stage}, "
            f"or start {math.lcm(num_holders, self.tp * self.cp) * self.pp} ranks"
        )

    def strategy(self, num_ranks: int, *, ranks_per_node: int | None = None) -> Strategy:
        """Replicas of the scheme that fill the job.

        Raises StrategyError as `scheme`, and unless they fill it.
        """
        scheme = self.scheme(num_ranks)
        return Strategy.homogeneous(
            num_ranks,
            tp=scheme.tp,
            cp=self.cp,
            pp=scheme.pp,
            ep=scheme.ep,
            ranks_per_node=ranks_per_node,
        )


def _num_shares_of(scheme: Scheme) -> int:
    """Ranks of a stage that together hold a layer's experts once."""
    return scheme.tp if scheme.ep == 1 else scheme.ep
