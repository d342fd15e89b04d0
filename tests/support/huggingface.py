"""The same weights in Hugging Face's Llama: code that shares nothing with Megatron or this project.

Differences of layout, all linear, so that weights and gradients map in the same way:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  its key head and of its value head; Llama has three matrices, heads in order.
- Megatron's ``linear_fc1`` stacks gate and up.
- Megatron's vocabulary is padded; Llama's is not.

Rotary positions are the same: both rotate the first half of a head against the second half (not
neighbouring pairs), so heads' rows keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models import SmallModel

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LlamaGradients:
    """Mean loss and gradients over the trained tokens of a batch, by Llama's names."""

    loss: float
    gradients: dict[str, np.ndarray]


def to_llama(tensors: Tensors, model: SmallModel) -> dict[str, np.ndarray]:
    """Whole tensors (weights or gradients) by Megatron's names -> by Llama's.

    Every tensor is used: one that Llama does not have is a KeyError.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if name in _OUTER_NAMES:
            is_vocabulary = name != "decoder.final_layernorm.weight"
            found[_OUTER_NAMES[name]] = value[: model.vocab_size] if is_vocabulary else value
            continue
        _, _, layer, *rest = name.split(".")
        prefix, local_name = f"model.layers.{layer}.", ".".join(rest)
        if local_name == "self_attention.linear_qkv.weight":
            query, key, value_rows = _split_qkv(value, model)
            found[prefix + "self_attn.q_proj.weight"] = query
            found[prefix + "self_attn.k_proj.weight"] = key
            found[prefix + "self_attn.v_proj.weight"] = value_rows
        elif local_name == "mlp.linear_fc1.weight":
            gate, up = np.split(value, 2)
            found[prefix + "mlp.gate_proj.weight"] = gate
            found[prefix + "mlp.up_proj.weight"] = up
        else:
            found[prefix + _LAYER_NAMES[local_name]] = value
    return found


def llama_gradients(
    weights: Tensors, model: SmallModel, batch: Sequence[np.ndarray]
) -> LlamaGradients:
    """Forward and backward in fp32, sequence by sequence, unpacked and unpadded.

    Args:
        weights: by Llama's names.
        model: the sizes.
        batch: (length + 1,) tokens each.
    """
    llama = _build(model)
    named = dict(llama.named_parameters())
    assert named.keys() == weights.keys(), sorted(named.keys() ^ weights.keys())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(weights[name]))
    total, num_tokens = 0.0, 0
    for tokens in batch:
        ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        logits = llama(input_ids=ids[None, :-1], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        loss.backward()
        total += loss.item()
        num_tokens += len(tokens) - 1
    gradients = {}
    for name, parameter in named.items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.double().numpy() / num_tokens
    return LlamaGradients(total / num_tokens, gradients)


_OUTER_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def _split_qkv(value: np.ndarray, model: SmallModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(heads · size, hidden), (groups · size, hidden) twice."""
    head_size = model.hidden_size // model.num_heads
    num_query_rows = model.num_heads // model.num_groups * head_size
    groups = value.reshape(model.num_groups, num_query_rows + 2 * head_size, model.hidden_size)
    borders = [num_query_rows, num_query_rows + head_size]
    query, key, value_rows = (
        part.reshape(-1, model.hidden_size) for part in np.split(groups, borders, axis=1)
    )
    return query, key, value_rows


def _build(model: SmallModel) -> LlamaForCausalLM:
    config = model.transformer()
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_groups,
            rms_norm_eps=config.layernorm_epsilon,
            tie_word_embeddings=model.tied,
        )
    ).float()
    # Not the fused attention that the engine calls.
    llama.set_attn_implementation("eager")
    return llama
