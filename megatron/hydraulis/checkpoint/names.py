"""Places of parameters in a checkpoint: Megatron's names, shapes and offsets.

Megatron itself says so: the whole model is built once on `meta` and asked for its sharded state
dict. Equal layers are stored as one tensor with an axis for the layers before the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from megatron.hydraulis.checkpoint.torch_dist import (
    EXP_AVG,
    EXP_AVG_SQ,
    EXPERT_BIAS,
    MASTER,
    MODEL,
    FilePiece,
    renamed_norms,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_role_model
from megatron.hydraulis.runtime.process_groups import LocalGroup, local_collection

WRITTEN_HERE = "hydraulis"
"""Marks a checkpoint of this program where Megatron describes its content."""
_LAYER_OF_NAME = 2
"""Index of the part of a name that numbers the layer."""
_HAVE_EXTRA_STATES = (
    *("layernorm.weight", "_norm.weight", "_down_proj.weight"),
    *("enorm.weight", "hnorm.weight"),
)
"""Ends of the keys of modules that have extra states in Megatron, but not here: norms that are not
fused with a linear layer, projections to latents."""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter's place in a tensor of the checkpoint."""

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, axes of layers included."""
    prefix: tuple[int, ...]
    """Offsets along the axes of layers, if there are any."""
    may_be_padded: bool
    """Whether the checkpoint may have more or fewer rows: a padded vocabulary."""
    parts: tuple[StoredParameter, ...] = ()
    """Tensors of their own that hold its rows, one after another; none if it is one tensor."""

    @property
    def tensors(self) -> tuple[StoredParameter, ...]:
        """The places of its tensors, of which there is at least one."""
        return self.parts or (self,)

    def at(self, row: int) -> tuple[StoredParameter, int]:
        """The place of the tensor that has one of its rows, and the row in there."""
        for part in self.parts:
            num_rows = part.shape[len(part.prefix)]
            if row < num_rows:
                return part, row
            row -= num_rows
        return self, row

    def fits(self, shape: tuple[int, ...], num_tokens: int) -> bool:
        """True if a stored tensor of that shape can be read, with a vocabulary of that size."""
        axis = len(self.prefix)
        return shape == self.shape or (
            self.may_be_padded
            and len(shape) == len(self.shape)
            and shape[:axis] + shape[axis + 1 :] == self.shape[:axis] + self.shape[axis + 1 :]
            and shape[axis] >= num_tokens
        )

    def rectangle(
        self, first_row: int, first_column: int, num_rows: int, num_columns: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, size) in the stored tensor of a rectangle of the parameter seen as a matrix."""
        own = self.shape[len(self.prefix) :]
        ones = (1,) * len(self.prefix)
        if len(own) == 1:
            return (*self.prefix, first_row), (*ones, num_rows)
        if len(own) == 2:
            return (*self.prefix, first_row, first_column), (*ones, num_rows, num_columns)
        rest = own[1:]  # more dims: never cut but by rows
        return (*self.prefix, first_row, *(0 for _ in rest)), (*ones, num_rows, *rest)


@dataclass(frozen=True)
class ShardState:
    """What a checkpoint has of this rank's shards under one prefix."""

    prefix: str
    """Of the keys, such as `EXP_AVG`."""
    flat: torch.Tensor
    """The state, laid out as the shards' trained parameters, or as the frozen ones."""
    is_frozen: bool = False


def shard_pieces(
    shards: CanonicalShards,
    state: ShardState,
    stored: Mapping[str, StoredParameter],
    *,
    dtype: torch.dtype | None = None,
    saved_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[FilePiece]:
    """A state of this rank's shards as pieces of the checkpoint's tensors, which are views of it.

    Args:
        shards: which rectangles are where.
        stored: `StoredModel.parameters`; those that it lacks are left out.
        dtype: in the file; that of the state if None.
        saved_shapes: shapes in a checkpoint that is read, by key. If its vocabulary has another
            padding, pieces have only the rows that are there; the others are set to 0.
    """
    flat = state.flat
    dtype = flat.dtype if dtype is None else dtype
    same_as_master = state.prefix == MODEL and dtype == flat.dtype and not state.is_frozen
    for owned in shards.rectangles(frozen=state.is_frozen):
        place = stored.get(shards.layout.parameters[owned.parameter].name)
        if place is None:
            continue
        place, first_row = place.at(owned.first_row)
        key, shape, num_rows = state.prefix + place.key, place.shape, owned.num_rows
        view = flat[owned.shard_offset : owned.shard_offset + owned.num_elements]
        if saved_shapes is not None and place.may_be_padded and saved_shapes[key] != shape:
            shape = saved_shapes[key]
            num_rows = max(0, min(num_rows, shape[len(place.prefix)] - first_row))
            view[num_rows * owned.num_columns :].zero_()
            view = view[: num_rows * owned.num_columns]
        if not num_rows:
            continue
        offset, size = place.rectangle(first_row, owned.first_column, num_rows, owned.num_columns)
        same_as = MASTER + place.key if same_as_master else None
        yield FilePiece(key, shape, offset, view.view(size), dtype, same_as)


def bias_pieces(
    engine: RuntimeEngine, stored: Mapping[str, StoredParameter]
) -> Iterator[FilePiece]:
    """The biases of all routers; ``stored`` is `StoredModel.biases`."""
    biases = engine.routers.biases if engine.routers is not None else None
    for name, place in stored.items():
        assert biases is not None
        layer = int(name.split(".")[_LAYER_OF_NAME])
        if name.startswith("mtp."):
            layer += engine.definition.transformer.num_layers
        row = biases[layer]
        offset, size = place.rectangle(0, 0, len(row), 1)
        yield FilePiece(MODEL + place.key, place.shape, offset, row.view(size), row.dtype)


def training_states(engine: RuntimeEngine) -> tuple[ShardState, ...]:
    """This rank's fp32 master and moments, and its frozen parameters."""
    return (
        ShardState(MASTER, engine.shards.parameters),
        ShardState(EXP_AVG, engine.optimizer.exp_avg),
        ShardState(EXP_AVG_SQ, engine.optimizer.exp_avg_sq),
        ShardState(MODEL, engine.shards.frozen, is_frozen=True),
    )


def model_states(engine: RuntimeEngine) -> tuple[ShardState, ...]:
    """This rank's parameters alone."""
    shards = engine.shards
    return ShardState(MODEL, shards.parameters), ShardState(MODEL, shards.frozen, is_frozen=True)


def sharding_metadata(*, separate_layers: bool = False) -> dict[str, Any]:
    """Argument of Megatron's ``sharded_state_dict``, with the defaults of Megatron's own loop.

    It lacks the process group, so that it can be written into the checkpoint.

    separate_layers: see `StoredModel.of`.
    """
    of_layers = {"non_homogeneous_layers": True} if separate_layers else {}
    return of_layers | {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        WRITTEN_HERE: 1,
    }


@dataclass(frozen=True)
class StoredModel:
    """Places where a checkpoint stores a model."""

    parameters: Mapping[str, StoredParameter]
    """Places by the names in the whole model."""
    biases: Mapping[str, StoredParameter]
    """Places of the biases of routers, which are no parameters; none in a model without them."""
    objects: tuple[str, ...]
    """Keys of the objects that Megatron stores, and asks for, besides: extra states.

    Those of norms are included, which only Transformer Engine's have, and of projections to
    latents, so that Megatron's own model finds all that it asks for. Ours are None, which its
    modules ignore.
    """
    separate_layers: bool
    """Whether every layer has its own tensors, instead of an axis in one tensor for all."""

    @classmethod
    def of(cls, definition: ModelDefinition, *, separate_layers: bool = False) -> StoredModel:
        """Build the whole model once.

        Args:
            separate_layers: as in some checkpoints of Megatron.

        Raises ConfigurationError for a model that does not say where a parameter goes.
        """
        model, state = _whole_model(definition, separate_layers=separate_layers)
        biases = [
            (name, each) for name, each in model.named_buffers() if name.endswith(EXPERT_BIAS)
        ]
        places = _places(model.named_parameters(), state), _places(biases, state)
        return cls(*places, _object_keys(state), separate_layers)

    @classmethod
    def to_save(cls, engine: RuntimeEngine) -> StoredModel:
        """The model with separate layers only where some of them are frozen: the optimizer's
        tensors for all layers would lack these."""
        stored = cls.of(engine.definition)
        specs = engine.layout.parameters
        kinds = {(stored.parameters[spec.name].key, spec.is_frozen) for spec in specs}
        if len({key for key, _ in kinds}) == len(kinds):
            return stored
        return cls.of(engine.definition, separate_layers=True)


def _places(named: Iterable[tuple[str, Any]], state: Any) -> dict[str, StoredParameter]:
    """Places of tensors of the whole model in its sharded state dict."""
    entries = {id(entry.data): entry for entry in _leaves(state)}
    stored = {}
    for name, parameter in named:
        # Megatron's state dict detaches parameters, but not those that it makes a factory for.
        entry = entries.get(id(parameter)) or _same_storage(entries.values(), parameter)
        if entry is None:
            raise ConfigurationError(
                f"parameter '{name}': the model's sharded_state_dict does not have it, so that a "
                "checkpoint would be without it; give its module a sharded_state_dict of "
                "upstream's form"
            )
        stored[name] = _stored(name, entry, parameter)
    return stored


def _object_keys(state: Any) -> tuple[str, ...]:
    """See `StoredModel.objects`."""
    keys = {
        leaf.unique_key
        for leaf in _leaves(state, ShardedObject)
        if is_main_replica(leaf.replica_id)
    }
    for leaf in _leaves(state, ShardedTensor):
        if leaf.key.endswith(_HAVE_EXTRA_STATES):
            # Megatron cuts these objects along the axes of layers alone.
            axes = leaf.prepend_axis_num
            keys.add(
                ShardedObject(
                    leaf.key.removesuffix("weight") + "_extra_state",
                    None,
                    tuple(leaf.global_shape[:axes]) or (1,),
                    tuple(leaf.global_offset[:axes]) or (0,),
                ).unique_key
            )
    return tuple(sorted(keys))


def _whole_model(
    definition: ModelDefinition, *, separate_layers: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The model on `meta`, and its sharded state dict."""
    # Names are those of the local layers, whichever layers run.
    local = dataclasses.replace(definition, built_layer_spec=None)
    model: Any = build_role_model(local, definition.whole_role, local_collection())
    metadata = sharding_metadata(separate_layers=separate_layers)
    metadata["dp_cp_group"] = LocalGroup()
    state: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    entries = list(_leaves(state))
    new = renamed_norms({entry.key for entry in entries})
    for entry in entries:
        entry.key = new.get(entry.key, entry.key)
    return model, state


def _stored(name: str, entry: Any, parameter: torch.Tensor) -> StoredParameter:
    parts: tuple[StoredParameter, ...] = ()
    if isinstance(entry, ShardedTensorFactory):
        leaves = list(_leaves(entry.build()))
        first = min(leaves, key=lambda leaf: leaf.global_offset)
        if len({leaf.key for leaf in leaves}) > 1:
            parts = tuple(_stored(name, leaf, leaf.data) for leaf in leaves)
            own = (sum(len(leaf.data) for leaf in leaves), *parameter.shape[1:])
            first = dataclasses.replace(first, key=entry.key, global_shape=own)
    else:
        first = entry
    num_prefix = first.prepend_axis_num
    own = first.global_shape[num_prefix:]
    if math.prod(own) != parameter.numel():
        raise ConfigurationError(
            f"parameter '{name}' of shape {tuple(parameter.shape)} is stored as {first.key} of "
            f"shape {own}; a checkpoint holds it in its own shape"
        )
    return StoredParameter(
        first.key,
        tuple(first.global_shape),
        tuple(first.global_offset[:num_prefix]),
        first.allow_shape_mismatch,
        parts,
    )


def _leaves(state: Any, kind: Any = ShardedTensor | ShardedTensorFactory) -> Iterator[Any]:
    """All values of a type, anywhere in a state dict."""
    if isinstance(state, kind):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _leaves(value, kind)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value, kind)


def _same_storage(entries: Any, parameter: torch.Tensor) -> Any:
    storage = parameter.untyped_storage()._cdata
    found = [e for e in entries if e.data.untyped_storage()._cdata == storage]
    return found[0] if len(found) == 1 else None
