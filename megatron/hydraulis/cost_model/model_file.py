"""A model's shape from a file."""

from __future__ import annotations

from pathlib import Path

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.model_shape import ModelShape

__all__ = ["read_model_shape"]

_FORMAT_VERSION = 1


def read_model_shape(path: str | Path) -> ModelShape:
    """Read ``{"num_layers": 60, "hidden_size": 6656, …}``, the fields of ModelShape by name.

    Without ``num_query_groups`` there are as many as heads; without ``kv_channels`` a head has its
    share of the hidden size. Raises ConfigurationError for a file that cannot be read, and for
    sizes that make no sense.
    """
    what = f"model file {path}"
    model = JsonObject(read_json(path, "model file", ConfigurationError), what, ConfigurationError)
    model.check_version(_FORMAT_VERSION)
    num_heads, hidden_size = model.integer("num_attention_heads"), model.integer("hidden_size")
    shape = ModelShape(
        num_layers=model.integer("num_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=model.integer("ffn_hidden_size"),
        num_attention_heads=num_heads,
        num_query_groups=(
            model.integer("num_query_groups") if model.has("num_query_groups") else num_heads
        ),
        kv_channels=(
            model.integer("kv_channels")
            if model.has("kv_channels")
            else hidden_size // max(num_heads, 1)
        ),
        vocab_size=model.integer("vocab_size"),
        gated_mlp=model.flag("gated_mlp"),
        tied_embeddings=model.flag("tied_embeddings"),
    )
    model.check_all_read()
    return shape
