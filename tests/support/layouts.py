"""Layouts, strategies and an oracle for transfer plans: no torch, no canonical order.

The oracle numbers every element of every whole parameter and cuts parameters for a TP rank with
plain numpy slices. What the transfer plans move is checked against these numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from megatron.hydraulis.strategy import Replica, Scheme, Strategy
from megatron.hydraulis.transfer import role as transfer_role
from megatron.hydraulis.transfer.canonical import (
    Bucket,
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Unit,
)
from megatron.hydraulis.transfer.plan import TransferPlan
from megatron.hydraulis.transfer.role import Role

Ids = npt.NDArray[np.int64]


def roles_of(
    text: str,
    num_ranks: int = 4,
    *,
    num_layers: int = 1,
    tied: bool = False,
    num_experts: int = 0,
    num_predictions: int = 0,
) -> list[Any]:
    """The role of every rank in a strategy."""
    strategy = Strategy.parse(text, num_ranks)
    return transfer_role.roles_of(strategy, num_layers, tied, num_experts, num_predictions)


@dataclass(frozen=True)
class Case:
    """A layout and a strategy to regroup for."""

    layout: CanonicalLayout
    strategy: Strategy
    num_layers: int
    tied_embeddings: bool
    num_experts: int

    @property
    def roles(self) -> list[Role | None]:
        """The roles of every rank."""
        return transfer_role.roles_of(
            self.strategy, self.num_layers, self.tied_embeddings, self.num_experts
        )

    def first_id(self, parameter: int) -> int:
        """Number of the parameter's element (0, 0)."""
        return sum(spec.num_elements for spec in self.layout.parameters[:parameter])


def layer_parameters(
    layer: int, hidden: int, ffn: int, heads: int, num_experts: int
) -> list[ParameterSpec]:
    """One layer with all kinds of parameters, in another order than the canonical one."""
    unit, prefix = Unit.layer(layer), f"decoder.layers.{layer}."
    replicated, partial, sharded = (
        Contribution.REPLICATED,
        Contribution.PARTIAL,
        Contribution.SHARDED,
    )
    experts = [
        spec
        for i in range(num_experts)
        for spec in (
            ParameterSpec(
                f"{prefix}expert.{i}.fc1",
                (2 * ffn, hidden),
                unit,
                sharded,
                tp_dim=0,
                parts=(ffn, ffn),
                experts=(i, i + 1),
            ),
            ParameterSpec(
                f"{prefix}expert.{i}.fc2",
                (hidden, ffn),
                unit,
                sharded,
                tp_dim=1,
                experts=(i, i + 1),
            ),
        )
    ]
    return [
        *experts,
        ParameterSpec(prefix + "norm", (hidden,), unit, replicated, decays=False),
        ParameterSpec(
            prefix + "qkv", (3 * heads, hidden), unit, sharded, tp_dim=0, parts=(heads, 2 * heads)
        ),
        ParameterSpec(prefix + "q_norm", (5,), unit, partial, decays=False),
        ParameterSpec(prefix + "proj", (hidden, heads), unit, sharded, tp_dim=1),
        ParameterSpec(prefix + "fc1", (2 * ffn, hidden), unit, sharded, tp_dim=0, parts=(ffn, ffn)),
        ParameterSpec(prefix + "fc1_bias", (2 * ffn,), unit, sharded, tp_dim=0, parts=(ffn, ffn)),
        ParameterSpec(prefix + "fc2", (hidden, ffn), unit, sharded, tp_dim=1),
        ParameterSpec(prefix + "fc2_bias", (hidden,), unit, replicated, decays=False),
    ]


def model_parameters(
    num_layers: int, hidden: int, ffn: int, heads: int, vocab: int, num_experts: int, *, tied: bool
) -> list[ParameterSpec]:
    """A whole model; dims cut by tp are multiples of T where the arguments are."""
    parameters = [
        ParameterSpec(
            "embedding.word", (vocab, hidden), Unit.embedding(), Contribution.SHARDED, tp_dim=0
        ),
        ParameterSpec(
            "embedding.position", (7, hidden), Unit.first_stage(), Contribution.REPLICATED
        ),
    ]
    for layer in range(num_layers):
        parameters += layer_parameters(layer, hidden, ffn, heads, num_experts)
    parameters.append(
        ParameterSpec("final_norm", (hidden,), Unit.output(), Contribution.PARTIAL, decays=False)
    )
    if not tied:
        parameters.append(
            ParameterSpec("output", (vocab, hidden), Unit.output(), Contribution.SHARDED, tp_dim=0)
        )
    return parameters


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any shapes, T and ranks, and a strategy with idle ranks, uneven stages, any placement."""
    num_layers = draw(st.integers(1, 4), label="layers")
    num_ranks = draw(st.integers(1, 9), label="ranks")
    num_atoms = draw(st.sampled_from([1, 2, 3, 4, 6, 8]), label="T")
    tied = draw(st.booleans(), label="tied")
    num_experts = draw(st.sampled_from([0, 0, 2, 4, 6]), label="experts")
    sizes = st.integers(1, 3)
    parameters = model_parameters(
        num_layers,
        hidden=draw(st.integers(1, 7)),
        ffn=num_atoms * draw(sizes),
        heads=num_atoms * draw(sizes),
        vocab=num_atoms * draw(st.integers(1, 9)),
        num_experts=num_experts,
        tied=tied,
    )
    layout = CanonicalLayout.build(
        parameters,
        num_atoms=num_atoms,
        num_ranks=num_ranks,
        bucket_cap_elements=draw(st.sampled_from([7, 50, 10**6]), label="cap"),
    )
    free = list(draw(st.permutations(range(num_ranks)), label="placement"))
    degrees = [tp for tp in range(1, num_atoms + 1) if num_atoms % tp == 0]
    replicas: list[Replica] = []
    while free and (not replicas or draw(st.booleans())):
        tp = draw(st.sampled_from([degree for degree in degrees if degree <= len(free)]))
        cp = draw(st.integers(1, min(3, len(free) // tp)))
        pp = draw(st.integers(1, min(num_layers, len(free) // (tp * cp))))
        divided = math.gcd(tp * cp, num_experts) if num_experts else 1
        ep = draw(st.sampled_from([n for n in range(1, divided + 1) if divided % n == 0]))
        may_share = cp > 1 and pp == 1
        fs = cp if may_share and draw(st.booleans(), label="shared weights") else 1
        scheme = Scheme(tp=tp, cp=cp, pp=pp, layers=draw(_layers(num_layers, pp)), ep=ep, fs=fs)
        replicas.append(Replica(scheme, tuple(free[: scheme.num_ranks])))
        del free[: scheme.num_ranks]
    strategy = Strategy("drawn", tuple(replicas), num_ranks, num_ranks)
    return Case(layout, strategy, num_layers, tied, num_experts)


@st.composite
def _layers(draw: st.DrawFn, num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, at least one."""
    cuts = draw(st.permutations(range(1, num_layers))) if num_layers > 1 else []
    borders = [0, *sorted(cuts[: pp - 1]), num_layers]
    return tuple(stop - start for start, stop in itertools.pairwise(borders))


def local_ids(case: Case, parameter: int, role: Role) -> Ids:
    """The oracle: numbers of the elements in the role's part of a parameter, in its shape; -1 for
    those that another rank keeps, of experts one that holds the same."""
    ids, spec = _whole_local_ids(case, parameter, role), case.layout.parameters[parameter]
    if role.column is None:
        return ids

    def is_whole_expert(spec: ParameterSpec) -> bool:
        return role.experts is not None and _expert_of(spec) is not None

    if is_whole_expert(spec) and role.holder is None:
        return ids
    column, num_columns = role.holder if is_whole_expert(spec) and role.holder else role.column
    run: list[Ids] = []
    for index in parameters_of(case, role):
        other = case.layout.parameters[index]
        is_together = is_whole_expert(other) == is_whole_expert(spec) or role.holder == role.column
        if other.unit == spec.unit and is_together:
            run.append(np.full(-sum(map(len, run)) % vars(transfer_role)["ALIGNMENT_ELEMENTS"], -1))
            run.append(_whole_local_ids(case, index, role).reshape(-1))
    share = math.ceil(sum(map(len, run)) / num_columns)
    share += -share % vars(transfer_role)["UNIT_ALIGNMENT_ELEMENTS"]
    kept = np.concatenate(run)[column * share : (column + 1) * share]
    return np.where(np.isin(ids, kept), ids, -1)


def _whole_local_ids(case: Case, parameter: int, role: Role) -> Ids:
    spec = case.layout.parameters[parameter]
    first = case.first_id(parameter)
    whole = np.arange(first, first + spec.num_elements).reshape(spec.shape)
    if spec.tp_dim is None or (role.experts is not None and _expert_of(spec) is not None):
        return whole
    parts = [
        np.split(part, role.tp, axis=spec.tp_dim)[role.tp_rank]
        for part in np.split(whole, np.cumsum(spec.parts)[:-1], axis=0)
    ]
    return np.concatenate(parts, axis=0)


def _expert_of(spec: ParameterSpec) -> int | None:
    parts = spec.name.split(".")
    return int(parts[4]) if parts[3:4] == ["expert"] else None


def bucket_ids(case: Case, bucket: Bucket) -> Ids:
    """Numbers of a bucket's elements in canonical order, from the pieces' global rectangles."""
    parts = []
    for piece in bucket.pieces:
        spec = case.layout.parameters[piece.parameter]
        first = case.first_id(piece.parameter)
        matrix = np.arange(first, first + spec.num_elements).reshape(spec.shape[0], -1)
        row, column = case.layout.global_rectangle(piece)
        part = matrix[row : row + piece.num_rows, column : column + piece.row_length]
        assert part.shape == (piece.num_rows, piece.row_length)
        parts.append(part.reshape(-1))
    return np.concatenate(parts)


def block_positions(case: Case, bucket: Bucket, role: Role, *, contributed: bool = False) -> list:
    """(parameter, flat positions in its local part) of the role's blocks, in canonical order."""
    found = []
    for piece in bucket.pieces:
        spec = case.layout.parameters[piece.parameter]
        cut = role.cut_of(spec)
        if bucket.unit not in role.units or cut is None or not case.layout.holds(piece, *cut):
            continue
        if contributed and not role.contributes(spec):
            continue
        block = case.layout.block(piece, *cut)
        rows = np.arange(block.num_rows)[:, None] * block.row_stride
        positions = (block.offset + rows + np.arange(block.row_length)[None, :]).reshape(-1)
        is_kept = local_ids(case, block.parameter, role).reshape(-1)[positions] >= 0
        found.append((block.parameter, positions[is_kept]))
    return found


def parameters_of(case: Case, role: Role) -> list[int]:
    """The oracle: which parameters the rank has, by their names."""
    held = []
    for index, spec in enumerate(case.layout.parameters):
        if spec.name.startswith("decoder.layers."):
            layer = int(spec.name.split(".")[2])
            mine = role.first_layer <= layer < role.first_layer + role.num_layers
            expert = _expert_of(spec)
            if expert is not None and role.experts is not None:
                mine &= expert in range(*role.experts)
        elif spec.name == "embedding.word":
            mine = role.has_embedding or (case.tied_embeddings and role.has_output)
        elif spec.name == "embedding.position":
            mine = role.has_embedding
        else:
            mine = role.has_output
        if mine:
            held.append(index)
    return held


def expected_counts(case: Case) -> Ids:
    """The oracle: how often each element's gradient must reach its owner, by number."""
    counts = np.zeros(sum(spec.num_elements for spec in case.layout.parameters), dtype=np.int64)
    for role in case.roles:
        if role is None:
            continue
        for index in parameters_of(case, role):
            spec = case.layout.parameters[index]
            if spec.contribution is Contribution.REPLICATED and role.tp_rank > 0:
                continue
            ids = local_ids(case, index, role)
            counts[ids[ids >= 0]] += 1
    return counts


def received_ids(plan: TransferPlan, ids: Ids, rank: int) -> Ids:
    """Numbers of the elements that a rank receives, in order: by source, then by range."""
    runs: Sequence[Ids] = [
        ids[r.start : r.stop] for transfer in plan.received_by(rank) for r in transfer.ranges
    ]
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)
