"""What parameters the whole model has, and how upstream would initialise each of them.

The model is built once, whole, on `meta`. A dispatch mode watches the in-place operations that
upstream's initialisers run on each parameter; replayed later on rows, they give initial weights
that depend on the seed and the parameter's name alone.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.initialisers import (
    EverythingOnMeta,
    InitialisationStep,
    InitialiserRecorder,
)
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_model
from megatron.hydraulis.runtime.process_groups import local_collection
from megatron.hydraulis.transfer.canonical import Contribution, ParameterSpec, Unit
from megatron.hydraulis.transfer.role import Role

ROWS_PER_BLOCK = 64
"""Rows that share one random stream. Part of the initial weights: changing it changes them."""

QK_NORMS = ("q_layernorm.", "k_layernorm.")
"""Norms over the heads of one TP rank: partial sums on every rank, sequence parallel or not."""

ROW_PARALLEL_BIASES = ("linear_proj.bias", "linear_fc2.bias")
"""Added to what all TP ranks have summed up: alike on every rank, unless sequence parallel."""

TENSOR_PARALLEL_MODULES = ("self_attention", "cross_attention", "mlp")
"""Modules of a layer that work on one TP rank's part of the heads or of the FFN."""

MARK = "hydraulis_contribution"
"""Attribute by which a parameter says what every TP rank has of its gradient: a value of
``CONTRIBUTIONS``."""

CONTRIBUTIONS = {"partial": Contribution.PARTIAL, "replicated": Contribution.REPLICATED}


@dataclass(frozen=True)
class CataloguedParameter:
    """A parameter of the whole model and the recipe of its initial value."""

    spec: ParameterSpec
    recipe: tuple[InitialisationStep, ...]


@dataclass(frozen=True)
class _Rules:
    """What the strategies of the run make of the model's parameters."""

    tensor_parallel: bool
    sequence_parallel: bool


def catalogue(
    definition: ModelDefinition, *, tensor_parallel: bool = True
) -> list[CataloguedParameter]:
    """All parameters of the whole model, in the order of the modules.

    Args:
        definition: the model.
        tensor_parallel: whether some strategy has tp > 1; if so, it must be certain of every
            parameter how TP ranks share its gradient.

    Raises:
        ConfigurationError: a parameter that cannot be regrouped, or whose initial value cannot be
            made row by row.
    """
    role = Role(
        tp=1,
        tp_rank=0,
        first_layer=0,
        num_layers=definition.transformer.num_layers,
        num_layers_of_model=definition.transformer.num_layers,
        tied_embeddings=definition.tied_embeddings,
    )
    config = copy.copy(definition.role_config(role))
    config.use_cpu_initialization = False
    config.perform_initialization = True
    # With tp > 1 some stage will be sequence parallel: let the modules mark their parameters.
    config.sequence_parallel = definition.sequence_parallel
    recorder = InitialiserRecorder()
    with warnings.catch_warnings(), EverythingOnMeta(recorder), recorder:
        warnings.filterwarnings("ignore", message=".*sequence.parallel.*")
        model = build_model(definition, config, role, local_collection())
    rules = _Rules(tensor_parallel, definition.sequence_parallel)
    return [
        CataloguedParameter(_spec(name, parameter, rules), recorder.recipe(name, parameter))
        for name, parameter in model.named_parameters()
    ]


def initial_rows(
    entry: CataloguedParameter, seed: int, first_row: int, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """Rows [first_row, first_row + num_rows) of a parameter's initial value.

    Args:
        entry: from `catalogue`.
        seed: the run's.
        first_row: along dim 0 of the whole parameter.
        num_rows: how many.
        dtype: of the result; random numbers are drawn in it.

    Returns:
        (num_rows, elements of a row), on the CPU.
    """
    rows, row_length = entry.spec.shape[0], 1
    for size in entry.spec.shape[1:]:
        row_length *= size
    first_block = first_row // ROWS_PER_BLOCK
    last_block = (first_row + num_rows - 1) // ROWS_PER_BLOCK
    blocks = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for block in range(first_block, last_block + 1):
            text = f"{seed}/{entry.spec.name}/{block}"
            # Only the generator that draws: `torch.manual_seed` would reseed every device as well,
            # which `fork_rng` does not undo.
            block_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            torch.default_generator.manual_seed(block_seed)
            height = min(ROWS_PER_BLOCK, rows - block * ROWS_PER_BLOCK)
            values = torch.empty(height, row_length, dtype=dtype, device="cpu")
            for step in entry.recipe:
                step.replay(values)
            blocks.append(values)
    start = first_row - first_block * ROWS_PER_BLOCK
    return torch.cat(blocks)[start : start + num_rows]


def _spec(name: str, parameter: Any, rules: _Rules) -> ParameterSpec:
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise ConfigurationError(
            f"parameter '{name}' asks to average its gradients over the TP ranks; averages cannot "
            "be added up on the shards: mark it sequence_parallel or leave the mark away"
        )
    is_cut = bool(getattr(parameter, "tensor_model_parallel", False))
    contribution = Contribution.SHARDED if is_cut else _contribution(name, parameter, rules)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        unit=_unit(name),
        contribution=contribution,
        tp_dim=parameter.partition_dim if is_cut else None,
        stride=parameter.partition_stride if is_cut else 1,
        decays=parameter.dim() > 1 and not name.endswith(".bias"),
    )


def _contribution(name: str, parameter: Any, rules: _Rules) -> Contribution:
    """What a TP rank has of the gradient of a parameter that is whole on all of them.

    A wrong answer would leave the first loss intact and spoil the update, so nothing is guessed
    where tensor parallelism is in use: a parameter is marked or known.
    """
    mark = getattr(parameter, MARK, None)
    if mark is not None:
        if mark not in CONTRIBUTIONS:
            raise ConfigurationError(
                f"parameter '{name}' has {MARK} = {mark!r}; it can be {_CHOICES}"
            )
        return CONTRIBUTIONS[mark]
    is_marked_sequence_parallel = bool(getattr(parameter, "sequence_parallel", False))
    if is_marked_sequence_parallel or any(norm in name for norm in QK_NORMS):
        return Contribution.PARTIAL
    if not rules.tensor_parallel or not name.startswith("decoder."):
        return Contribution.REPLICATED
    if any(module in name.split(".") for module in TENSOR_PARALLEL_MODULES):
        is_known = name.endswith(ROW_PARALLEL_BIASES) and not rules.sequence_parallel
        why = "stands among the parts that tensor parallelism cuts"
    else:
        is_known = not rules.sequence_parallel
        why = "is not marked sequence_parallel, though its layer's input is cut along the sequence"
    if not is_known:
        raise ConfigurationError(
            f"parameter '{name}' is whole on every TP rank and {why}: set parameter.{MARK} to "
            f"{_CHOICES}, by whether a TP rank's gradient is a part of the sum or all of it"
        )
    return Contribution.REPLICATED


_CHOICES = " or ".join(f"'{choice}'" for choice in CONTRIBUTIONS)


def _unit(name: str) -> Unit:
    parts = name.split(".")
    if parts[:2] == ["embedding", "word_embeddings"]:
        return Unit.embedding()
    if parts[0] == "embedding":
        return Unit.first_stage()
    if parts[:2] == ["decoder", "layers"]:
        return Unit.layer(int(parts[2]))
    if parts[0] in ("decoder", "output_layer"):
        return Unit.output()
    raise ConfigurationError(
        f"parameter '{name}' belongs to no stage: names begin with 'embedding.', "
        "'decoder.layers.N.', 'decoder.' (last stage) or 'output_layer.'"
    )
