"""The same weights in Hugging Face's models: code that shares nothing with Megatron or with ours.

Differences of layout, all linear, so that weights and gradients map in the same way:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  their gates, of its key head and of its value head; Llama has three matrices, heads in order, and
  Qwen3-Next puts the gate of each head behind it.
- Megatron's ``linear_fc1`` stacks gate and up.
- Megatron's experts are modules; transformers has two tensors for all experts of a layer.
- Megatron's vocabulary is padded; Llama's is not.

Rotary positions are the same: both rotate the first half of a head against the second half, and
with latent attention neighbouring pairs, so heads' rows keep their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers  # its models, when they are used: they load torch's compiler

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
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        if name in _OUTER_NAMES:
            is_vocabulary = "layernorm" not in name
            found[_OUTER_NAMES[name]] = value[: model.vocab_size] if is_vocabulary else value
            continue
        _, _, layer, *rest = name.split(".")
        prefix, local_name = f"model.layers.{layer}.", ".".join(rest)
        module, _, kind = local_name.rpartition(".")
        if module == "self_attention.linear_qkv":
            query, key, value_rows = _split_qkv(value, model)
            found[prefix + f"self_attn.q_proj.{kind}"] = query
            found[prefix + f"self_attn.k_proj.{kind}"] = key
            found[prefix + f"self_attn.v_proj.{kind}"] = value_rows
        elif module.startswith("mlp.experts"):
            *_, number, linear = module.split(".")
            whole = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[linear]
            experts.setdefault(f"{prefix}mlp.experts.{whole}", {})[int(number)] = value
        elif module.startswith("mlp.shared_experts."):
            has_gate = model.transformer().moe_shared_expert_gate
            shared = prefix + ("mlp.shared_expert." if has_gate else "mlp.shared_experts.")
            if module.endswith("fc1"):
                gate, up = np.split(value, 2)
                found |= {f"{shared}gate_proj.weight": gate, f"{shared}up_proj.weight": up}
            else:
                found[f"{shared}down_proj.weight"] = value
        elif module == "mlp.linear_fc1" and model.transformer().gated_linear_unit:
            gate, up = np.split(value, 2)
            found[prefix + f"mlp.gate_proj.{kind}"] = gate
            found[prefix + f"mlp.up_proj.{kind}"] = up
        elif kind == "softmax_offset":
            found[prefix + "self_attn.sinks"] = value
        elif (module == "self_attention.q_layernorm") and "kv_lora_rank" in dict(model.variant):
            found[prefix + "self_attn.q_a_layernorm.weight"] = value
        else:
            found[prefix + f"{_LAYER_NAMES[module]}.{kind.removeprefix('gate_')}"] = value
    for name, of_numbers in experts.items():
        found[name] = np.stack([of_numbers[number] for number in range(len(of_numbers))])
    return found


def llama_gradients(
    weights: Tensors,
    model: SmallModel,
    batch: Sequence[np.ndarray],
    token_weights: Sequence[np.ndarray],
    build: Callable[[SmallModel], torch.nn.Module] | None = None,
) -> LlamaGradients:
    """Forward and backward in fp32, sequence by sequence, unpacked and unpadded.

    Args:
        weights: by Llama's names.
        model: the sizes.
        batch: (length + 1,) tokens each.
        token_weights: (length + 1,) of predicting each; tokens without any have label -100.
        build: makes another of Hugging Face's models. If it balances, one layer has experts:
            transformers' balancing loss of a sequence adds up the choices and scores of all layers
            first. It is top-k times ours.
    """
    llama = load(weights, model, build)
    settings = model.transformer()
    coefficient: Any = settings.moe_aux_loss_coeff
    num_tokens = sum(len(tokens) - 1 for tokens in batch)
    weights_per_token = sum(each[1:].sum(dtype=np.float64) for each in token_weights) / num_tokens
    total = weight_sum = 0.0
    for tokens, of_tokens in zip(batch, token_weights, strict=True):
        ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        of_labels = torch.from_numpy(of_tokens)[1:]
        labels = ids[1:].masked_fill(of_labels == 0, -100)
        options = {"output_router_logits": True} if coefficient else {}
        result = llama(input_ids=ids[None, :-1], use_cache=False, **options)
        losses = torch.nn.functional.cross_entropy(result.logits[0], labels, reduction="none")
        loss = (of_labels * losses).sum()
        added = 0.0
        if coefficient:
            of_tokens_here = coefficient * len(labels) * weights_per_token
            added = of_tokens_here * result.aux_loss / settings.moe_router_topk
        (loss + added).backward()
        total += loss.item()
        weight_sum += of_labels.double().sum().item()
    return _divided(llama, total, weight_sum)


def labelled_gradients(
    weights: Tensors,
    model: SmallModel,
    batch: Sequence[np.ndarray],
    is_trained: Sequence[np.ndarray],
) -> LlamaGradients:
    """`llama_gradients` by the model's own loss of labels: -100 where nothing is trained.

    Args:
        weights: by Llama's names.
        model: the sizes.
        batch: (length + 1,) tokens each.
        is_trained: (length + 1,) whether to predict each; that of the first is ignored.
    """
    llama = load(weights, model)
    total, num_trained = 0.0, 0
    for tokens, trained in zip(batch, is_trained, strict=True):
        ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None]
        number = int(trained[1:].sum())
        if number:  # the mean of no tokens is not a number
            labels = ids.masked_fill(~torch.from_numpy(trained), -100)
            loss = llama(input_ids=ids, labels=labels, use_cache=False).loss * number
            loss.backward()
            total += loss.item()
            num_trained += number
    return _divided(llama, total, num_trained)


def load(
    weights: Tensors,
    model: SmallModel,
    build: Callable[[SmallModel], torch.nn.Module] | None = None,
) -> Any:
    """Hugging Face's model with weights by its names."""
    llama = (build or plain_llama)(model)
    named = dict(llama.named_parameters())
    assert named.keys() == weights.keys(), sorted(named.keys() ^ weights.keys())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(weights[name]))
    return llama


def _divided(llama: torch.nn.Module, total: float, divisor: float) -> LlamaGradients:
    gradients = {}
    for name, parameter in llama.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.double().numpy() / divisor
    return LlamaGradients(total / divisor, gradients)


_OUTER_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_layernorm.bias": "model.norm.bias",
    "output_layer.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts": "mlp.shared_expert_gate",
}


def _split_qkv(value: np.ndarray, model: SmallModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(heads · size, hidden), (groups · size, hidden) twice."""
    head_size = model.hidden_size // model.num_heads
    num_query_rows = model.num_heads // model.num_groups * head_size
    rest = value.shape[1:]  # of a bias none
    has_gate = model.transformer().attention_output_gate
    num_rows = (2 if has_gate else 1) * num_query_rows
    groups = value.reshape(model.num_groups, num_rows + 2 * head_size, *rest)
    query, key, value_rows = np.split(groups, [num_rows, num_rows + head_size], axis=1)
    if has_gate:
        halves = query.reshape(model.num_groups, 2, -1, head_size, *rest)
        query = halves.swapaxes(1, 2)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value_rows.reshape(-1, *rest)


def _sizes(model: SmallModel) -> dict[str, Any]:
    """Sizes with the same name in all families, and the plain rotation of the engine's base."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_groups,
        "head_dim": model.hidden_size // model.num_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        "tie_word_embeddings": model.tied,
        # Not the fused attention that the engine calls.
        "attn_implementation": "eager",
        "pad_token_id": None,
    }


def _built(family: str, model: SmallModel, **settings: Any) -> Any:
    """A model of transformers in fp32, whose settings replace or extend `_sizes`."""
    config = _sizes(model) | {"rms_norm_eps": model.transformer().layernorm_epsilon} | settings
    made = getattr(transformers, f"{family}Config")(**config)
    return getattr(transformers, f"{family}ForCausalLM")(made).float()


def plain_llama(model: SmallModel) -> torch.nn.Module:
    """Llama without biases."""
    return _built("Llama", model)


def qwen3(model: SmallModel) -> torch.nn.Module:
    """Qwen3 has norms of queries and keys."""
    return _built("Qwen3", model)


def mistral(model: SmallModel) -> torch.nn.Module:
    """Mistral has a window in all layers; it counts a token's own key."""
    window = model.transformer().window_size
    assert window is not None
    return _built("Mistral", model, sliding_window=window[0] + 1)


def nemotron(model: SmallModel) -> torch.nn.Module:
    """Nemotron has squared ReLU and layer norms around one."""
    return _built("Nemotron", model, norm_eps=model.transformer().layernorm_epsilon)


def smollm3(model: SmallModel) -> torch.nn.Module:
    """SmolLM3 has layers without positions."""
    no_rope = model.transformer().no_rope_freq
    assert isinstance(no_rope, list)
    return _built("SmolLM3", model, no_rope_layers=[1 - skips for skips in no_rope])


def qwen3_next(model: SmallModel) -> torch.nn.Module:
    """Qwen3-Next has gated attention and norms around one; here in full layers without experts."""
    layers = range(model.num_layers)
    types = ["full_attention" for _ in layers]
    return _built("Qwen3Next", model, layer_types=types, mlp_only_layers=list(layers))


def mixtral(model: SmallModel) -> torch.nn.Module:
    """Mixtral has experts in all layers."""
    settings = model.transformer()
    return _built(
        "Mixtral",
        model,
        intermediate_size=settings.moe_ffn_hidden_size,
        num_local_experts=settings.num_moe_experts,
        num_experts_per_tok=settings.moe_router_topk,
        sliding_window=None,
    )


def qwen2_moe(model: SmallModel) -> torch.nn.Module:
    """Qwen2-MoE has a shared expert and its gate; here without biases."""
    width = model.transformer().moe_shared_expert_intermediate_size
    experts = _qwen_experts(model)
    return _built(
        "Qwen2Moe", model, **experts, shared_expert_intermediate_size=width, qkv_bias=False
    )


def qwen3_moe(model: SmallModel) -> torch.nn.Module:
    """Qwen3-MoE has norms of queries and keys."""
    return _built("Qwen3Moe", model, **_qwen_experts(model))


def _qwen_experts(model: SmallModel) -> dict[str, Any]:
    settings = model.transformer()
    frequency = settings.moe_layer_freq
    return {
        "num_experts": settings.num_moe_experts,
        "num_experts_per_tok": settings.moe_router_topk,
        "moe_intermediate_size": settings.moe_ffn_hidden_size,
        "norm_topk_prob": not settings.moe_router_pre_softmax,
        "mlp_only_layers": [
            layer
            for layer in range(model.num_layers)
            if isinstance(frequency, list) and not frequency[layer]
        ],
        "router_aux_loss_coef": 0.0,
    }


def deepseek_v2(model: SmallModel) -> torch.nn.Module:
    """DeepSeek-V2, without experts."""
    return _built("DeepseekV2", model, **_latents(model))


def deepseek_v3(model: SmallModel) -> torch.nn.Module:
    """DeepSeek-V3, without experts or with some in all layers, whose routers have no biases yet."""
    settings, config = model.transformer(), _latents(model)
    if settings.num_moe_experts is not None:
        config |= {
            "n_routed_experts": settings.num_moe_experts,
            "num_experts_per_tok": settings.moe_router_topk,
            "moe_intermediate_size": settings.moe_ffn_hidden_size,
            "n_shared_experts": 1,
            "routed_scaling_factor": settings.moe_router_topk_scaling_factor,
            "n_group": settings.moe_router_num_groups,
            "topk_group": settings.moe_router_group_topk,
            "first_k_dense_replace": 0,
        }
    return _built("DeepseekV3", model, **config)


def _latents(model: SmallModel) -> dict[str, Any]:
    settings: Any = model.transformer()
    latents = {
        "first_k_dense_replace": model.num_layers,
        "head_dim": settings.qk_pos_emb_head_dim,  # which transformers derives, and is rotated
        "q_lora_rank": settings.q_lora_rank,
        "kv_lora_rank": settings.kv_lora_rank,
        "qk_nope_head_dim": settings.qk_head_dim,
        "qk_rope_head_dim": settings.qk_pos_emb_head_dim,
        "v_head_dim": settings.v_head_dim,
    }
    if settings.rope_type == "yarn":
        latents["rope_parameters"] = _sizes(model)["rope_parameters"] | {
            "rope_type": "yarn",
            "factor": settings.rotary_scaling_factor,
            "mscale": settings.mscale,
            "mscale_all_dim": settings.mscale_all_dim,
            "beta_fast": settings.beta_fast,
            "beta_slow": settings.beta_slow,
            "original_max_position_embeddings": settings.original_max_position_embeddings,
        }
    return latents


def gpt_oss(model: SmallModel) -> torch.nn.Module:
    """GPT-OSS has windows in every other layer and learnable offsets; here a single expert as the
    MLP."""
    settings = model.transformer()
    assert settings.window_size is not None
    built = _built(
        "GptOss",
        model,
        sliding_window=settings.window_size[0] + 1,
        swiglu_limit=settings.activation_func_clamp_value,
        num_local_experts=1,
        num_experts_per_tok=1,
    )
    for layer in built.model.layers:
        layer.mlp = _DenseGptOss(layer.mlp.experts)
    return built.float()


class _DenseGptOss(torch.nn.Module):
    """The MLP of one of GPT-OSS's experts, its gate and up rows apart."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        sizes = experts.hidden_size, experts.intermediate_size
        self.gate_proj, self.up_proj = (torch.nn.Linear(*sizes) for _ in range(2))
        self.down_proj = torch.nn.Linear(*sizes[::-1])
        self._apply_gate = functools.partial(
            type(experts)._apply_gate,
            SimpleNamespace(alpha=experts.alpha, limit=experts.limit),
        )

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, None]:
        interleaved = torch.stack([self.gate_proj(given), self.up_proj(given)], dim=-1).flatten(-2)
        return self.down_proj(self._apply_gate(interleaved)), None
