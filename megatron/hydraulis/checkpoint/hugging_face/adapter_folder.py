"""A folder with a low-rank adapter as peft has it: ``adapter_config.json`` and one safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.hydraulis.checkpoint.hugging_face.config import ADAPTER_CONFIG_NAME
from megatron.hydraulis.checkpoint.hugging_face.folder import SafetensorsFolder
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    PEFT_PREFIX,
    adapter_rows,
    check_tensors,
)
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, listed
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.lora import Lora, adapters

ADAPTER_STEM = "adapter_model"
"""Beginning of the name of the file with the tensors."""
_READ = ("peft_type", "r", "lora_alpha", "init_lora_weights")
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    # The tensors themselves show which layers have adapters.
    *("ensure_weight_tying", "exclude_modules", "layers_pattern", "target_modules", "task_type"),
    # These matter if another key is set, or before the first step.
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config"),
    *("megatron_core", "qalora_group_size", "runtime_config"),
)
"""Keys of peft (0.21) that do not change what a given adapter computes."""
_KEEP_BASE = (True, False, None, "true", "false", "gaussian", "eva", "orthogonal")
"""Initializations that do not change the weights of the base model."""
_DROPOUT = "lora_dropout"
_FIRST = ".lora_A.weight"
_COPIED, _COPY = "lm_head.weight", f"{PEFT_PREFIX}lm_head.base_layer.weight"


def open_adapter(
    source: Path, model: HuggingFaceModel, of_model: SafetensorsFolder
) -> tuple[Lora, SafetensorsFolder, torch.dtype]:
    """The adapter in a folder, its tensors, which are those that the model has, and their dtype.

    of_model: the folder of the model.

    Raises:
        CheckpointError: the folder is damaged, incomplete or of another model.
        ConfigurationError: the adapter computes something else than `Lora`.
    """
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: there is no such folder; correct the path, or, for an adapter on the Hub, "
            f"download it first"
        )
    path = source / ADAPTER_CONFIG_NAME
    config = JsonObject(
        read_json(path, "adapter", CheckpointError), f"adapter {path}", ConfigurationError
    )
    _check_plain(config)
    files = SafetensorsFolder(source, ADAPTER_STEM)
    # Next to an adapter of the output layer peft writes the layer's weight, which is no part of it.
    has_copy = {_COPY} <= files.names and {_COPIED} <= of_model.names
    if has_copy and files.read(_COPY).equal(of_model.read(_COPIED).to(files.dtype(_COPY))):
        files.leave_out([_COPY])
    ends = {
        name.removesuffix(_FIRST).rpartition(".")[2]
        for name in files.names
        if name.endswith(_FIRST)
    }
    known = dict.fromkeys(each.target for each in adapters(model.shape()))
    targets = tuple(target for target in known if target in ends)
    if not targets:
        raise ConfigurationError(
            f"{source}: adapters can be of {', '.join(known)} but there are "
            f"{listed(sorted(files.names)) or 'none'}; name another folder"
        )
    lora = Lora(config.integer("r"), config.number("lora_alpha"), targets)
    rows = [row for pair in adapter_rows(model, lora).values() for row in pair]
    base = config.value("base_model_name_or_path") if config.has("base_model_name_or_path") else ""
    dtype = check_tensors(
        f"an adapter of rank {lora.rank} of {', '.join(targets)} of {model}",
        source,
        {row.name: row.shape for row in rows},
        {name: (files.shape(name), files.dtype(name)) for name in files.names},
        f"get the folder again, or give the model that it was trained with{base and f', {base}'}",
        f"adapters can be of {', '.join(known)} in all layers that have them",
    )
    return lora, files, dtype


def _check_plain(config: JsonObject) -> None:
    """Raise ConfigurationError for what plain LoRA does not compute."""
    kind = config.value("peft_type")
    if kind != "LORA":
        raise config.error(f"peft_type must be LORA but is {kind}; train an adapter of LoRA")
    others = {
        key: config.value(key) for key in config.keys if key not in (*_READ, *_WITHOUT_EFFECT)
    }
    found = {key: value for key, value in others.items() if value and value != "none"}
    start = config.value("init_lora_weights") if config.has("init_lora_weights") else True
    if start not in _KEEP_BASE:
        found["init_lora_weights"] = start
    if found:
        fix = "merge it into its model by peft's merge_and_unload, and import the result"
        if found.keys() == {_DROPOUT}:
            fix = f"set {_DROPOUT} to 0 there, since dropout acts only in training"
        named = ", ".join(f"{key} is {value}" for key, value in found.items())
        raise config.error(f"an adapter is y = W·x + (lora_alpha/r)·B·A·x but {named}; {fix}")


def adapter_config(lora: Lora, base: str | None) -> dict[str, Any]:
    """The content of ``adapter_config.json``.

    base: folder or name of the model; None if it is not known.
    """
    alpha = lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": list(lora.targets),
        _DROPOUT: 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
