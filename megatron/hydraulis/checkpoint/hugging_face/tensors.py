"""Which rows of which of Megatron's tensors make each of Hugging Face's.

All differences of layout between the two are about rows, so that one table serves both ways:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  its key head and of its value head; Hugging Face has three matrices, heads in order.
- Megatron's ``linear_fc1`` stacks gate and up.
- Megatron's vocabulary may be padded.

Rotary positions are the same: both rotate the first half of a head against the second half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "OUTPUT",
    "TensorRows",
    "layer_shapes",
    "outer_shapes",
    "tensor_rows",
]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"

_Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor of Hugging Face's as rows of one of Megatron's."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    """Hugging Face's; the first dim counts the rows."""
    key: str
    """Megatron's, of a layer without its number: ``mlp.linear_fc2.weight``."""
    layer: int | None
    """None for what is no layer's."""
    runs: _Runs
    """First row and end of each run of rows in Megatron's tensor, in Hugging Face's order."""

    @property
    def num_elements(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape)


def tensor_rows(model: HuggingFaceModel) -> Iterator[TensorRows]:
    """Every tensor of the model in Hugging Face's form, layer by layer.

    Those that make one of Megatron's tensors follow one another.
    """
    outer = outer_shapes(model)

    def whole(name: str, key: str) -> TensorRows:
        return TensorRows(name, outer[key], key, None, ((0, outer[key][0]),))

    yield whole("model.embed_tokens.weight", EMBEDDING)
    for layer in range(model.num_layers):
        yield from _layer(model, layer)
    yield whole("model.norm.weight", f"{FINAL_NORM}.weight")
    if not model.tied_embeddings:
        yield whole("lm_head.weight", OUTPUT)


def outer_shapes(model: HuggingFaceModel) -> dict[str, tuple[int, ...]]:
    """Megatron's tensors beside those of layers by key, without padding of the vocabulary."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (model.vocab_size, model.hidden_size),
        f"{FINAL_NORM}.weight": (model.hidden_size,),
    }
    if not model.tied_embeddings:
        shapes[OUTPUT] = shapes[EMBEDDING]
    return shapes


def layer_shapes(model: HuggingFaceModel) -> dict[str, tuple[int, ...]]:
    """Megatron's tensors of one layer by key without the layer's number."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    qkv = query + 2 * model.num_query_groups * model.kv_channels
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_proj.weight": (hidden, query),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * model.ffn_hidden_size, hidden),
        "mlp.linear_fc2.weight": (hidden, model.ffn_hidden_size),
    }
    if model.has_qkv_biases:
        shapes["self_attention.linear_qkv.bias"] = (qkv,)
    if model.has_linear_biases:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
        shapes["mlp.linear_fc1.bias"] = (2 * model.ffn_hidden_size,)
        shapes["mlp.linear_fc2.bias"] = (hidden,)
    if model.has_qk_norms:
        shapes["self_attention.q_layernorm.weight"] = (model.kv_channels,)
        shapes["self_attention.k_layernorm.weight"] = (model.kv_channels,)
    return shapes


_WHOLE_NAMES = {
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""Modules whose tensors Hugging Face has in one piece."""


def _layer(model: HuggingFaceModel, layer: int) -> Iterator[TensorRows]:
    split: dict[str, dict[str, _Runs]] = {
        "self_attention.linear_qkv": _qkv_runs(model),
        "mlp.linear_fc1": {
            "mlp.gate_proj": ((0, model.ffn_hidden_size),),
            "mlp.up_proj": ((model.ffn_hidden_size, 2 * model.ffn_hidden_size),),
        },
    }
    for key, shape in layer_shapes(model).items():
        # "….linear_qkv.weight" and "….linear_qkv.layer_norm_weight" alike
        kind = "bias" if key.endswith("bias") else "weight"
        module = key.removesuffix(kind).rstrip("._")
        if module in _WHOLE_NAMES:
            parts: dict[str, _Runs] = {_WHOLE_NAMES[module]: ((0, shape[0]),)}
        else:
            parts = split[module]
        for name, runs in parts.items():
            num_rows = sum(end - first for first, end in runs)
            full_name = f"model.layers.{layer}.{name}.{kind}"
            yield TensorRows(full_name, (num_rows, *shape[1:]), key, layer, runs)


def _qkv_runs(model: HuggingFaceModel) -> dict[str, _Runs]:
    size = model.kv_channels
    num_query_rows = model.num_attention_heads // model.num_query_groups * size
    starts = [group * (num_query_rows + 2 * size) for group in range(model.num_query_groups)]
    ends = [start + num_query_rows for start in starts]
    return {
        "self_attn.q_proj": tuple(zip(starts, ends, strict=True)),
        "self_attn.k_proj": tuple((end, end + size) for end in ends),
        "self_attn.v_proj": tuple((end + size, end + 2 * size) for end in ends),
    }
