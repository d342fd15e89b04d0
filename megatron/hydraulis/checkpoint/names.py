"""Under which name and where in it upstream stores each parameter of a model.

Upstream says so itself: the whole model is built once on `meta` and asked for its sharded state
dict. Layers that are alike are stored as one tensor with an axis of layers before the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_role_model
from megatron.hydraulis.runtime.process_groups import LocalGroup, local_collection
from megatron.hydraulis.transfer.role import Role

__all__ = [
    "WRITTEN_HERE",
    "StoredParameter",
    "sharding_metadata",
    "stored_objects",
    "stored_parameters",
]

WRITTEN_HERE = "hydraulis"
"""Marks a checkpoint of ours where upstream describes its content."""
_NORM = "layernorm.weight"
"""Ends the keys of norms that stand by themselves, not fused with a linear layer."""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter's place in the tensor that a checkpoint has of it."""

    key: str
    shape: tuple[int, ...]
    """Global shape of that tensor, axes of layers included."""
    prefix: tuple[int, ...]
    """Offsets along the axes of layers; none where there are none."""
    may_be_padded: bool
    """Whether the checkpoint may have more or fewer rows: a padded vocabulary."""

    def rectangle(
        self, first_row: int, first_column: int, num_rows: int, num_columns: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) in the stored tensor of a rectangle of the parameter seen as a matrix."""
        own = self.shape[len(self.prefix) :]
        ones = (1,) * len(self.prefix)
        if len(own) == 1:
            return (*self.prefix, first_row), (*ones, num_rows)
        if len(own) == 2:
            return (*self.prefix, first_row, first_column), (*ones, num_rows, num_columns)
        rest = own[1:]  # more dims: never cut but by rows
        return (*self.prefix, first_row, *(0 for _ in rest)), (*ones, num_rows, *rest)


def sharding_metadata() -> dict[str, Any]:
    """What upstream's ``sharded_state_dict`` is told, as upstream's own loop tells it by default.

    Without the group that it is told as well, fit to be written into the checkpoint.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        WRITTEN_HERE: 1,
    }


def stored_parameters(
    definition: ModelDefinition, *, layers_apart: bool = False
) -> Mapping[str, StoredParameter]:
    """Of every parameter by its name in the whole model.

    Args:
        definition: the model.
        layers_apart: as in a checkpoint of upstream that has a tensor for every layer, instead of
            one with an axis of layers.

    Raises ConfigurationError for a model that does not say where a parameter goes.
    """
    model, state = _whole_model(definition, layers_apart=layers_apart)
    entries = {id(entry.data): entry for entry in _leaves(state)}
    stored = {}
    for name, parameter in model.named_parameters():
        # Upstream's state dict detaches parameters, but not those of which it makes a factory.
        entry = entries.get(id(parameter)) or _same_storage(entries.values(), parameter)
        if entry is None:
            raise ConfigurationError(
                f"parameter '{name}': the model's sharded_state_dict does not have it, so that a "
                "checkpoint would be without it; give its module a sharded_state_dict of "
                "upstream's form"
            )
        stored[name] = _stored(name, entry, parameter)
    return stored


def stored_objects(definition: ModelDefinition) -> list[ShardedObject]:
    """What upstream stores of the model beside parameters, and asks for: extra states.

    Those of norms too, which only Transformer Engine's have, so that a model of its layers finds
    all that it asks for. Ours are None, which its modules take for nothing to set.
    """
    _, state = _whole_model(definition)
    found = [leaf for leaf in _leaves(state, ShardedObject) if is_main_replica(leaf.replica_id)]
    norms = {
        _extra_state_of_norm(leaf)
        for leaf in _leaves(state, ShardedTensor)
        if leaf.key.endswith(_NORM)
    }
    known = {each.unique_key for each in found}
    return found + [
        ShardedObject(key, None, shape, offset)
        for key, shape, offset in sorted(norms)
        if ShardedObject(key, None, shape, offset).unique_key not in known
    ]


def _extra_state_of_norm(weight: ShardedTensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Key, global shape and offset: upstream shares it out along the axes of layers alone."""
    axes = weight.prepend_axis_num
    key = weight.key.removesuffix("weight") + "_extra_state"
    if not axes:
        return key, (1,), (0,)
    return key, tuple(weight.global_shape[:axes]), tuple(weight.global_offset[:axes])


def _whole_model(
    definition: ModelDefinition, *, layers_apart: bool = False
) -> tuple[Any, dict[str, Any]]:
    """On `meta`, and its sharded state dict."""
    transformer = definition.transformer
    role = Role(
        tp=1,
        tp_rank=0,
        first_layer=0,
        num_layers=transformer.num_layers,
        num_layers_of_model=transformer.num_layers,
        tied_embeddings=definition.tied_embeddings,
    )
    # Parameters are called as in the local layers, whichever run.
    local = dataclasses.replace(definition, built_layer_spec=None)
    model: Any = build_role_model(local, role, local_collection())
    metadata = sharding_metadata() | {"dp_cp_group": LocalGroup()}
    if layers_apart:
        metadata["non_homogeneous_layers"] = True
    state: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    return model, state


def _stored(name: str, entry: Any, parameter: torch.Tensor) -> StoredParameter:
    if isinstance(entry, ShardedTensorFactory):
        parts = list(_leaves(entry.build()))
        first = min(parts, key=lambda part: part.global_offset)
        if {part.key for part in parts} != {first.key}:
            raise ConfigurationError(
                f"parameter '{name}' is stored as {', '.join(part.key for part in parts)} but can "
                "only be one tensor; change its module's sharded_state_dict"
            )
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
    )


def _leaves(state: Any, kind: Any = ShardedTensor | ShardedTensorFactory) -> Iterator[Any]:
    """All of a kind anywhere in a state dict."""
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
