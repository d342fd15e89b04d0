"""Checks of what a program gives an engine; on all ranks, wrong arguments raise one error.

Functions whose names begin with ``checked`` and ``check`` raise ConfigurationError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.library.batches import Batch, check_same, entry_of
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.runtime.process_groups import of_all_ranks, on_all_ranks
from megatron.hydraulis.runtime.token_loss import OUTPUTS, TOKEN_IDS, VALUES


def agreed[Value](checked: Callable[[], Value], what: str) -> Value:
    """Collective: an argument that every rank has found right, if all have given the same."""
    value = on_all_ranks(checked, f"{what} cannot be read")
    check_same(of_all_ranks(value), what, "give the same to all")
    return value


def agreed_parts(parameters: bool, optimizer: bool) -> dict[str, bool]:
    """Collective: which parts of an engine move."""
    return agreed(
        lambda: {"parameters": bool(parameters), "optimizer": bool(optimizer)},
        "parameters and optimizer",
    )


def checked_list(sequences: Sequence[Any]) -> list[Any]:
    """The sequences of a batch."""
    if isinstance(sequences, str | bytes | Mapping) or not isinstance(sequences, Iterable):
        raise ConfigurationError(
            "sequences are a list of TokenSequences or rows of token ids but are "
            f"{sequences!r:.60}; give a list"
        )
    return list(sequences)


def checked_mini_batches(number: int) -> int:
    """Their number."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise ConfigurationError(
            f"mini_batches is a whole number from 1 on but is {number!r:.60}; correct it"
        )
    return int(number)


def plans_of(batch: Batch) -> list[tuple[int, str]]:
    """Number and strategy of each plan: ranks that differ in them would run different batches."""
    if not isinstance(batch, Batch):
        raise ConfigurationError(
            f"a pass runs what engine.plan(sequences) returns but got {batch!r:.60}; plan it first"
        )
    return [(plan.iteration, plan.strategy) for plan in batch.plans]


def checked_lr(lr: float | None) -> float | None:
    """A learning rate, or None."""
    return None if lr is None else checked_number(lr, "lr", may_be_0=True)


def checked_divisor(divisor: float | None) -> float | None:
    """A divisor of sums, or None."""
    return None if divisor is None else checked_number(divisor, "divisor")


def checked_number(value: float, what: str, *, may_be_0: bool = False) -> float:
    """A finite number above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (0 < value <= sys.float_info.max or (may_be_0 and value == 0)):
        raise ConfigurationError(
            f"the {what} must be {'at least 0' if may_be_0 else 'positive'} and finite but is "
            f"{value!r:.60}; give another one"
        )
    return float(value)


def checked_outputs(
    outputs: str | Sequence[str], batch: Batch, definition: ModelDefinition
) -> tuple[str, ...]:
    """Outputs of a forward pass of the batch, each once."""
    available = (VALUES,) if definition.has_value_head else OUTPUTS
    names: tuple[Any, ...] = (outputs,)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str):
        names = tuple(outputs)
    if not names or any(name not in available for name in names) or len({*names}) < len(names):
        raise ConfigurationError(
            f"outputs are some of {', '.join(available)}, each once, but "
            f"{', '.join(map(str, names)) or 'none'} was asked for; correct them"
        )
    check_inputs(batch, definition, needs_ids="token_log_probs" in names)
    return names


def check_inputs(batch: Batch, definition: ModelDefinition, *, needs_ids: bool = False) -> None:
    """Check that `TOKEN_IDS` are ids, (n, k), of the vocabulary, and that no input has the name of
    an output that a loss gets in its place."""
    vocab_size, inputs = definition.vocab_size, batch.sequences[0].inputs
    for name, is_output in (
        (VALUES, definition.has_value_head),
        ("token_log_probs", TOKEN_IDS in inputs),
    ):
        if is_output and name in inputs:
            raise ConfigurationError(
                f"a loss gets the model's {name} as inputs['{name}'] but the sequences have an "
                f"input of that name; rename it, for example to 'old_{name}'"
            )
    for number, each in enumerate(batch.sequences):
        if TOKEN_IDS not in each.inputs:
            if needs_ids:
                raise ConfigurationError(
                    f"token_log_probs are those of the input '{TOKEN_IDS}' but sequence "
                    f"{number} has {sorted(each.inputs)}; give it (n, k) token ids"
                )
            continue
        ids = each.inputs[TOKEN_IDS]
        are_ids = ids.dim() == 2 and ids.numel() > 0 and not ids.is_floating_point()
        if not are_ids or not ((ids[1:] >= 0) & (ids[1:] < vocab_size)).all():
            extent = f" from {ids.min()} to {ids.max()}" if ids.numel() else ""
            raise ConfigurationError(
                f"'{TOKEN_IDS}' are (n, k) whole numbers in [0, {vocab_size}) but those of "
                f"sequence {number} are {entry_of(ids)}{extent}; correct them"
            )
