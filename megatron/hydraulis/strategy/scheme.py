"""Scheme, replica and position: the shape of one copy of the model, and its ranks."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class Scheme:
    """The shape ⟨tp, cp, pp⟩ of one replica, and whether its ranks share out weights or experts.

    Raises StrategyError for a degree below 1, for layers that do not list every stage, for a
    splitting width (``cp8~``) that is not a power of two, and for shared weights (``cp8fs``) with
    pipeline stages or among a number of ranks that cp does not divide.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None splits evenly, see layers_per_stage."""
    splits_cp: bool = False
    """Whether cp ranks may form other groups in every micro-batch: the ``~`` of ``cp8~``."""
    ep: int = 1
    """Ranks of a stage over which the experts of a layer are distributed, each expert whole on one
    of them; 1: tp cuts every expert. Divides tp·cp of a replica, not of a context group of it."""
    fs: int = 1
    """cp ranks over which weights and gradients of a stage are distributed, each layer gathered
    when it is used; 1: every cp rank holds them whole. All cp ranks of a replica (``cp8fs``), more
    than those of a context group of it (``cp4fs8``)."""
    recomputes: bool = False
    """True if the backward recomputes every layer, whatever the job recomputes: the ``r`` of
    ``tp8r``, which takes longer and holds more tokens."""

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "ep", "fs", "pp"):
            degree = getattr(self, axis)
            if degree < 1:
                raise StrategyError(
                    f"a degree must be at least 1 but {axis} is {degree}; "
                    f"give {axis} a positive degree or leave it out"
                )
        if self.layers is not None:
            if len(self.layers) != self.pp:
                raise StrategyError(
                    f"scheme {self} lists layers for {len(self.layers)} stages but has "
                    f"{self.pp}; list one number of layers a stage"
                )
            if min(self.layers) < 1:
                raise StrategyError(
                    f"scheme {self} gives a stage {min(self.layers)} layers; "
                    f"every stage needs at least 1"
                )
        if self.splits_cp and (self.cp < 2 or self.cp & (self.cp - 1)):
            raise StrategyError(
                f"'~' splits a cp degree that is a power of two from 2 on but cp is {self.cp}; "
                f"change the degree or drop the '~'"
            )
        if self.shares_weights and self.pp > 1:
            raise StrategyError(
                f"ranks of a pipeline cannot share weights yet but {self} has fs and pp {self.pp}; "
                f"drop the fs or the pp"
            )
        if self.shares_weights and self.fs % self.cp:
            raise StrategyError(
                f"fs shares weights among the cp ranks but {self} has fs {self.fs} and cp "
                f"{self.cp}; use cp{self.cp}fs, which has fs {self.cp}"
            )

    @property
    def shares_weights(self) -> bool:
        """True if each cp rank holds a share of the weights: the ``fs`` of ``cp8fs``."""
        return self.fs > 1

    @property
    def num_holders(self) -> int:
        """Ranks that share an expert, or its part where tp cuts it; 1 if each holds all of that."""
        if not self.shares_weights or self.ep == 1:
            return self.fs
        return max(1, self.tp * self.fs // self.ep)

    @property
    def distributes_parameters(self) -> bool:
        """True if cp ranks hold different weights or experts, as in ``cp8fs`` and ``cp8ep8``: the
        groups of ``~`` need not be replicas."""
        return self.shares_weights or self.ep > 1

    @property
    def is_static(self) -> bool:
        """True if a strategy of this scheme alone is a baseline for a pool, with balanced plans:
        ``~`` only with ep, which is Megatron's expert parallelism over data-parallel ranks. Groups
        of several widths that share weights are not Megatron's."""
        return not self.splits_cp or (self.ep > 1 and not self.shares_weights)

    @property
    def apart_from_cp(self) -> tuple[object, ...]:
        """What schemes have in common that differ in the number of their cp ranks only."""
        return self.tp, self.ep, self.pp, self.layers, self.shares_weights, self.recomputes

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp

    def of_context_group(self, size: int) -> "Scheme":
        """The scheme with cp = size, whose time and memory are those of a group of the cp ranks."""
        return Scheme(
            self.tp, size, self.pp, self.layers, ep=self.ep, fs=self.fs, recomputes=self.recomputes
        )

    @property
    def group_schemes(self) -> "tuple[Scheme, ...]":
        """The schemes as which micro-batches may run, by descending cp: without ``~`` itself; for
        ``cp8~`` cp 8, 4, 2 and 1."""
        whole = self.of_context_group(self.cp)
        if not self.splits_cp:
            return (whole,)
        return (
            whole,
            *(self.of_context_group(self.cp >> i) for i in range(1, self.cp.bit_length())),
        )

    @property
    def as_replica(self) -> "Scheme":
        """The narrowest scheme of a replica with this one as a group of its cp ranks: with all that
        share its weights and a multiple of ep ranks a stage, most often the scheme itself."""
        cp = math.lcm(self.tp * max(self.cp, self.fs), self.ep) // self.tp
        fs = cp if self.shares_weights else 1
        return self if (cp, fs) == (self.cp, self.fs) else replace(self, cp=cp, fs=fs)

    def check_replica(self) -> None:
        """Raise StrategyError unless ep divides the ranks of a stage and fs, if any, is the cp, as
        in every replica."""
        if self.fs not in (1, self.cp):
            raise StrategyError(
                f"the cp ranks of a replica share its weights but {self} has cp {self.cp} and fs "
                f"{self.fs}, as groups of {self.as_replica} do; use {self.as_replica}"
            )
        if self.tp * self.cp % self.ep:
            of_stage = self.tp * self.cp
            wider = f", or {self.as_replica}" if self.ep % of_stage == 0 else ""
            raise StrategyError(
                f"the ranks of a stage form groups of ep ranks but {self} has tp·cp = {of_stage} "
                f"ranks a stage and ep {self.ep}; use an ep that divides {of_stage}{wider}"
            )

    @property
    def token_quantum(self) -> int:
        """Rows are padded to a multiple of this number of tokens: with sequence parallelism tp
        ranks share a row evenly, and each cp rank holds two chunks."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def rounded_down(self, num_tokens: int) -> int:
        """The largest multiple of token_quantum up to num_tokens: a limit that counts padding."""
        return num_tokens - num_tokens % self.token_quantum

    def row_tokens(self, lengths: Iterable[int]) -> int:
        """Tokens of the row in which sequences of these lengths run, padding included.

        With cp > 1 every sequence is padded to a multiple of 2·cp, so that each rank has two chunks
        of each; the row is padded to the token_quantum and is at least one quantum. The cp ranks
        hold equal parts.
        """
        multiple = 2 * self.cp if self.cp > 1 else 1
        num_tokens = sum(-(-length // multiple) * multiple for length in lengths)
        return max(1, -(-num_tokens // self.token_quantum)) * self.token_quantum

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Number of the num_layers layers that each of the pp stages holds.

        The listed layers, or an even split in which the first ``num_layers % pp`` stages hold one
        layer more, as the last stage also computes the output layer.

        Raises StrategyError if the listed layers do not add up to num_layers or there are more
        stages than layers.
        """
        if self.layers is not None:
            if sum(self.layers) != num_layers:
                raise StrategyError(
                    f"scheme {self} places {sum(self.layers)} layers but the model has "
                    f"{num_layers}; list layers that add up to {num_layers}"
                )
            return self.layers
        if self.pp > num_layers:
            raise StrategyError(
                f"scheme {self} has {self.pp} stages but the model has {num_layers} layers; "
                f"use at most pp{num_layers}"
            )
        num_each, num_longer = divmod(num_layers, self.pp)
        return tuple(num_each + (stage < num_longer) for stage in range(self.pp))

    def experts_per_rank(self, num_experts: int) -> int:
        """Number of a layer's experts that a rank holds, whole with ep above 1 and its part else.

        Raises StrategyError if ep ranks cannot hold equal numbers of them.
        """
        if self.ep == 1:
            return num_experts
        if not num_experts:
            raise StrategyError(
                f"ep distributes experts but {self} has ep {self.ep} and the model has no experts; "
                "drop the ep"
            )
        if num_experts % self.ep:
            raise StrategyError(
                f"ep ranks hold equal numbers of experts but {self} has ep {self.ep} and the model "
                f"{num_experts} experts; use an ep that divides {num_experts}"
            )
        return num_experts // self.ep

    def to_json(self) -> dict[str, Any]:
        """``{"tp", "cp", "pp"}``, and ``layers``, ``splits_cp``, ``ep``, ``fs`` and ``recomputes``
        where the scheme has them."""
        content: dict[str, Any] = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        if self.layers is not None:
            content["layers"] = list(self.layers)
        if self.splits_cp:
            content["splits_cp"] = True
        if self.ep != 1:
            content["ep"] = self.ep
        if self.shares_weights:
            content["fs"] = self.fs
        if self.recomputes:
            content["recomputes"] = True
        return content

    @classmethod
    def from_json(cls, content: JsonObject) -> "Scheme":
        """Read what to_json wrote; raises the content's error for anything else."""
        try:
            return cls(
                tp=content.integer("tp"),
                cp=content.integer("cp"),
                pp=content.integer("pp"),
                layers=content.integers("layers") if content.has("layers") else None,
                splits_cp=content.flag("splits_cp", default=False),
                ep=content.integer("ep", default=1),
                fs=content.integer("fs", default=1),
                recomputes=content.flag("recomputes", default=False),
            )
        except StrategyError as error:
            raise content.error(str(error)) from None

    def __str__(self) -> str:
        """The scheme in the notation, without degrees of 1: ``tp2cp2pp2:3,5``."""
        text = f"tp{self.tp}" if self.tp != 1 else ""
        if self.cp != 1 or self.splits_cp:
            text += f"cp{self.cp}{'~' if self.splits_cp else ''}"
        if self.shares_weights:
            text += "fs" if self.fs == self.cp else f"fs{self.fs}"
        if self.ep != 1:
            text += f"ep{self.ep}"
        if self.pp != 1:
            text += f"pp{self.pp}"
        text = (text or "tp1") + ("r" if self.recomputes else "")
        if self.layers is not None:
            text += ":" + ",".join(str(num) for num in self.layers)
        return text


@dataclass(frozen=True, slots=True)
class Position:
    """Coordinates of a rank in its replica, from 0."""

    stage: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the model on scheme.num_ranks ranks.

    Raises StrategyError if ep does not divide tp·cp, the number of ranks is not the scheme's, or a
    rank is negative or repeated.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    """The ranks, ordered by stage, then cp, then tp."""

    def __post_init__(self) -> None:
        self.scheme.check_replica()
        if len(self.ranks) != self.scheme.num_ranks:
            raise StrategyError(
                f"scheme {self.scheme} needs {self.scheme.num_ranks} ranks but "
                f"{len(self.ranks)} are listed; list {self.scheme.num_ranks} ranks"
            )
        if len(set(self.ranks)) != len(self.ranks):
            twice = min(rank for rank in self.ranks if self.ranks.count(rank) > 1)
            raise StrategyError(
                f"a rank serves a replica once but {self.scheme} lists rank {twice} "
                f"{self.ranks.count(twice)} times; list distinct ranks"
            )
        if min(self.ranks) < 0:
            raise StrategyError(
                f"ranks count from 0 but {self.scheme} lists rank {min(self.ranks)}; "
                f"list ranks from 0 on"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def rank_at(self, stage: int, cp: int, tp: int) -> int:
        """The rank at these coordinates; IndexError outside the scheme."""
        scheme = self.scheme
        if not (0 <= stage < scheme.pp and 0 <= cp < scheme.cp and 0 <= tp < scheme.tp):
            raise IndexError(f"no position (stage {stage}, cp {cp}, tp {tp}) in scheme {scheme}")
        return self.ranks[(stage * scheme.cp + cp) * scheme.tp + tp]

    def position_of(self, rank: int) -> Position | None:
        """The rank's coordinates; None if it is not in this replica."""
        if rank not in self.ranks:
            return None
        rest, tp = divmod(self.ranks.index(rank), self.scheme.tp)
        stage, cp = divmod(rest, self.scheme.cp)
        return Position(stage=stage, cp=cp, tp=tp)

    def tp_ranks(self, stage: int, cp: int) -> tuple[int, ...]:
        """The tensor-parallel group of a stage and cp coordinate, by tp: shape (tp,)."""
        return tuple(self.rank_at(stage, cp, tp) for tp in range(self.scheme.tp))

    def cp_ranks(self, stage: int, tp: int) -> tuple[int, ...]:
        """The context-parallel group of a stage and tp coordinate, by cp: shape (cp,)."""
        return tuple(self.rank_at(stage, cp, tp) for cp in range(self.scheme.cp))

    @property
    def column_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share weights, in the order of the replica, and with ``ep`` those that
        share experts; empty without ``fs``."""
        tp, ep = self.scheme.tp, self.scheme.ep
        if not self.scheme.shares_weights:
            return ()
        steps = dict.fromkeys([tp, ep] if ep > 1 and self.scheme.num_holders > 1 else [tp])
        return tuple(self.ranks[first::step] for step in steps for first in range(step))

    def ep_ranks(self, stage: int, cp: int, tp: int) -> tuple[int, ...]:
        """The ranks of a stage that share out the experts with this one, in the order of their
        experts: consecutive by cp, then tp; shape (ep,)."""
        scheme = self.scheme
        first = (cp * scheme.tp + tp) // scheme.ep * scheme.ep
        places = (divmod(place, scheme.tp) for place in range(first, first + scheme.ep))
        return tuple(self.rank_at(stage, *place) for place in places)

    def pp_ranks(self, cp: int, tp: int) -> tuple[int, ...]:
        """The pipeline through a cp and tp coordinate, by stage: shape (pp,)."""
        return tuple(self.rank_at(stage, cp, tp) for stage in range(self.scheme.pp))


class _FreeRanks:
    """The free ranks of each node that has some, in ascending order."""

    def __init__(self, ranks: Sequence[int], ranks_per_node: int) -> None:
        of_nodes = itertools.groupby(sorted(ranks), lambda rank: rank // ranks_per_node)
        self._nodes = [list(of_node) for _, of_node in of_nodes]

    def take_in_one_node(self, num_ranks: int) -> list[int] | None:
        for node in self._nodes:
            if len(node) >= num_ranks:
                return self._take(node, num_ranks)
        return None

    def take_across_nodes(self, num_ranks: int) -> list[int]:
        taken: list[int] = []
        for node in sorted(self._nodes, key=len, reverse=True):
            taken += self._take(node, min(len(node), num_ranks - len(taken)))
        return sorted(taken)

    def _take(self, node: list[int], num_ranks: int) -> list[int]:
        taken = node[:num_ranks]
        del node[:num_ranks]
        if not node:
            self._nodes.remove(node)
        return taken


def place(
    schemes: Sequence[Scheme],
    free_ranks: Sequence[int],
    ranks_per_node: int,
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each scheme's replica, in the order of schemes and in Replica's rank order.

    This is the default placement, of replicas without ``@``; ranks named after ``@`` are not free.
    Replicas are placed by descending tp, then descending cp, then in the order of the text. A stage
    goes to the first node with room for all its tp·cp ranks; otherwise each of its tensor-parallel
    groups goes to the first node with room for it, or, if there is none, to the nodes with the most
    free ranks. Stages are placed in order, so a pipeline may cross nodes.

    Raises ValueError if the schemes need more ranks than are free.
    """
    if sum(scheme.num_ranks for scheme in schemes) > len(free_ranks):
        raise ValueError("more ranks needed than free")
    free = _FreeRanks(free_ranks, ranks_per_node)
    placed: dict[int, tuple[int, ...]] = {}
    by_size = sorted(range(len(schemes)), key=lambda i: (-schemes[i].tp, -schemes[i].cp))
    for index in by_size:
        scheme = schemes[index]
        ranks: list[int] = []
        for _ in range(scheme.pp):
            ranks += _place_stage(scheme, free)
        placed[index] = tuple(ranks)
    return tuple(placed[index] for index in range(len(schemes)))


def _place_stage(scheme: Scheme, free: _FreeRanks) -> list[int]:
    whole = free.take_in_one_node(scheme.tp * scheme.cp)
    if whole is not None:
        return whole
    ranks: list[int] = []
    for _ in range(scheme.cp):
        group = free.take_in_one_node(scheme.tp)
        ranks += free.take_across_nodes(scheme.tp) if group is None else group
    return ranks
