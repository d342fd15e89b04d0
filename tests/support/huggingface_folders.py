"""Hugging Face folders of small models, written by transformers and read by safetensors alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # see huggingface.py
from safetensors.torch import load_file

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "ministral": "Ministral",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "nemotron": "Nemotron",
    "smollm3": "SmolLM3",
}
"""What the names of a family's classes in transformers begin with."""
_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384},
    "llama, tied, one head a group, biases": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama, stretched": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "rms_norm_eps": 1e-5,
        "head_dim": 12,
    },
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2, tied, one group": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 16, "vocab_size": 128},
    "qwen3, tied": {"head_dim": 6, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 7, "head_dim": 12},
    "nemotron": {},
    "nemotron, biases, whole heads": {
        "attention_bias": True,
        "mlp_bias": True,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": True,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": None},
    "smollm3, untied, biases": {
        "no_rope_layer_interval": 2,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": None,
    },
    "deepseek_v2": _LATENTS | {"rope_parameters": _YARN, "routed_scaling_factor": 1.5},
    "deepseek_v3": _LATENTS
    | {"q_lora_rank": 14, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    "deepseek_v3, as Moonlight": _LATENTS
    | {"n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "n_shared_experts": 1},
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
    "gpt_oss, other layers, rounded": {
        "head_dim": 12,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "swiglu_limit": 0.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        },
    },
    "qwen2, YaRN": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "ministral": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "head_dim": 8,
    },
    "ministral, all layers": {"sliding_window": 5, "head_dim": 12},
    "mixtral": {"num_local_experts": 4},
    "mixtral, window, tied": {
        "num_local_experts": 3,
        "sliding_window": 7,
        "head_dim": 12,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": _FEW_EXPERTS | {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2},
    "qwen2_moe, normalized, without biases": _FEW_EXPERTS
    | {"shared_expert_intermediate_size": 12, "norm_topk_prob": True, "qkv_bias": False},
    "qwen3_moe": _FEW_EXPERTS | {"head_dim": 12, "norm_topk_prob": True},
    "qwen3_moe, some dense, tied": _FEW_EXPERTS
    | {"head_dim": 6, "mlp_only_layers": [1], "tie_word_embeddings": True},
}
"""Differences from the family's small model, which the first part of the name gives."""


def make_folder(
    path: Path, variant: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Random parameters, norms and biases among them; ``options`` of ``save_pretrained``."""
    name = _CLASSES[variant.split(",")[0]]
    config_class: Any = getattr(transformers, f"{name}Config")
    model: Any = getattr(transformers, f"{name}ForCausalLM")(
        config_class(**(_SIZES | VARIANTS[variant]))
    )
    generator = torch.Generator().manual_seed(len(variant))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(path, **options)
    return path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whatever its files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        read = load_file(file)
        assert not tensors.keys() & read.keys()
        tensors |= read
    return tensors


def assert_same_tensors(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and every bit."""
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def change_config(folder: Path, **changes: Any) -> None:
    """Write other values into config.json; None removes a key."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def transformers_loss(folder: Path, batch: Sequence[np.ndarray]) -> float:
    """The loss of `transformers_loss_and_norm`."""
    return transformers_loss_and_norm(folder, batch)[0]


def transformers_loss_and_norm(folder: Path, batch: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean over the batch's tokens, in fp32, sequence by sequence, and the norm of its gradient; 0
    for a folder of an adapter, with which nothing is trained there.

    Args:
        folder: of the model.
        batch: (length + 1,) tokens each.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    num_tokens, total = sum(len(tokens) - 1 for tokens in batch), 0.0
    for tokens in batch:
        ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="sum")
        if loss.requires_grad:
            (loss / num_tokens).backward()
        total += loss.item()
    gradients = [each.grad.double() for each in model.parameters() if each.grad is not None]
    norm = math.sqrt(math.fsum(each.square().sum().item() for each in gradients))
    return total / num_tokens, norm


def changed_file(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Rewrite a file."""
    path.write_bytes(change(path.read_bytes()))


def flip_a_byte(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = path.read_bytes()
    at = len(data) // 2
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
