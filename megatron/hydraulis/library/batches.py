"""Sequences, the plans of a batch, and what a rank packs of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.data.dataset import Weights, checked_weights
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import ConfigurationError, DataError
from megatron.hydraulis.planner.plan import IterationPlan, PlanText
from megatron.hydraulis.runtime.process_groups import of_all_ranks, on_all_ranks
from megatron.hydraulis.strategy import Pool

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
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
        tokens = _array(self.tokens, "tokens")
        if tokens.ndim != 1 or len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"a sequence is a row of at least 2 token ids but has shape {tokens.shape} and "
                f"dtype {tokens.dtype}; give whole numbers"
            )
        object.__setattr__(self, "tokens", tokens.astype(np.int64))
        given = np.ones(len(tokens)) if self.weights is None else _array(self.weights, "weights")
        weights = checked_weights(given, len(tokens), "a sequence")
        object.__setattr__(self, "weights", weights)
        if not isinstance(self.inputs, Mapping):
            raise DataError(
                f"inputs are tensors by name but these are {self.inputs!r:.60}; give a dict"
            )
        inputs = {name: _tensor(value, name) for name, value in self.inputs.items()}
        for name, value in inputs.items():
            if value.dim() < 1 or len(value) != len(tokens):
                raise DataError(
                    f"an input has one entry per token but '{name}' has shape "
                    f"{tuple(value.shape)} for {len(tokens)} tokens; give {len(tokens)}"
                )
        object.__setattr__(self, "inputs", inputs)

    def __repr__(self) -> str:
        trained = int(np.count_nonzero(self.weights[1:]))
        inputs = f", inputs {', '.join(self.inputs)}" if self.inputs else ""
        return f"<TokenSequence: {len(self.tokens):,} tokens, {trained:,} trained{inputs}>"

    @property
    def length(self) -> int:
        """Tokens to predict, which time and memory follow."""
        return len(self.tokens) - 1


def _array(values: Any, what: str) -> npt.NDArray[Any]:
    """One number per token; raises DataError."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} must be a row of numbers but: {error}; correct them") from error
    if found.dtype.kind not in "biuf" and found.size:
        raise DataError(
            f"{what} must be real numbers but are {found.dtype}, such as {found.flat[0]!r:.60}; "
            "correct them"
        )
    return found


def _tensor(value: Any, name: str) -> torch.Tensor:
    """An input of a sequence; raises DataError."""
    try:
        return torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"the input '{name}' must be a tensor but: {error}; convert it") from error


def as_sequences(
    given: Sequence[Any], vocab_size: int, max_length: int | None = None
) -> tuple[TokenSequence, ...]:
    """Checked sequences from `TokenSequence`s or plain rows of token ids.

    Raises:
        DataError: a sequence is wrong, or has a token id outside of the vocabulary.
        ConfigurationError: there is no sequence, or they do not all have the same inputs, with the
            same dtypes and shapes.
    """
    if not len(given):
        raise ConfigurationError("a batch has at least 1 sequence but has 0; give some")
    sequences: list[TokenSequence] = []
    for number, each in enumerate(given):
        try:
            sequence = each if isinstance(each, TokenSequence) else TokenSequence(each)
        except DataError as error:
            raise DataError(f"sequence {number}: {error}") from error
        if max_length is not None and sequence.length > max_length:
            raise DataError(
                f"sequence {number}: the model has {max_length} positions, the "
                f"max_position_embeddings of its config.json, but {sequence.length} tokens are to "
                "be predicted; cut the sequence"
            )
        lowest, highest = int(sequence.tokens.min()), int(sequence.tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise DataError(
                f"sequence {number}: token ids lie in [0, {vocab_size}) but there is "
                f"{lowest if lowest < 0 else highest}; use the model's tokenizer"
            )
        sequences.append(sequence)
    return _with_same_inputs(sequences)


def _with_same_inputs(sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    """The sequences, if their inputs can be put in one row."""
    first = sequences[0].inputs
    for number, each in enumerate(sequences):
        if each.inputs.keys() != first.keys():
            raise ConfigurationError(
                f"all sequences have the same inputs but sequence 0 has {sorted(first)} and "
                f"sequence {number} has {sorted(each.inputs)}; give each input to all of them"
            )
        for name, value in each.inputs.items():
            if (here := entry_of(value)) != (expected := entry_of(first[name])):
                raise ConfigurationError(
                    "an input has entries of one dtype and shape in all sequences but those of "
                    f"'{name}' are {expected} in sequence 0 and {here} in sequence {number}; "
                    "convert them"
                )
    return tuple(sequences)


def entry_of(value: torch.Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape[1:])}"


def digest_of(sequences: Sequence[TokenSequence]) -> str:
    """Digest that is equal for equal tokens, weights and inputs in the same order."""
    digest = hashlib.sha256()
    for each in sequences:
        digest.update(len(each.tokens).to_bytes(8, "little"))
        digest.update(each.tokens.tobytes())
        digest.update(each.weights.tobytes())
        for name, value in sorted(each.inputs.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Sequences with their plans: one for each mini-batch, in the order of the sequences.

    Passes over one batch run the same plans. Iterating gives the mini-batches.
    """

    sequences: tuple[TokenSequence, ...]
    """They are in the caller's order; with ``scatter`` those of all ranks, in theirs."""
    plans: tuple[IterationPlan, ...]
    """One for each mini-batch, a run of consecutive sequences."""
    own: range
    """The sequences that this rank gave, whose outputs it gets."""
    is_scattered: bool = False
    """Whether every rank gave its share of them."""

    def __repr__(self) -> str:
        tokens = sum(len(each.tokens) for each in self.sequences)
        return (
            f"<Batch: {len(self.sequences):,} sequences, {tokens:,} tokens, planned in "
            f"{', '.join(plan.strategy for plan in self.plans)}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        first = 0
        for plan in self.plans:
            stop = first + len(plan.lengths)
            own = range(max(first, self.own.start) - first, min(stop, self.own.stop) - first)
            yield replace(self, sequences=self.sequences[first:stop], plans=(plan,), own=own)
            first = stop

    def with_inputs(self, **inputs: Sequence[Any]) -> Batch:
        """The same batch, with tensors for the loss: for each sequence one of (n, ...).

        Every rank gives those of all sequences. With ``scatter`` it gives those of its own, by the
        same names as the others; the call is collective then.

        Raises:
            DataError: another number of sequences or tokens.
            ConfigurationError: dtypes or shapes differ between sequences, or names between ranks.
        """
        if self.is_scattered:
            shares = of_all_ranks(
                on_all_ranks(lambda: _tensors(inputs, len(self.own)), "inputs cannot be read")
            )
            check_same([sorted(share) for share in shares], "names of inputs", "give them to all")
            inputs = {name: [v for share in shares for v in share[name]] for name in inputs}
        else:
            inputs = _tensors(inputs, len(self.sequences))
        return replace(
            self,
            sequences=_with_same_inputs(
                [
                    replace(
                        each, inputs={**each.inputs, **{name: inputs[name][i] for name in inputs}}
                    )
                    for i, each in enumerate(self.sequences)
                ]
            ),
        )


def _tensors(
    inputs: Mapping[str, Sequence[Any]], num_sequences: int
) -> dict[str, Sequence[torch.Tensor]]:
    """The inputs on the host, where rows are packed."""
    for name, values in inputs.items():
        if not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
            raise DataError(
                f"an input has one tensor per sequence but '{name}' is {values!r:.60}; give a list "
                f"of {num_sequences}"
            )
        if len(values) != num_sequences:
            raise DataError(
                f"an input has one tensor per sequence but '{name}' has {len(values)} for "
                f"{num_sequences} sequences; give {num_sequences}"
            )
    return {
        name: [_tensor(value, name).detach().cpu() for value in values]
        for name, values in inputs.items()
    }


def check_same(of_ranks: Sequence[Any], what: str, fix: str) -> None:
    """Raise ConfigurationError unless all ranks have given what rank 0 has.

    Args:
        of_ranks: by rank, from `of_all_ranks`.
        what: what they are, for the message.
        fix: how to correct it, for the message.
    """
    others = [rank for rank, each in enumerate(of_ranks) if each != of_ranks[0]]
    if others:
        raise ConfigurationError(
            f"every rank gives the same {what} but ranks {others} have others than rank 0; {fix}"
        )


@dataclass(frozen=True)
class RankShare:
    """A rank's share of a plan: nothing where it is idle."""

    strategy: str
    micro_batches: tuple[PackedBatch, ...]
    """They are on the job's device; where its replica has cp > 1, the rank's own part of each."""
    places: tuple[tuple[int, ...], ...]
    """The sequences of the batch that are in the row of each micro-batch."""

    @classmethod
    def of(
        cls,
        plan: IterationPlan,
        rank: int,
        device: torch.device,
        sequence_of: Callable[[int], TokenSequence],
        no_inputs: Mapping[str, torch.Tensor] | None = None,
        num_predictions: int = 0,
    ) -> RankShare:
        """The rank's share of a plan.

        Args:
            device: of the job. A copy to a GPU overlaps compute.
            sequence_of: by place in the batch; called for sequences of this rank's rows alone.
            no_inputs: (0, ...) tensors, by the names of the sequences' inputs; None without any.
            num_predictions: layers of multi-token prediction.
        """
        replica = plan.replica_of(rank)
        if replica is None:
            return cls(plan.strategy, (), ())
        position = replica.replica.position_of(rank)
        assert position is not None
        micro_batches, places = [], []
        for micro_batch in replica.micro_batches:
            share = micro_batch.share_of(position.cp, replica.scheme.cp)
            found = [sequence_of(place) for place in share.sequences]
            part = pack(
                [each.tokens for each in found],
                replica.scheme.tp,
                weights=[each.weights for each in found],
                context_size=share.group.size,
                context_rank=position.cp - share.group.offset,
                row_tokens=share.row_tokens or 1,
                allow_empty=True,
                num_predictions=num_predictions,
            )
            if no_inputs:
                part = part.with_inputs(
                    {
                        name: [each.inputs[name] for each in found] or [none]
                        for name, none in no_inputs.items()
                    }
                )
            if device.type == "cuda":
                part = part.pinned().to(device, non_blocking=True)
            micro_batches.append(part)
            places.append(share.sequences)
        return cls(plan.strategy, tuple(micro_batches), tuple(places))


def checked_plan(
    text: PlanText, lengths: Sequence[int], pool: Pool, limits: Limits
) -> IterationPlan:
    """The plan that rank 0 has sent for a batch. Raises PlanError if it breaks a rule."""
    plan = text.parse()
    strategy = pool.strategy(plan.strategy)
    plan.validate(lengths, strategy, partial(limits.max_tokens, strategy))
    return plan
