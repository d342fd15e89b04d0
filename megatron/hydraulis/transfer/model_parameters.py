"""The parameters of a Llama-like model, from its shape alone, for counting what regrouping carries.

A run takes them from the model that it builds (`runtime/catalogue.py`); this is for when there is
none.
"""

from __future__ import annotations

from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.canonical import Contribution, ParameterSpec, Unit
from megatron.hydraulis.transfer.role import Role, role_of

__all__ = ["model_parameters", "roles_of"]


def model_parameters(shape: ModelShape) -> list[ParameterSpec]:
    """Every parameter of a Llama-like model, sequence parallel, without biases."""
    hidden, sharded, partial = shape.hidden_size, Contribution.SHARDED, Contribution.PARTIAL
    key_value_size = 2 * shape.num_query_groups * shape.kv_channels
    num_halves = 2 if shape.gated_mlp else 1
    ends = (shape.vocab_size, hidden)
    parameters = [ParameterSpec("embedding", ends, Unit.embedding(), sharded, tp_dim=0)]
    for layer in range(shape.num_layers):
        unit, prefix = Unit.layer(layer), f"layers.{layer}."
        qkv = (shape.query_size + key_value_size, hidden)
        fc1 = (num_halves * shape.ffn_hidden_size, hidden)
        parameters += [
            ParameterSpec(prefix + "norm1", (hidden,), unit, partial, decays=False),
            ParameterSpec(prefix + "qkv", qkv, unit, sharded, tp_dim=0),
            ParameterSpec(prefix + "proj", (hidden, shape.query_size), unit, sharded, tp_dim=1),
            ParameterSpec(prefix + "norm2", (hidden,), unit, partial, decays=False),
            ParameterSpec(prefix + "fc1", fc1, unit, sharded, tp_dim=0, stride=num_halves),
            ParameterSpec(prefix + "fc2", (hidden, shape.ffn_hidden_size), unit, sharded, tp_dim=1),
        ]
    parameters.append(ParameterSpec("norm", (hidden,), Unit.output(), partial, decays=False))
    if not shape.tied_embeddings:
        parameters.append(ParameterSpec("output", ends, Unit.output(), sharded, tp_dim=0))
    return parameters


def roles_of(strategy: Strategy, num_layers: int, tied_embeddings: bool) -> list[Role | None]:
    """The role of every rank, None where it is idle: shape (num_ranks,)."""
    return [
        role_of(strategy, rank, num_layers=num_layers, tied_embeddings=tied_embeddings)
        for rank in range(strategy.num_ranks)
    ]
