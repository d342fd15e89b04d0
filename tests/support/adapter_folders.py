"""Folders of adapters, written and read by peft."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers  # see huggingface.py
from safetensors.torch import load_file, save_file

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def make_adapter(
    path: Path, base: Path, targets: Sequence[str] | str, *, rank: int = 4, alpha: int = 8
) -> Path:
    """A and B are random: B would be 0."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    model: Any = peft.get_peft_model(_model(base), config)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path


def logits_with(base: Path, adapter: Path, tokens: torch.Tensor, *, merged: bool) -> torch.Tensor:
    """The base model's logits with the adapter, or after peft has merged them.

    Every tensor of the adapter has a place in the model, and the reverse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft only warns of tensors without a place
        model: Any = peft.PeftModel.from_pretrained(_model(base), adapter)
    return _logits(model.merge_and_unload() if merged else model, tokens)


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a folder of transformers, or of one of peft that names its base model."""
    return _logits(_model(folder), tokens)


def change_adapter(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the tensors."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def change_adapter_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits
