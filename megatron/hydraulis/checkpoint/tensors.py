"""Canonical shards as pieces of Megatron's tensors: rectangles in global coordinates."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron.hydraulis.checkpoint.names import StoredParameter
from megatron.hydraulis.runtime.shards import CanonicalShards

__all__ = ["EXP_AVG", "EXP_AVG_SQ", "MASTER", "MODEL", "on_host", "sharded_tensors"]

MODEL = ""
"""Prefix of a parameter's key."""
MASTER = "optimizer.state.param."
"""Prefix of the key of its fp32 master, as upstream's distributed optimizer has it; so the next."""
EXP_AVG = "optimizer.state.exp_avg."
EXP_AVG_SQ = "optimizer.state.exp_avg_sq."


def sharded_tensors(
    shards: CanonicalShards,
    flat: Tensor,
    stored: Mapping[str, StoredParameter],
    prefix: str,
    *,
    saved_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, ShardedTensor]:
    """What this rank owns of a state that lies as the shards do, as views of it.

    Args:
        shards: say which rectangles lie where.
        flat: the state, flat as the shards' parameters.
        stored: from `stored_parameters`.
        prefix: of the keys, such as `EXP_AVG`.
        saved_shapes: of a checkpoint that is read, by key: of a vocabulary that was padded
            otherwise only the rows that are there are asked for, and the others set to 0.
    """
    parts: dict[str, ShardedTensor] = {}
    parameters = shards.layout.parameters
    for number, owned in enumerate(shards.rectangles()):
        place = stored[parameters[owned.parameter].name]
        key = prefix + place.key
        shape = place.shape
        num_rows = owned.num_rows
        view = flat[owned.shard_offset : owned.shard_offset + owned.num_elements]
        if saved_shapes is not None and place.may_be_padded and saved_shapes[key] != shape:
            shape = saved_shapes[key]
            num_rows = max(0, min(num_rows, shape[len(place.prefix)] - owned.first_row))
            view[num_rows * owned.num_columns :].zero_()
            view = view[: num_rows * owned.num_columns]
        if not num_rows:
            continue
        offset, size = place.rectangle(
            owned.first_row, owned.first_column, num_rows, owned.num_columns
        )
        parts[str(number)] = ShardedTensor(
            key=key,
            data=view.view(size),
            dtype=view.dtype,
            local_shape=size,
            global_shape=shape,
            global_offset=offset,
            axis_fragmentations=None,  # rectangles of several sizes make no regular grid
        )
    return parts


def on_host(flat: Tensor) -> Tensor:
    """The tensor itself if the host can read it, else a copy there."""
    return flat if flat.device.type == "cpu" else flat.cpu()
