"""The canonical order of a model's parameters, and its cut into shards.

Optimizer state never moves: its *canonical* order is the same for all strategies. A parameter with
a tensor-parallel dim is cut into ``T`` **atoms** along it, where ``T`` is the least common multiple
of the tp degrees in the pool, so that any TP rank of any scheme holds consecutive atoms; a rank
that holds an expert whole has all its atoms. Every
**bucket** (a layer, or a part of the embedding or the output) is cut at row borders of atoms into
one share per rank, its canonical shard. By default rank r owns share r; `Bucket.owner_order` can
assign the shares differently.

Inside a bucket the parameters are sorted by `Contribution`, so that what a rank has to send back is
a prefix of what it holds.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen
from megatron.hydraulis.model_shape import ModelShape

DEFAULT_BUCKET_CAP_ELEMENTS = 40_000_000
"""Maximum size of the buckets of embedding and output, in elements (160 MB in fp32)."""
UNIT_ALIGNMENT_ELEMENTS = 64
"""A layer, and a column's share of it, starts in a rank's memory at a multiple of this: 256 bytes
in fp32, as CUDA kernels prefer. Its matrices, which come first, usually have such sizes."""
ALIGNMENT_ELEMENTS = 8
"""Every parameter starts at a multiple of this: 16 bytes in bf16, which CUDA kernels need. Norms of
a head's size leave no gaps then, so that a layer travels without staging."""


_EMBEDDING_ORDER = -1
_OUTPUT_ORDER = 1 << 30
"""Above the index of every layer."""


class Contribution(enum.IntEnum):
    """TP ranks of a replica that send a parameter's gradient; also the order inside a bucket."""

    SHARDED = 0
    """Cut over the TP ranks: every rank sends its part."""
    PARTIAL = 1
    """Complete on every TP rank, gradients are partial sums: all send (e.g. q/k norms)."""
    REPLICATED = 2
    """Complete on every TP rank, gradients are equal: TP rank 0 sends."""


@dataclass(frozen=True, order=True)
class Unit:
    """Parameters that a pipeline stage holds together, all trained or all frozen."""

    order: int
    name: str
    is_frozen: bool = False
    """Whether they are never updated: they have no gradients, moments or fp32 copy."""

    @property
    def frozen(self) -> Unit:
        """The frozen parameters of the same part of the model."""
        return dataclasses.replace(self, is_frozen=True)

    @property
    def trained(self) -> Unit:
        """The trained ones."""
        return dataclasses.replace(self, is_frozen=False)

    @staticmethod
    def embedding() -> Unit:
        """The word embedding: on the first stage, and if tied also on the last one."""
        return Unit(_EMBEDDING_ORDER, "embedding")

    @staticmethod
    def first_stage() -> Unit:
        """Other embeddings of the first stage, such as learned positions."""
        return Unit(-2, "first stage")

    @staticmethod
    def layer(index: int) -> Unit:
        """Transformer layer ``index`` of the model, counted from 0."""
        return Unit(index, f"layer {index}")

    @property
    def is_layer(self) -> bool:
        """True for a transformer layer."""
        return 0 <= self.order < _OUTPUT_ORDER

    @staticmethod
    def output() -> Unit:
        """The final norm and, unless tied to the embedding, the output layer."""
        return Unit(_OUTPUT_ORDER, "output")

    @staticmethod
    def prediction(index: int) -> Unit:
        """The layer that predicts ``index + 2`` tokens ahead; its input is the final norm's."""
        return Unit(_OUTPUT_ORDER + 1 + index, f"prediction {index}")


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model, before any parallelism cuts it."""

    name: str
    """Global name, with the layer's index in the model."""
    shape: tuple[int, ...]
    """Global shape."""
    unit: Unit
    contribution: Contribution
    tp_dim: int | None = None
    """The dim that tensor parallelism cuts; None if every TP rank holds all of it."""
    parts: tuple[int, ...] = ()
    """Rows of stacked parts that are cut separately, such as gate and up; empty for one part."""
    decays: bool = True
    """Whether weight decay applies; False for biases and norms."""
    is_embedding_or_output: bool = False
    """Whether upstream's ``--decoupled-lr`` is its learning rate."""
    experts: tuple[int, int] | None = None
    """Experts [start, stop) of the layer to which it belongs, which ranks may also hold whole."""

    def __post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise ConfigurationError(f"parameter '{self.name}': shape {self.shape} has no elements")
        if (self.tp_dim is None) != (self.contribution is not Contribution.SHARDED):
            raise ConfigurationError(
                f"parameter '{self.name}': tensor-parallel dim {self.tp_dim} does not go with "
                f"contribution {self.contribution.name}; exactly the cut parameters are SHARDED"
            )
        if self.experts is not None and self.contribution is Contribution.REPLICATED:
            raise ConfigurationError(
                f"parameter '{self.name}': every rank that holds an expert sends its gradients but "
                f"those of this one are {self.contribution.name}; cut it, or add up its gradients"
            )
        if self.tp_dim is not None and not (
            self.tp_dim == 0 or (self.tp_dim == 1 and len(self.shape) == 2 and not self.parts)
        ):
            raise ConfigurationError(
                f"parameter '{self.name}': cut along dim {self.tp_dim} of {self.shape} in parts "
                f"{self.parts}; only dim 0, or dim 1 of a matrix of one part, can be regrouped"
            )
        if sum(self.rows_of_parts) != self.shape[0]:
            raise ConfigurationError(
                f"parameter '{self.name}': its parts are all of its {self.shape[0]} rows but have "
                f"{', '.join(map(str, self.parts))}; correct them"
            )

    @property
    def is_frozen(self) -> bool:
        """Whether it is never updated."""
        return self.unit.is_frozen

    @property
    def rows_of_parts(self) -> tuple[int, ...]:
        """Rows of each stacked part, of which there is at least one."""
        return self.parts or self.shape[:1]

    @property
    def num_elements(self) -> int:
        """Elements of the uncut parameter."""
        return math.prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the part that one of ``tp`` TP ranks holds."""
        if self.tp_dim is None:
            return self.shape
        cut = list(self.shape)
        cut[self.tp_dim] //= tp
        return tuple(cut)


@dataclass(frozen=True)
class Piece:
    """A rectangle of one atom: ``num_rows`` rows of ``row_length`` elements, contiguous here."""

    parameter: int
    """Index into `CanonicalLayout.parameters`."""
    part: int
    """Index of the stacked part."""
    atom: int
    """0 for parameters without a tensor-parallel dim."""
    first_row: int
    """First row, relative to the atom."""
    num_rows: int
    row_length: int

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.row_length


@dataclass(frozen=True)
class Block:
    """Place of a `Piece` in a rank's local parameter: a strided rectangle.

    Element (r, c) lies at flat index ``offset + r * row_stride + c``.
    """

    parameter: int
    offset: int
    num_rows: int
    row_length: int
    row_stride: int

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.row_length

    @property
    def stop(self) -> int:
        """Flat index after the last element."""
        return self.offset + (self.num_rows - 1) * self.row_stride + self.row_length


@dataclass(frozen=True)
class Bucket:
    """Consecutive pieces that are transferred together."""

    index: int
    unit: Unit
    pieces: tuple[Piece, ...]
    shard_borders: tuple[int, ...]
    """Share p is elements [shard_borders[p], shard_borders[p + 1]); num_ranks + 1 entries."""
    owner_order: tuple[int, ...] | None = None
    """The rank that owns each share; None if rank r owns share r."""

    def __post_init__(self) -> None:
        order = self.owner_order
        num_shares = len(self.shard_borders) - 1
        if order is not None and sorted(order) != list(range(num_shares)):
            raise PlanError(
                f"bucket {self.index}: every one of {num_shares} ranks owns one share but the "
                f"owner order is {order}; give a permutation of 0 to {num_shares - 1}"
            )

    @cached_property
    def _share_of(self) -> dict[int, int]:
        """Rank -> its share; empty without an owner order."""
        return {rank: share for share, rank in enumerate(self.owner_order or ())}

    def owner_of(self, share: int) -> int:
        return share if self.owner_order is None else self.owner_order[share]

    @cached_property
    def piece_offsets(self) -> tuple[int, ...]:
        """First element of every piece, then the bucket's size."""
        return _running_sums(piece.num_elements for piece in self.pieces)

    @property
    def num_elements(self) -> int:
        return self.piece_offsets[-1]

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The elements [start, stop) that ``rank`` owns."""
        share = rank if self.owner_order is None else self._share_of[rank]
        return self.shard_borders[share], self.shard_borders[share + 1]


@dataclass(frozen=True)
class CanonicalLayout:
    """The canonical order of a model for ``num_ranks`` owners and ``num_atoms`` = T."""

    parameters: tuple[ParameterSpec, ...]
    num_atoms: int
    num_ranks: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def build(
        cls,
        parameters: Sequence[ParameterSpec],
        *,
        num_atoms: int,
        num_ranks: int,
        bucket_cap_elements: int = DEFAULT_BUCKET_CAP_ELEMENTS,
    ) -> CanonicalLayout:
        """Orders the parameters and cuts them into buckets and shards.

        Args:
            parameters: all of the model; those of a unit and contribution keep their order.
            num_atoms: T, the least common multiple of the tp degrees in the pool.
            num_ranks: of the job; all of them own shards.
            bucket_cap_elements: embedding and output are cut into buckets of about this size.

        Raises:
            ConfigurationError: T does not divide a tensor-parallel dim, or a name is repeated.
        """
        names = [parameter.name for parameter in parameters]
        if len(set(names)) != len(names):
            double = sorted({name for name in names if names.count(name) > 1})
            raise ConfigurationError(f"parameters named twice: {', '.join(double)}")
        for parameter in parameters:
            _check_divisible(parameter, num_atoms)
        ordered = tuple(sorted(parameters, key=lambda p: (p.unit, p.contribution)))
        buckets: list[Bucket] = []
        for unit in sorted({parameter.unit for parameter in ordered}):
            members = [i for i, parameter in enumerate(ordered) if parameter.unit == unit]
            for pieces in _unit_buckets(ordered, members, num_atoms, bucket_cap_elements):
                borders = _shard_borders(pieces, num_ranks)
                buckets.append(Bucket(len(buckets), unit, pieces, borders))
        return cls(ordered, num_atoms, num_ranks, tuple(buckets))

    def with_owner_orders(self, orders: Sequence[tuple[int, ...] | None]) -> CanonicalLayout:
        """The same shares with other owners: an order per bucket, see `Bucket.owner_order`.

        All ranks must use the same orders for the entire run, since optimizer state does not move.

        Raises:
            PlanError: the number of orders is wrong, or one is not a permutation of the ranks.
        """
        if len(orders) != len(self.buckets):
            raise PlanError(
                f"{len(orders)} owner orders for {len(self.buckets)} buckets; give one per bucket"
            )
        buckets = tuple(
            dataclasses.replace(bucket, owner_order=order)
            for bucket, order in zip(self.buckets, orders, strict=True)
        )
        return dataclasses.replace(self, buckets=buckets)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Parameter name -> index into `parameters`."""
        return {parameter.name: i for i, parameter in enumerate(self.parameters)}

    @cached_property
    def parameters_of(self) -> dict[Unit, tuple[int, ...]]:
        """Indices into `parameters` of every unit's, ascending."""
        found: dict[Unit, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            found.setdefault(parameter.unit, []).append(index)
        return {unit: tuple(indices) for unit, indices in found.items()}

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """A number for each bucket; equal for buckets that are cut and owned in the same way, of
        which roles that hold them and have the same `Role.cut` hold the same ranges."""
        numbers: dict[object, int] = {}
        cuts = []
        for bucket in self.buckets:
            pieces = [(each, self.parameters[each.parameter]) for each in bucket.pieces]
            cut = tuple(
                (
                    each.num_elements,
                    each.row_length,
                    each.atom,
                    of.tp_dim,
                    of.contribution,
                    of.experts,
                    of.is_frozen,
                )
                for each, of in pieces
            )
            key = (cut, bucket.shard_borders, bucket.owner_order)
            cuts.append(numbers.setdefault(key, len(numbers)))
        return tuple(cuts)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """As `cuts`, for roles of which columns keep shares: equal for buckets that are also at the
        same place in units of equal buckets."""
        in_unit: dict[Unit, list[int]] = {}
        for bucket, cut in zip(self.buckets, self.cuts, strict=True):
            in_unit.setdefault(bucket.unit, []).append(cut)
        numbers: dict[object, int] = {}
        places = []
        for cuts in in_unit.values():  # in the order of the buckets
            for place in range(len(cuts)):
                places.append(numbers.setdefault((place, *cuts), len(numbers)))
        return tuple(places)

    @property
    def num_elements(self) -> int:
        """Elements of the model; tied parameters count once."""
        return sum(bucket.num_elements for bucket in self.buckets)

    def check_roles(self, roles: Sequence[object]) -> None:
        """Raises PlanError unless there is one role per rank."""
        if len(roles) != self.num_ranks:
            raise PlanError(f"{len(roles)} roles for {self.num_ranks} ranks; give one per rank")

    def check_nodes(self, ranks_per_node: int) -> None:
        """Raises PlanError unless all nodes have so many ranks."""
        if ranks_per_node < 1 or self.num_ranks % ranks_per_node:
            raise PlanError(
                f"nodes have {ranks_per_node} ranks each but {self.num_ranks} ranks do not fill "
                "whole nodes; correct ranks_per_node"
            )

    def holds(self, piece: Piece, tp: int, tp_rank: int) -> bool:
        """True if TP rank ``tp_rank`` of ``tp`` holds the piece if it holds part of the parameter;
        `Role.cut_of` has the arguments."""
        if self.parameters[piece.parameter].tp_dim is None:
            return True
        per_rank = self.num_atoms // tp
        return tp_rank * per_rank <= piece.atom < (tp_rank + 1) * per_rank

    def block(self, piece: Piece, tp: int, tp_rank: int) -> Block:
        """Place of the piece in the local parameter of TP rank ``tp_rank`` of ``tp``."""
        parameter = self.parameters[piece.parameter]
        if parameter.tp_dim is None:
            row, column, row_stride = piece.first_row, 0, piece.row_length
        else:
            local_atom = piece.atom - tp_rank * (self.num_atoms // tp)
            if parameter.tp_dim == 1:
                row_stride = parameter.shape[1] // tp
                row, column = piece.first_row, local_atom * piece.row_length
            else:
                row_stride = piece.row_length
                rows_of_atom = parameter.rows_of_parts[piece.part] // self.num_atoms
                above = sum(parameter.parts[: piece.part]) // tp
                row, column = above + local_atom * rows_of_atom + piece.first_row, 0
        offset = row * row_stride + column
        return Block(piece.parameter, offset, piece.num_rows, piece.row_length, row_stride)

    def global_rectangle(self, piece: Piece) -> tuple[int, int]:
        """(first row, first column) of the piece in the uncut parameter, seen as a matrix."""
        parameter = self.parameters[piece.parameter]
        if parameter.tp_dim == 1:
            return piece.first_row, piece.atom * piece.row_length
        if parameter.tp_dim is None:
            return piece.first_row, 0
        rows_of_atom = parameter.rows_of_parts[piece.part] // self.num_atoms
        above = sum(parameter.parts[: piece.part])
        return above + piece.atom * rows_of_atom + piece.first_row, 0


def _check_divisible(parameter: ParameterSpec, num_atoms: int) -> None:
    if parameter.tp_dim is None:
        return
    sizes = parameter.parts or (parameter.shape[parameter.tp_dim],)
    if any(size % num_atoms for size in sizes):
        raise ConfigurationError(
            f"parameter '{parameter.name}': {' + '.join(map(str, sizes))} entries along dim "
            f"{parameter.tp_dim} do not cut into {num_atoms} equal atoms each ({num_atoms} is the "
            "least common multiple of the tp degrees in use); choose tp degrees that divide them"
        )


def _pieces_of(index: int, parameter: ParameterSpec, num_atoms: int) -> list[Piece]:
    """All atoms of a parameter in canonical order: part by part, atom by atom."""
    row_length = math.prod(parameter.shape[1:])
    if parameter.tp_dim is None:
        return [Piece(index, 0, 0, 0, parameter.shape[0], row_length)]
    if parameter.tp_dim == 1:
        size = row_length // num_atoms
        return [Piece(index, 0, i, 0, parameter.shape[0], size) for i in range(num_atoms)]
    return [
        Piece(index, part, atom, 0, rows // num_atoms, row_length)
        for part, rows in enumerate(parameter.rows_of_parts)
        for atom in range(num_atoms)
    ]


def _unit_buckets(
    parameters: Sequence[ParameterSpec], members: Sequence[int], num_atoms: int, cap: int
) -> list[tuple[Piece, ...]]:
    """The buckets of one unit: embedding and output are cut by rows, others are one bucket."""
    atoms = [piece for i in members for piece in _pieces_of(i, parameters[i], num_atoms)]
    num_elements = sum(piece.num_elements for piece in atoms)
    is_cut_by_rows = parameters[members[0]].unit.order in (_EMBEDDING_ORDER, _OUTPUT_ORDER)
    num_parts = 1 if not is_cut_by_rows else max(1, math.ceil(num_elements / cap))
    buckets = []
    for part in range(num_parts):
        pieces = []
        for atom in atoms:
            first = atom.num_rows * part // num_parts
            stop = atom.num_rows * (part + 1) // num_parts
            if parameters[atom.parameter].tp_dim is None:
                # A norm follows the matrix in memory: with the last rows it travels in place.
                first, stop = 0, atom.num_rows if part == num_parts - 1 else 0
            if stop > first:
                pieces.append(dataclasses.replace(atom, first_row=first, num_rows=stop - first))
        if pieces:  # there may be fewer rows than parts
            buckets.append(tuple(pieces))
    return buckets


def _shard_borders(pieces: Sequence[Piece], num_ranks: int) -> tuple[int, ...]:
    """The row borders nearest to equal shares, in ascending order."""
    offsets = _running_sums(piece.num_elements for piece in pieces)
    total = offsets[-1]
    borders = [0]
    for rank in range(1, num_ranks):
        target = total * rank // num_ranks
        at = min(bisect.bisect_right(offsets, target) - 1, len(pieces) - 1)
        row_length = pieces[at].row_length
        row = (target - offsets[at] + row_length // 2) // row_length
        borders.append(max(borders[-1], offsets[at] + row * row_length))
    borders.append(total)
    return tuple(borders)


def _running_sums(sizes: Iterable[int]) -> tuple[int, ...]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return tuple(sums)


def model_parameters(
    shape: ModelShape, num_expert_groups: int = 1, frozen: Frozen = NOTHING_FROZEN
) -> list[ParameterSpec]:
    """Every parameter of a Llama-like model with sequence parallelism and without biases.

    Only for planning without a model: a run takes them from its model (runtime/catalogue.py).

    Args:
        num_expert_groups: a multiple of the ep degrees in use; experts of a layer that the same
            ranks hold are one parameter, as bytes and their places are the same.
        frozen: its parts that are, and adapters.
    """
    hidden, sharded, partial = shape.hidden_size, Contribution.SHARDED, Contribution.PARTIAL
    num_halves = 2 if shape.gated_mlp else 1
    ends = (shape.vocab_size, hidden)
    parameters = [ParameterSpec("embedding", ends, Unit.embedding(), sharded, tp_dim=0)]
    units = [(layer, Unit.layer(layer)) for layer in range(shape.num_layers)]
    units += [(shape.num_layers - 1, Unit.prediction(i)) for i in range(shape.num_predictions)]
    for layer, unit in units:
        prefix = f"{unit.name}."
        if not unit.is_layer:
            projection = (hidden, 2 * hidden)
            parameters += [
                ParameterSpec(prefix + "projection", projection, unit, sharded, tp_dim=0),
                ParameterSpec(prefix + "norms", (3 * hidden,), unit, partial, decays=False),
            ]
        parameters += [
            ParameterSpec(prefix + "norm1", (hidden,), unit, partial, decays=False),
            *_projections(shape, unit, prefix),
            ParameterSpec(prefix + "proj", (hidden, shape.output_size), unit, sharded, tp_dim=1),
            ParameterSpec(prefix + "norm2", (hidden,), unit, partial, decays=False),
        ]
        if layer < shape.num_layers - shape.num_expert_layers:
            mlps: list[tuple[int, int, tuple[int, int] | None]]
            mlps = [(1, shape.ffn_hidden_size, None)]
        else:
            router = (shape.num_experts, hidden)
            parameters.append(ParameterSpec(prefix + "router", router, unit, partial))
            in_group = shape.num_experts // num_expert_groups
            mlps = [
                (in_group, shape.expert_ffn_hidden_size, (start, start + in_group))
                for start in range(0, shape.num_experts, in_group)
            ]
            if shape.shared_expert_ffn_hidden_size:
                mlps.append((1, shape.shared_expert_ffn_hidden_size, None))
        for index, (number, width, experts) in enumerate(mlps):
            halves = (number * width,) * num_halves
            fc1, fc2 = (sum(halves), hidden), (number * hidden, width)
            names = f"{prefix}fc1.{index}", f"{prefix}fc2.{index}"
            parameters += [
                ParameterSpec(
                    names[0], fc1, unit, sharded, tp_dim=0, parts=halves, experts=experts
                ),
                ParameterSpec(names[1], fc2, unit, sharded, tp_dim=1, experts=experts),
            ]
    parameters.append(ParameterSpec("norm", (hidden,), Unit.output(), partial, decays=False))
    if not shape.tied_embeddings:
        parameters.append(ParameterSpec("output", ends, Unit.output(), sharded, tp_dim=0))
    lora = frozen.lora
    parameters = [
        dataclasses.replace(each, unit=each.unit.frozen) if _is_in(frozen, each.unit) else each
        for each in parameters
    ]
    if lora is None:
        return parameters
    num_dense = shape.num_layers - shape.num_expert_layers
    trained = [
        (Unit.layer(layer), each)
        for layer in range(shape.num_layers)
        for each in lora.of_layer(shape, has_experts=layer >= num_dense)
    ]
    trained += [(Unit.output(), each) for each in lora.of_output(shape)]
    return parameters + [
        ParameterSpec(f"{unit.name}.{each.module}.{each.target}.{name}", size, unit, partial)
        for unit, each in trained
        for name, size in (
            ("A", (lora.rank, each.num_inputs)),
            ("B", (each.num_outputs, lora.rank)),
        )
    ]


def _is_in(frozen: Frozen, unit: Unit) -> bool:
    if unit.is_layer:
        return unit.order in frozen.layers
    if unit.order < _OUTPUT_ORDER:
        return frozen.embedding
    return frozen.output and unit == Unit.output()


def _projections(shape: ModelShape, unit: Unit, prefix: str) -> list[ParameterSpec]:
    """Parameters that make queries, keys and values of a layer's input, directly or by latents."""

    def cut(name: str, num_outputs: int, num_inputs: int) -> ParameterSpec:
        matrix = (num_outputs, num_inputs)
        return ParameterSpec(prefix + name, matrix, unit, Contribution.SHARDED, tp_dim=0)

    def whole(name: str, num_outputs: int) -> ParameterSpec:
        matrix = (num_outputs, shape.hidden_size)
        return ParameterSpec(prefix + name, matrix, unit, Contribution.PARTIAL)

    if not shape.kv_lora_rank:
        return [cut("qkv", shape.qkv_size, shape.hidden_size)]
    kv_size = shape.num_attention_heads * (shape.qk_head_dim + shape.v_head_dim)
    projections = [
        whole("kv_down", shape.kv_lora_rank + shape.qk_pos_emb_head_dim),
        cut("kv_up", kv_size, shape.kv_lora_rank),
        cut("q", shape.query_size, shape.q_lora_rank or shape.hidden_size),
    ]
    return projections + ([whole("q_down", shape.q_lora_rank)] if shape.q_lora_rank else [])
