"""A strategy: which replicas the ranks of a job form in one iteration.

``notation`` describes its text, `scheme.place` where replicas without ``@`` go.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.ranges import MAX_RANKS
from megatron.hydraulis.strategy.notation import format_terms, parse_terms, place_terms
from megatron.hydraulis.strategy.scheme import Replica, Scheme, place


@dataclass(frozen=True, slots=True)
class Strategy:
    """Replicas, possibly of different schemes, placed on the ranks of the job.

    Raises StrategyError if there is no replica, two replicas share a rank, a rank is outside the
    job, the ranks do not fill whole nodes, or a limit is not positive or for another scheme.
    """

    name: str
    replicas: tuple[Replica, ...]
    num_ranks: int
    """Ranks of the job; those in no replica are idle."""
    ranks_per_node: int
    """Ranks of a node; any number above num_ranks means a job of one node."""
    token_limits: tuple[tuple[Scheme, int], ...] = ()
    """``max_tokens`` of the pool file: most tokens of a micro-batch on a scheme if they differ from
    the cost model's, as free memory depends on all replicas; applied by `cost_model.limits`."""

    def __post_init__(self) -> None:
        nodes = whole_nodes(self.num_ranks, self.ranks_per_node, f"strategy {self.name!r}")
        object.__setattr__(self, "ranks_per_node", nodes)
        if not self.name or not self.name.isprintable():
            raise self._error(
                "a name has characters, but no control characters or lone surrogates; rename it"
            )
        if not self.replicas:
            raise self._error("a strategy needs at least 1 replica but has 0; add a scheme")
        owner: dict[int, Replica] = {}
        for replica in self.replicas:
            for rank in replica.ranks:
                if rank >= self.num_ranks:
                    raise self._error(
                        f"{replica.scheme} is placed on rank {rank} but the job's "
                        f"{self.num_ranks} ranks end at {self.num_ranks - 1}; "
                        f"name ranks below {self.num_ranks} or start {rank + 1} ranks"
                    )
                if rank in owner:
                    raise self._error(
                        f"a rank serves one replica but rank {rank} is named for "
                        f"{owner[rank].scheme} and for {replica.scheme}; "
                        f"name another rank for one of them"
                    )
                owner[rank] = replica
        self._check_token_limits()

    def _check_token_limits(self) -> None:
        limited = [scheme for scheme, _ in self.token_limits]
        for scheme, limit in self.token_limits:
            if scheme not in self.schemes:
                known = ", ".join(str(scheme) for scheme in self.schemes)
                raise self._error(
                    f"max_tokens is given for {scheme} but its schemes are {known}; "
                    f"remove it or name one of these"
                )
            if limited.count(scheme) > 1:
                raise self._error(
                    f"max_tokens is given once a scheme but {limited.count(scheme)} times for "
                    f"{scheme}; keep one of them"
                )
            if limit < 1:
                raise self._error(
                    f"a micro-batch holds at least 1 token but max_tokens of {scheme} is "
                    f"{limit}; give a positive limit or remove it"
                )

    def _error(self, message: str) -> StrategyError:
        return StrategyError(f"strategy {self.name!r}: {message}")

    @classmethod
    def parse(
        cls,
        text: str,
        num_ranks: int,
        *,
        name: str | None = None,
        ranks_per_node: int | None = None,
    ) -> "Strategy":
        """Read a strategy in the notation and place it on a job of num_ranks ranks.

        Every rank must be used or named idle. ranks_per_node defaults to one node, name to the
        canonical text. ``parse(str(s), …)`` with the job of ``s`` gives ``s``, placement included.

        Raises StrategyError with the rule, the numbers and the fix.
        """
        label = text.strip() if name is None else name
        ranks_per_node = num_ranks if ranks_per_node is None else ranks_per_node
        ranks_per_node = whole_nodes(num_ranks, ranks_per_node, f"strategy {label!r}")
        terms = parse_terms(text, label=label)
        replicas = place_terms(terms, num_ranks, ranks_per_node, label=label)
        strategy = cls(label, replicas, num_ranks, ranks_per_node)
        return strategy if name is not None else replace(strategy, name=str(strategy))

    @classmethod
    def homogeneous(
        cls,
        num_ranks: int,
        *,
        tp: int,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        ranks_per_node: int | None = None,
    ) -> "Strategy":
        """Replicas of one scheme that fill the job: ``2*tp2pp2`` on 8 ranks.

        Raises StrategyError unless the ranks are a multiple of those of a replica, and as
        `replica_scheme`.
        """
        scheme = replica_scheme(tp=tp, cp=cp, pp=pp, ep=ep)
        if num_ranks < 1 or num_ranks % scheme.num_ranks:
            num_fitting = max(num_ranks // scheme.num_ranks, 1) * scheme.num_ranks
            raise StrategyError(
                f"strategy of {scheme} alone: replicas of {scheme.num_ranks} ranks do not fill "
                f"the job's {num_ranks} ranks; start {num_fitting} ranks or change the degrees"
            )
        num_replicas = num_ranks // scheme.num_ranks
        return cls.parse(f"{num_replicas}*{scheme}", num_ranks, ranks_per_node=ranks_per_node)

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"name": self.name, "replicas": str(self)}
        if self.token_limits:
            content["max_tokens"] = {str(scheme): limit for scheme, limit in self.token_limits}
        return content

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """The ranks without a replica, ascending."""
        used = {rank for replica in self.replicas for rank in replica.ranks}
        return tuple(rank for rank in range(self.num_ranks) if rank not in used)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The different schemes, in the order of their first replica."""
        return tuple(dict.fromkeys(replica.scheme for replica in self.replicas))

    @property
    def shares_weights(self) -> bool:
        """True if cp ranks share weights in some replica."""
        return any(scheme.shares_weights for scheme in self.schemes)

    @property
    def is_homogeneous(self) -> bool:
        """True if replicas of one scheme use all ranks."""
        return len(self.schemes) == 1 and not self.idle_ranks

    @property
    def rank_groups(self) -> list[tuple[int, ...]]:
        """Rank tuples of the tp, cp, ep and pp groups that the strategy needs, in a fixed order.

        For a scheme that splits its cp ranks, like ``cp8~``, every group that a wave may need.
        Groups of one rank are left out.
        """
        needed: dict[tuple[int, ...], None] = {}
        for replica in self.replicas:
            scheme = replica.scheme
            for stage in range(scheme.pp):
                for cp in range(scheme.cp):
                    needed[replica.tp_ranks(stage, cp)] = None
                    for tp in range(scheme.tp):
                        needed[replica.ep_ranks(stage, cp, tp)] = None
                for tp in range(scheme.tp):
                    columns = replica.cp_ranks(stage, tp)
                    for size in (group.cp for group in scheme.group_schemes):
                        for offset in range(0, scheme.cp, size):
                            needed[columns[offset : offset + size]] = None
            for cp in range(scheme.cp):
                for tp in range(scheme.tp):
                    needed[replica.pp_ranks(cp, tp)] = None
        return [ranks for ranks in needed if len(ranks) > 1]

    def replica_of(self, rank: int) -> Replica | None:
        """The replica a rank serves, None when it is idle; StrategyError outside the job."""
        if not 0 <= rank < self.num_ranks:
            raise self._error(
                f"rank {rank} is asked for but the job's {self.num_ranks} ranks are "
                f"0 to {self.num_ranks - 1}; ask for one of these"
            )
        for replica in self.replicas:
            if rank in replica.ranks:
                return replica
        return None

    def __str__(self) -> str:
        """The canonical text; ``@`` is written only where the placement is not the usual one."""
        schemes = [replica.scheme for replica in self.replicas]
        usual = place(schemes, range(self.num_ranks), self.ranks_per_node)
        num_idle = self.num_ranks - sum(replica.num_ranks for replica in self.replicas)
        with_ranks = usual != tuple(replica.ranks for replica in self.replicas)
        return format_terms(self.replicas, num_idle=num_idle, with_ranks=with_ranks)

    def check_model(self, shape: ModelShape) -> None:
        """Raise StrategyError unless every scheme divides a model of this shape evenly."""
        has_mlp = shape.num_expert_layers < shape.num_layers
        cut_by_tp = (
            (shape.num_attention_heads, "attention heads"),
            (shape.num_query_groups, "query groups"),
            (shape.hidden_size, "hidden size"),
            (shape.ffn_hidden_size if has_mlp else 0, "ffn hidden size"),
            (shape.expert_ffn_hidden_size, "ffn hidden size of an expert"),
            (shape.shared_expert_ffn_hidden_size, "ffn hidden size of the shared experts"),
            (shape.vocab_size, "padded vocabulary size"),
        )
        for scheme in self.schemes:
            for size, what in cut_by_tp:
                if size % scheme.tp:
                    raise self._error(
                        f"tp must divide the {what} but {scheme} has tp {scheme.tp} and the "
                        f"model's {what} is {size}; use a tp that divides {size}"
                    )
            try:
                scheme.layers_per_stage(shape.num_layers)
                scheme.experts_per_rank(shape.num_experts)
            except StrategyError as error:
                raise self._error(str(error)) from None


RANKS_PER_NODE = 8
"""Ranks of a node of a job whose nodes are not described."""


def ranks_of_node(num_ranks: int, given: int | None, what: str) -> int:
    """Ranks of a node: those given, else 8, or all of a job with fewer.

    Raises StrategyError as `whole_nodes`, and for a job that must say how large its nodes are.
    """
    if given is None:
        given = RANKS_PER_NODE
        if num_ranks > given and num_ranks % given:
            usual_first = (4, 2, *range(given - 1, 1, -1))
            fitting = [size for size in usual_first if num_ranks % size == 0]
            example = f", for example {fitting[0]}," if fitting else ""
            raise StrategyError(
                f"{what}: nodes are taken to have {given} ranks each but {num_ranks} ranks do not "
                f"fill such nodes; give --ranks-per-node (in Python ranks_per_node){example} or "
                f"another number of ranks"
            )
    return whole_nodes(num_ranks, given, what)


def replica_scheme(*, tp: int, cp: int = 1, pp: int = 1, ep: int = 1) -> Scheme:
    """The scheme of a replica with these degrees in Megatron, where replicas may share experts.

    An ep that does not divide tp·cp therefore makes a replica of several of Megatron's, whose cp
    ranks may each have sequences of their own: ``cp8~ep8``.

    Raises StrategyError if its cp is not a power of two.
    """
    width = ep // math.gcd(ep, tp)
    if cp % width == 0:
        return Scheme(tp, cp, pp, ep=ep)
    if width & (width - 1) or cp & (cp - 1):
        lower = tp << (max(ep // tp, 1).bit_length() - 1)
        fix = f"ep {lower} or {2 * lower}"
        if cp & (cp - 1):
            fix = f"an ep that divides {tp * cp}, or a cp that is a power of two"
        raise StrategyError(
            f"strategy of ep {ep} with tp·cp = {tp * cp}: an ep above tp·cp is tp times a power of "
            f"two, as its ranks form one replica, but tp is {tp}; use {fix}"
        )
    return Scheme(tp, width, pp, splits_cp=True, ep=ep)


def whole_nodes(num_ranks: int, ranks_per_node: int, what: str) -> int:
    """Ranks of a node, at most those of the job; StrategyError unless ranks fill whole nodes."""
    if num_ranks < 1:
        raise StrategyError(
            f"{what}: a job needs at least 1 rank but has {num_ranks}; start a positive number"
        )
    if num_ranks > MAX_RANKS:
        raise StrategyError(
            f"{what}: a job has at most {MAX_RANKS} ranks here but this one has {num_ranks}; "
            f"correct the number"
        )
    if ranks_per_node < 1:
        raise StrategyError(
            f"{what}: ranks_per_node is {ranks_per_node} but a node needs at least 1 rank; "
            f"give a positive number"
        )
    if ranks_per_node >= num_ranks:
        return num_ranks
    if num_ranks % ranks_per_node:
        num_whole = math.ceil(num_ranks / ranks_per_node) * ranks_per_node
        raise StrategyError(
            f"{what}: nodes have {ranks_per_node} ranks each but {num_ranks} ranks do not fill "
            f"whole nodes; start {num_whole} ranks or correct ranks_per_node"
        )
    return ranks_per_node
