"""Sequences, the plans of a batch, and what a rank packs of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.data.weights import Weights, checked_weights
from megatron.hydraulis.errors import ConfigurationError, DataError
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import ReplicaPlan

Tokens = npt.NDArray[np.int64]
PackedShare = tuple[PackedBatch, tuple[int, ...]]
"""A rank's part of a micro-batch, and which sequences of the batch are in its row."""


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence: its tokens, and for each of them a weight and the user's tensors.

    What stands at place t is about predicting token t; nothing predicts the first, whose weight and
    inputs are ignored.

    Raises DataError for fewer than 2 tokens, other lengths, and negative or non-finite weights.
    """

    tokens: Tokens
    """(n,) ids; anything that numpy reads as such."""
    weights: Weights = None  # type: ignore[assignment]
    """(n,) weights, at least 0, kept as float32; 1 by default."""
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """(n, ...) tensors for the loss, by name."""

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1 or len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"a sequence is a row of at least 2 token ids but has shape {tokens.shape} and "
                f"dtype {tokens.dtype}; give whole numbers"
            )
        object.__setattr__(self, "tokens", tokens.astype(np.int64))
        weights = np.ones(len(tokens)) if self.weights is None else self.weights
        weights = checked_weights(weights, len(tokens), "a sequence")
        object.__setattr__(self, "weights", weights)
        inputs = {name: torch.as_tensor(value) for name, value in self.inputs.items()}
        for name, value in inputs.items():
            if value.dim() < 1 or len(value) != len(tokens):
                raise DataError(
                    f"an input has one entry per token but '{name}' has shape "
                    f"{tuple(value.shape)} for {len(tokens)} tokens; give {len(tokens)}"
                )
        object.__setattr__(self, "inputs", inputs)

    @property
    def length(self) -> int:
        """Tokens to predict, which time and memory follow."""
        return len(self.tokens) - 1


def as_sequences(given: Sequence[Any], vocab_size: int) -> tuple[TokenSequence, ...]:
    """Checked sequences from `TokenSequence`s or plain rows of token ids.

    Raises:
        DataError: a sequence is wrong, or has a token id outside of the vocabulary.
        ConfigurationError: there is no sequence, or they do not all have the same inputs.
    """
    if not len(given):
        raise ConfigurationError("a batch has at least 1 sequence but has 0; give some")
    sequences: list[TokenSequence] = []
    for number, each in enumerate(given):
        try:
            sequence = each if isinstance(each, TokenSequence) else TokenSequence(each)
        except DataError as error:
            raise DataError(f"sequence {number}: {error}") from error
        lowest, highest = int(sequence.tokens.min()), int(sequence.tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise DataError(
                f"sequence {number}: token ids lie in [0, {vocab_size}) but there is "
                f"{lowest if lowest < 0 else highest}; use the model's tokenizer"
            )
        if (
            sequence.inputs.keys()
            != (first := sequences[0] if sequences else sequence).inputs.keys()
        ):
            raise ConfigurationError(
                f"all sequences have the same inputs but sequence 0 has {sorted(first.inputs)} and "
                f"sequence {number} has {sorted(sequence.inputs)}; give each input to all of them"
            )
        sequences.append(sequence)
    return tuple(sequences)


def digest_of(sequences: Sequence[TokenSequence]) -> str:
    """Equal for equal tokens, weights and inputs in the same order."""
    digest = hashlib.sha256()
    for each in sequences:
        digest.update(len(each.tokens).to_bytes(8, "little"))
        digest.update(each.tokens.tobytes())
        digest.update(each.weights.tobytes())
        for name, value in sorted(each.inputs.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with their plans: one for each mini-batch, in the order of the sequences.

    Passes over one batch run the same plans. Iterating gives the mini-batches.
    """

    sequences: tuple[TokenSequence, ...]
    """In the caller's order; with ``scatter`` those of all ranks, in theirs."""
    plans: tuple[IterationPlan, ...]
    """Of consecutive runs of sequences."""
    own: range
    """The sequences that this rank gave, whose outputs it gets."""

    def __iter__(self) -> Iterator[Batch]:
        first = 0
        for plan in self.plans:
            stop = first + len(plan.lengths)
            own = range(max(first, self.own.start) - first, min(stop, self.own.stop) - first)
            yield replace(self, sequences=self.sequences[first:stop], plans=(plan,), own=own)
            first = stop

    def with_inputs(self, **inputs: Sequence[Any]) -> Batch:
        """The same batch, with tensors for the loss: for each sequence one of (n, ...).

        Every rank gives those of all sequences.

        Raises DataError for another number of sequences or tokens.
        """
        for name, values in inputs.items():
            if len(values) != len(self.sequences):
                raise DataError(
                    f"an input has one tensor per sequence but '{name}' has {len(values)} for "
                    f"{len(self.sequences)} sequences; give {len(self.sequences)}"
                )
        sequences = tuple(
            replace(each, inputs={**each.inputs, **{name: inputs[name][i] for name in inputs}})
            for i, each in enumerate(self.sequences)
        )
        return replace(self, sequences=sequences)


def pack_replica(
    replica: ReplicaPlan | None,
    rank: int,
    sequence_of: Callable[[int], tuple[Tokens, Weights]],
) -> list[PackedShare]:
    """A rank's part of each micro-batch of its replica, on the host; nothing where it is idle.

    Args:
        replica: the rank's, of a plan.
        rank: this one.
        sequence_of: tokens and weights, (length + 1,) each, by place in the global batch.
    """
    if replica is None:
        return []
    position = replica.replica.position_of(rank)
    assert position is not None
    packed = []
    for micro_batch in replica.micro_batches:
        share = micro_batch.share_of(position.cp, replica.scheme.cp)
        found = [sequence_of(place) for place in share.sequences]
        part = pack(
            [tokens for tokens, _ in found],
            replica.scheme.tp,
            weights=[weights for _, weights in found],
            context_size=share.group.size,
            context_rank=position.cp - share.group.offset,
            row_tokens=share.row_tokens or 1,
            allow_empty=True,
        )
        packed.append((part, share.sequences))
    return packed


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch on the job's device; a copy to a GPU overlaps compute."""
    if device.type != "cuda":
        return batch
    return batch.pinned().to(device, non_blocking=True)
