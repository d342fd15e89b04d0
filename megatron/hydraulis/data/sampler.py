"""Global batches of sequences, cut by number of sequences or by a budget of tokens.

What is drawn depends on the lengths and the seed alone, never on ranks or strategies.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.errors import ConfigurationError, DataError

MAX_WAITING_SEQUENCES = 16
"""Number of sequences that may wait for the next batch, under a token budget.

The batch is closed when it is reached. A larger number fills batches better but moves long
sequences further from their place in the order."""

_SUMMED_AT_ONCE = 1 << 24
"""Lengths that are summed at once: 128 MiB in float64."""

EVALUATION_SEED = 0
"""Seed of the order of evaluation, whatever ``--seed`` is.

The order is shuffled because neighbours in a dataset are often pieces of the same few files, and
does not depend on ``--seed``, so that runs with different seeds can be compared."""


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of one iteration."""

    sequence_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    """Trained tokens of each sequence."""

    def __post_init__(self) -> None:
        if len(self.sequence_ids) != len(self.lengths):
            raise ValueError(
                f"{len(self.sequence_ids)} sequence ids but {len(self.lengths)} lengths"
            )

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How many sequences, or at most how many tokens, each global batch of a run holds.

    The size of a batch follows from what the batches before it consumed, so that it is the same on
    every rank, under every strategy and after a restart.
    """

    steps: tuple[tuple[int, int], ...]
    """(number consumed, size from then on), both ascending, beginning with 0 consumed."""
    in_tokens: bool = False
    """Whether tokens are counted, instead of sequences."""
    drops_partial: bool = False
    """Whether training ends before a batch that would lead beyond its end."""

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0][0] != 0 or self.steps[0][1] < 1:
            raise ConfigurationError(
                f"sizes of global batches begin with 0 {self.unit} consumed and are at least 1 but "
                f"are {self.steps}; correct the first step"
            )
        for (before, smaller), (consumed, size) in itertools.pairwise(self.steps):
            if consumed <= before or size <= smaller:
                raise ConfigurationError(
                    f"a global batch grows with what is consumed but holds {smaller:,} {self.unit} "
                    f"from {before:,} consumed on and {size:,} from {consumed:,} on; list both in "
                    "ascending order"
                )

    @classmethod
    def constant(cls, *, num_sequences: int | None = None, num_tokens: int | None = None) -> Self:
        """One size for the whole run: one of the two."""
        if (num_sequences is None) == (num_tokens is None):
            given = "neither" if num_tokens is None else "both"
            raise ConfigurationError(
                f"a global batch is measured in sequences or in tokens but {given} of "
                "--global-batch-size and --global-batch-tokens is given; give one"
            )
        if num_sequences is not None and num_sequences < 1:
            raise ConfigurationError(
                f"a global batch has at least 1 sequence but --global-batch-size is "
                f"{num_sequences}; raise it"
            )
        in_tokens = num_tokens is not None
        size = num_sequences or num_tokens or 0
        return cls(((0, size),), in_tokens, drops_partial=not in_tokens)

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.in_tokens else "sequences"

    @property
    def smallest(self) -> int:
        """The first size."""
        return self.steps[0][1]

    @property
    def largest(self) -> int:
        """The last size."""
        return self.steps[-1][1]

    @property
    def number_varies(self) -> bool:
        """Whether batches may differ in their number of sequences."""
        return self.in_tokens or len(self.steps) > 1

    def text(self, mean_length: float, seq_length: int | None) -> str:
        """The size of a global batch here and in Megatron, which counts rows of seq_length tokens.

        mean_length: of the corpus's sequences, in tokens.
        """
        size = self.largest
        if self.in_tokens:
            text = f"{size:,} tokens, about {size / mean_length:,.0f} sequences"
        else:
            text = f"{size:,} sequences, about {size * mean_length:,.0f} tokens"
        if seq_length is not None and self.in_tokens:
            rows = max(size // seq_length, 1)
            text += f"; Megatron takes as many with --global-batch-size {rows}"
        elif seq_length is not None:
            text += (
                f"; Megatron takes {size:,} rows of {seq_length:,} tokens, which is "
                f"--global-batch-tokens {size * seq_length} here"
            )
        if len(self.steps) == 1:
            return text
        return (
            f"{text}; it begins with {self.smallest:,} and grows {len(self.steps) - 1} times, last "
            f"after {self.steps[-1][0]:,} {self.unit}"
        )

    def num_consumed(self, batch: GlobalBatch) -> int:
        """What a batch consumes, in the unit of the sizes."""
        return batch.num_tokens if self.in_tokens else batch.num_sequences

    def after(self, num_consumed: int) -> int:
        """The size of the batch that follows this number of consumed sequences or tokens."""
        return self.steps[bisect.bisect_right(self.steps, num_consumed, key=lambda s: s[0]) - 1][1]

    def num_consumed_by(self, num_batches: int) -> int:
        """What the first batches consume; in tokens at most, because they are not quite full."""
        num_consumed = 0
        ends = [consumed for consumed, _ in self.steps[1:]] + [num_batches * self.largest]
        for end, (_, size) in zip(ends, self.steps, strict=True):
            num_here = min(num_batches, max(-(-(end - num_consumed) // size), 0))
            num_consumed += num_here * size
            num_batches -= num_here
        return num_consumed

    def num_batches(self, num_consumed: int, until: int) -> int:
        """Batches of training that ends when `until` are consumed.

        Exact in sequences; in tokens a lower bound, because batches are not quite full.
        """
        num_batches = 0
        ends = [consumed for consumed, _ in self.steps[1:]] + [until]
        for end, (_, size) in zip(ends, self.steps, strict=True):
            num_full = -(-(min(end, until) - num_consumed) // size)
            if self.drops_partial:
                num_full = min(num_full, (until - num_consumed) // size)
            num_full = max(num_full, 0)
            num_batches += num_full
            num_consumed += num_full * size
        return num_batches


@dataclass(frozen=True)
class SequenceGroup:
    """A run of sequence ids that are shuffled among themselves: one dataset of a corpus."""

    first_sequence: int
    num_sequences: int
    weight: float
    """Share of the draws, in any unit, the same for all groups. Whole numbers are counted exactly,
    fractions to float64's precision."""

    def __post_init__(self) -> None:
        if self.num_sequences < 1 or not self.weight > 0:
            raise ConfigurationError(
                f"a group needs sequences and a positive weight but has {self.num_sequences} "
                f"sequences and weight {self.weight}; remove it"
            )


class LengthSampler:
    """Global batches for training, shuffled in a new order every epoch.

    Args:
        lengths: (num_sequences,) trained tokens of each sequence.
        groups: the corpus's datasets and weights, which partition the sequences.
        seed: seed of the order, at least 0.
        sizes: of the batches. A sequence that does not fit in a budget of tokens waits for the next
            batch, in order; when ``MAX_WAITING_SEQUENCES`` wait, the batch is closed.
        num_consumed_sequences: by another program, before the first batch.
        num_consumed_tokens: likewise.
        long_sequence_window: most batches that a sequence longer than `usual_tokens` is held, so
            that long ones share a batch, after the idea of WLB-LLM (arXiv 2503.17924). They begin
            the next batch when the first was held so long, or no more fit in a batch. 0 for none.

    Raises:
        ConfigurationError: a sequence longer than the smallest budget.
        DataError: no sequences.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer[Any]],
        groups: Sequence[SequenceGroup],
        *,
        seed: int,
        sizes: BatchSizes,
        num_consumed_sequences: int = 0,
        num_consumed_tokens: int = 0,
        long_sequence_window: int = 0,
    ) -> None:
        self._order = SequenceOrder(groups, seed=seed)
        longest = int(lengths.max())
        if sizes.in_tokens and longest > sizes.smallest:
            raise ConfigurationError(
                f"a global batch must hold the longest sequence: {longest} tokens are more than "
                f"--global-batch-tokens {sizes.smallest}; raise it, or lower --seq-length "
                f"with --long-sequences split, truncate or drop"
            )
        self._lengths = lengths
        self._shortest = int(lengths.min())
        self._longest = longest
        self._sizes = sizes
        self._window = long_sequence_window
        self.usual_tokens = usual_tokens(lengths, groups) if long_sequence_window else math.inf
        """A longer sequence may wait for others."""
        self._waiting: list[int] = []
        self._held: list[int] = []
        """Long sequences, in the order in which they were drawn."""
        self._held_since = 0
        """Number of the batch for which the first of them was drawn."""
        self._num_batches = 0
        self._num_sequences = num_consumed_sequences
        self._num_tokens = num_consumed_tokens

    @property
    def num_held(self) -> int:
        return len(self._held)

    def next_batch(self) -> GlobalBatch:
        """The next global batch; never empty."""
        in_tokens = self._sizes.in_tokens
        size = self._sizes.after(self._num_tokens if in_tokens else self._num_sequences)
        takes_held = self._takes_held(size)
        if takes_held:
            self._waiting = [*self._held, *self._waiting]
            self._held = []
        fill = self._fill if in_tokens else self._take
        ids = fill(size, holds=not takes_held)
        batch = GlobalBatch(tuple(ids), tuple(int(self._lengths[i]) for i in ids))
        self._num_batches += 1
        self._num_sequences += batch.num_sequences
        self._num_tokens += batch.num_tokens
        return batch

    def _takes_held(self, size: int) -> bool:
        """Whether the next batch begins with the long sequences that are held."""
        if not self._held:
            return False
        is_due = self._num_batches - self._held_since >= self._window
        # Those of a run with larger batches may be more than one batch holds.
        return is_due or self._held_size() + self._size_of(self._longest) > size

    def _hold(self, sequence_id: int, size: int) -> bool:
        """Hold a sequence for a later batch if it is long and fits in one with those held."""
        length = int(self._lengths[sequence_id])
        if length <= self.usual_tokens:
            return False
        if self._held_size() + self._size_of(length) > size:
            return False
        if not self._held:
            self._held_since = self._num_batches
        self._held.append(sequence_id)
        return True

    def _held_size(self) -> int:
        return sum(self._size_of(int(self._lengths[i])) for i in self._held)

    def _size_of(self, length: int) -> int:
        """What a sequence counts in a batch."""
        return length if self._sizes.in_tokens else 1

    def _take(self, num_sequences: int, *, holds: bool) -> list[int]:
        # A checkpoint written under a token budget may leave sequences waiting.
        ids, self._waiting = self._waiting[:num_sequences], self._waiting[num_sequences:]
        while len(ids) < num_sequences:
            sequence_id = self._order.draw()
            if not (holds and self._hold(sequence_id, num_sequences)):
                ids.append(sequence_id)
        return ids

    def _fill(self, num_budget_tokens: int, *, holds: bool) -> list[int]:
        """Fill a batch first fit: those that waited, oldest first, then new ones.

        Without a window, the oldest waiting sequence always finds the batch empty; with one, after
        a batch that begins with long ones. So none waits forever and the queue is never full at the
        start.
        """
        ids: list[int] = []
        waiting: list[int] = []
        room = num_budget_tokens
        candidates = iter(self._waiting)
        while room >= self._shortest and len(waiting) < MAX_WAITING_SEQUENCES:
            sequence_id = next(candidates, None)
            is_new = sequence_id is None
            if sequence_id is None:
                sequence_id = self._order.draw()
            length = int(self._lengths[sequence_id])
            if is_new and (holds or length > room) and self._hold(sequence_id, num_budget_tokens):
                continue
            if length <= room:
                ids.append(sequence_id)
                room -= length
            else:
                waiting.append(sequence_id)
        self._waiting = [*waiting, *candidates]
        return ids

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler, as plain numbers.

        Planning runs ahead of training: take the state after each ``next_batch`` and save the one
        taken after the batch that was trained last.
        """
        return {
            "order": self._order.state_dict(),
            "waiting": list(self._waiting),
            "held": list(self._held),
            "held_since": self._held_since,
            "num_batches": self._num_batches,
            "num_sequences": self._num_sequences,
            "num_tokens": self._num_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, counts_only: bool = False) -> None:
        """Continue where ``state_dict`` was taken; the batch size may have changed.

        Args:
            state: from ``state_dict``.
            counts_only: of other data: begin with the first sequence, but count on.

        Raises:
            ConfigurationError: the state was written under another seed.
            DataError: the state belongs to another corpus.
        """
        if not counts_only:
            self._order.load_state_dict(state["order"])
            self._waiting = [int(i) for i in state["waiting"]]
            # Earlier versions held none.
            self._held = [int(i) for i in state.get("held", ())]
            self._held_since = int(state.get("held_since", 0))
        self._num_batches = int(state["num_batches"])
        # Earlier versions, whose batches did not grow, wrote neither.
        self._num_sequences = int(state.get("num_sequences", 0))
        self._num_tokens = int(state.get("num_tokens", 0))


def usual_tokens(lengths: npt.NDArray[np.integer[Any]], groups: Sequence[SequenceGroup]) -> float:
    """Length of the sequence that a token is in, mean over the tokens that are drawn: Σs²/Σs.

    Longer sequences are long. That follows from the data alone, as the order of the sequences must
    not depend on strategies or ranks; where all are equally long, none is.
    """
    num_tokens = num_squares = 0.0
    for group in groups:
        end = group.first_sequence + group.num_sequences
        for first in range(group.first_sequence, end, _SUMMED_AT_ONCE):
            part = lengths[first : min(first + _SUMMED_AT_ONCE, end)].astype(np.float64)
            num_tokens += float(part.sum()) * group.weight / group.num_sequences
            num_squares += float(part @ part) * group.weight / group.num_sequences
    return num_squares / num_tokens


class EvaluationSampler(LengthSampler):
    """Global batches for evaluation, shuffled like those for training but by ``EVALUATION_SEED``.

    Arguments as for ``LengthSampler``, without a seed.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer[Any]],
        groups: Sequence[SequenceGroup],
        *,
        sizes: BatchSizes,
    ) -> None:
        super().__init__(lengths, groups, seed=EVALUATION_SEED, sizes=sizes)
        self._start = self.state_dict()

    def reset(self) -> None:
        """Return to the first batch: every evaluation sees the same data."""
        self.load_state_dict(self._start)


class SequenceOrder:
    """An endless stream of sequence ids, blended over groups, each group epoch after epoch.

    Args:
        groups: the datasets of the corpus with their weights.
        seed: seed of the shuffling, at least 0.

    Raises:
        ConfigurationError: a negative seed.
        DataError: no groups.
    """

    def __init__(self, groups: Sequence[SequenceGroup], *, seed: int) -> None:
        if not groups:
            raise DataError(
                "a sampler needs at least one sequence but the corpus holds 0; check the "
                "documents, --split and --long-sequences"
            )
        if seed < 0:
            raise ConfigurationError(f"a seed is at least 0 but is {seed}; set --seed")
        self._groups = tuple(groups)
        self._weights = tuple(group.weight for group in groups)
        self._seed = seed
        self._num_drawn = [0] * len(groups)
        self._permutations: dict[int, tuple[int, npt.NDArray[np.integer[Any]]]] = {}

    def draw(self) -> int:
        chosen = largest_deficit(self._weights, self._num_drawn) if len(self._groups) > 1 else 0
        group = self._groups[chosen]
        epoch, position = divmod(self._num_drawn[chosen], group.num_sequences)
        self._num_drawn[chosen] += 1
        return group.first_sequence + self._shuffled(chosen, epoch, position)

    def _shuffled(self, group: int, epoch: int, position: int) -> int:
        cached = self._permutations.get(group)
        if cached is None or cached[0] != epoch:
            size = self._groups[group].num_sequences
            cached = (epoch, epoch_permutation(self._seed, group, epoch, size))
            self._permutations[group] = cached
        return int(cached[1][position])

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream, as plain numbers."""
        return {
            "seed": self._seed,
            "groups": [
                {
                    "num_sequences": group.num_sequences,
                    "epoch": drawn // group.num_sequences,
                    "position": drawn % group.num_sequences,
                }
                for group, drawn in zip(self._groups, self._num_drawn, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ConfigurationError: the state was written under another seed.
            DataError: the state belongs to another corpus.
        """
        check_seed(state["seed"], self._seed)
        saved = [int(group["num_sequences"]) for group in state["groups"]]
        here = [group.num_sequences for group in self._groups]
        if saved != here:
            raise DataError(
                f"the checkpoint was written for datasets of {saved} sequences but this run has "
                f"{here}; resume with the same data, --seq-length, --split and --long-sequences"
            )
        self._num_drawn = [
            int(group["epoch"]) * size + int(group["position"])
            for group, size in zip(state["groups"], here, strict=True)
        ]


def check_seed(saved: int, here: int) -> None:
    """Raise ConfigurationError if a checkpoint was written under another seed."""
    if saved != here:
        raise ConfigurationError(
            f"the order of the data depends on the seed: the checkpoint was written with seed "
            f"{saved} but this run has {here}; resume with --seed {saved}"
        )


def epoch_permutation(
    seed: int, group: int, epoch: int, num_sequences: int
) -> npt.NDArray[np.integer[Any]]:
    """(num_sequences,) order of one group in one epoch; uint32 if that is enough.

    Sorts raw Philox output: NumPy keeps bit generators and ``SeedSequence`` stable over versions,
    but not ``Generator.permutation``, and a run must resume after an upgrade.
    """
    source = np.random.Philox(np.random.SeedSequence([seed, group, epoch]))
    order = np.argsort(source.random_raw(num_sequences), kind="stable")
    return order.astype(np.uint32) if num_sequences <= 1 << 32 else order


def largest_deficit(weights: Sequence[float], num_drawn: Sequence[int]) -> int:
    """The group that is furthest behind its share; the first of equal ones.

    After every draw each group has been drawn more than ``share·total − 1`` times, so that the
    mix holds over any stretch, not just on average. It is the rule of Megatron's ``BlendedDataset``
    (``build_blending_indices`` in megatron/core/datasets/helpers.cpp), multiplied by the sum of the
    weights, which keeps whole-number weights exact.
    """
    total_weight = sum(weights)
    total_drawn = max(1, sum(num_drawn))
    deficits = [
        weight * total_drawn - drawn * total_weight
        for weight, drawn in zip(weights, num_drawn, strict=True)
    ]
    return deficits.index(max(deficits))
