"""Global batches of sequences, cut by number of sequences or by a budget of tokens.

What is drawn depends on the lengths and the seed alone, never on ranks or strategies.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.blend import SequenceGroup
from megatron.hydraulis.data.order import SequenceOrder
from megatron.hydraulis.errors import ConfigurationError

__all__ = [
    "EVALUATION_SEED",
    "MAX_WAITING_SEQUENCES",
    "EvaluationSampler",
    "GlobalBatch",
    "LengthSampler",
]

MAX_WAITING_SEQUENCES = 16
"""Sequences that may wait for the next batch under a token budget before the batch is closed.

More of them fill batches better but move long sequences further from their place in the order."""

EVALUATION_SEED = 0
"""Seed of the order of evaluation, whatever ``--seed`` is.

Shuffled, for neighbours in a dataset are often pieces of the same few files, and a short evaluation
would see little else; always alike, so that losses compare between runs of different seeds."""


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


class _BatchSampler:
    """Cuts a stream of sequences into global batches; see the two public subclasses."""

    def __init__(
        self,
        lengths: npt.NDArray[np.integer[Any]],
        order: SequenceOrder,
        *,
        global_batch_size: int | None,
        global_batch_tokens: int | None,
    ) -> None:
        if (global_batch_size is None) == (global_batch_tokens is None):
            raise ConfigurationError(
                f"a global batch is measured in sequences or in tokens but --global-batch-size is "
                f"{global_batch_size} and --global-batch-tokens {global_batch_tokens}; give one"
            )
        if global_batch_size is not None and global_batch_size < 1:
            raise ConfigurationError(
                f"a global batch has at least 1 sequence but --global-batch-size is "
                f"{global_batch_size}; raise it"
            )
        longest = int(lengths.max())
        if global_batch_tokens is not None and longest > global_batch_tokens:
            raise ConfigurationError(
                f"a global batch must hold the longest sequence: {longest} tokens are more than "
                f"--global-batch-tokens {global_batch_tokens}; raise it, or lower --seq-length "
                f"with --long-sequences split, truncate or drop"
            )
        self._lengths = lengths
        self._shortest = int(lengths.min())
        self._order = order
        self._size = global_batch_size
        self._num_budget_tokens = global_batch_tokens
        self._waiting: list[int] = []
        self._num_batches = 0

    @property
    def num_batches(self) -> int:
        """Batches handed out so far."""
        return self._num_batches

    @property
    def num_consumed_sequences(self) -> int:
        """Sequences handed out so far; those that wait are not among them."""
        return self._order.num_drawn - len(self._waiting)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epoch that each dataset's next sequence belongs to, from 0."""
        return self._order.epochs

    def next_batch(self) -> GlobalBatch:
        """The next global batch; never empty."""
        if self._size is not None:
            ids = self._take(self._size)
        else:
            assert self._num_budget_tokens is not None
            ids = self._fill(self._num_budget_tokens)
        self._num_batches += 1
        return GlobalBatch(tuple(ids), tuple(int(self._lengths[i]) for i in ids))

    def _take(self, num_sequences: int) -> list[int]:
        # A checkpoint written under a token budget may leave sequences waiting.
        ids, self._waiting = self._waiting[:num_sequences], self._waiting[num_sequences:]
        ids.extend(self._order.draw() for _ in range(num_sequences - len(ids)))
        return ids

    def _fill(self, num_budget_tokens: int) -> list[int]:
        """Fill a batch first fit: those that waited, oldest first, then new ones.

        The oldest waiting sequence always finds the batch empty, so none waits for ever and the
        queue never begins full.
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
        """Where the sampler stands, as plain numbers.

        Planning runs ahead of training: take the state after each ``next_batch`` and save the one
        taken after the batch that was trained last.
        """
        return {
            "order": self._order.state_dict(),
            "waiting": list(self._waiting),
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken; the batch size may have changed.

        Raises:
            ConfigurationError: the state was written under another seed.
            DataError: the state belongs to another corpus.
        """
        self._order.load_state_dict(state["order"])
        self._waiting = [int(i) for i in state["waiting"]]
        self._num_batches = int(state["num_batches"])


class LengthSampler(_BatchSampler):
    """Global batches for training, shuffled anew every epoch.

    Args:
        lengths: (num_sequences,) trained tokens of each sequence.
        groups: the corpus's datasets and weights, which partition the sequences.
        seed: seed of the order, at least 0.
        global_batch_size: sequences a batch; or
        global_batch_tokens: most tokens a batch. A sequence that does not fit waits for the next
            batch, in order; when ``MAX_WAITING_SEQUENCES`` wait, the batch is closed.

    Raises:
        ConfigurationError: both or neither batch size, or a sequence longer than the budget.
        DataError: no sequences.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer[Any]],
        groups: Sequence[SequenceGroup],
        *,
        seed: int,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
    ) -> None:
        super().__init__(
            lengths,
            SequenceOrder(groups, seed=seed),
            global_batch_size=global_batch_size,
            global_batch_tokens=global_batch_tokens,
        )


class EvaluationSampler(_BatchSampler):
    """Global batches for evaluation, shuffled like those for training but by ``EVALUATION_SEED``.

    Arguments as for ``LengthSampler``, without a seed.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.integer[Any]],
        groups: Sequence[SequenceGroup],
        *,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
    ) -> None:
        super().__init__(
            lengths,
            SequenceOrder(groups, seed=EVALUATION_SEED),
            global_batch_size=global_batch_size,
            global_batch_tokens=global_batch_tokens,
        )
        self._start = copy.deepcopy(self.state_dict())

    def reset(self) -> None:
        """Begin again at the first batch, so that every evaluation sees the same data."""
        self.load_state_dict(self._start)
