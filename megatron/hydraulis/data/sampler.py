"""Global batches of sequences, cut by number of sequences or by a budget of tokens.

What is drawn depends on the lengths and the seed alone, never on ranks or strategies.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.errors import ConfigurationError, DataError
from megatron.hydraulis.ranges import MAX_DRAWN_SEQUENCES

MAX_WAITING_SEQUENCES = 16
"""Number of sequences that may wait for the next batch, under a token budget.

The batch is closed when it is reached. A larger number fills batches better but moves long
sequences further from their place in the order."""

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

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Number of sequences, or at most of tokens, in each global batch of a run.

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
            given, verb = ("neither", "is") if num_tokens is None else ("both", "are")
            raise ConfigurationError(
                f"a global batch is measured in sequences or in tokens but {given} of "
                f"--global-batch-size and --global-batch-tokens {verb} given; give one"
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
        """Name of the unit that is counted."""
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
        """True if batches may differ in their number of sequences."""
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

    def check_num_drawn(self, num_batches: int, mean_length: float) -> None:
        """Raise ConfigurationError if a command that draws batches would hold too many sequences.

        mean_length: of the corpus's sequences, in tokens.
        """
        num_sequences = num_batches * self.largest / (mean_length if self.in_tokens else 1.0)
        if num_sequences > MAX_DRAWN_SEQUENCES:
            raise ConfigurationError(
                f"at most {MAX_DRAWN_SEQUENCES:,} sequences are drawn but {num_batches:,} batches "
                f"of {self.largest:,} {self.unit} have about {num_sequences:,.0f}; draw fewer or "
                f"smaller batches"
            )

    def num_consumed(self, batch: GlobalBatch) -> int:
        """Amount that a batch consumes, in the unit of the sizes."""
        return batch.num_tokens if self.in_tokens else batch.num_sequences

    def after(self, num_consumed: int) -> int:
        """The size of the batch that follows this number of consumed sequences or tokens."""
        return self.steps[bisect.bisect_right(self.steps, num_consumed, key=lambda s: s[0]) - 1][1]

    def num_consumed_by(self, num_batches: int) -> int:
        """Amount that the first batches consume; at most, in tokens, as they are not quite full."""
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
        self._sizes = sizes
        self._waiting: list[int] = []
        self._num_batches = 0
        self._num_sequences = num_consumed_sequences
        self._num_tokens = num_consumed_tokens

    def next_batch(self) -> GlobalBatch:
        """The next global batch; never empty."""
        in_tokens = self._sizes.in_tokens
        size = self._sizes.after(self._num_tokens if in_tokens else self._num_sequences)
        ids = self._fill(size) if in_tokens else self._take(size)
        batch = GlobalBatch(tuple(ids), tuple(int(self._lengths[i]) for i in ids))
        self._num_batches += 1
        self._num_sequences += batch.num_sequences
        self._num_tokens += batch.num_tokens
        return batch

    def _take(self, num_sequences: int) -> list[int]:
        # A checkpoint written under a token budget may leave sequences waiting.
        ids, self._waiting = self._waiting[:num_sequences], self._waiting[num_sequences:]
        return ids + [self._order.draw() for _ in range(num_sequences - len(ids))]

    def _fill(self, num_budget_tokens: int) -> list[int]:
        """Fill a batch first fit: those that waited, oldest first, then new ones.

        The oldest waiting sequence always finds the batch empty, so that none waits forever.
        """
        ids: list[int] = []
        waiting: list[int] = []
        room = num_budget_tokens
        candidates = iter(self._waiting)
        while room >= self._shortest and len(waiting) < MAX_WAITING_SEQUENCES:
            sequence_id = next(candidates, None)
            if sequence_id is None:
                sequence_id = self._order.draw()
            length = int(self._lengths[sequence_id])
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
            # Earlier versions could also hold long sequences until others came.
            self._waiting = [int(i) for i in (*state.get("held", ()), *state["waiting"])]
        self._num_batches = int(state["num_batches"])
        # Earlier versions, whose batches did not grow, wrote neither.
        self._num_sequences = int(state.get("num_sequences", 0))
        self._num_tokens = int(state.get("num_tokens", 0))


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
