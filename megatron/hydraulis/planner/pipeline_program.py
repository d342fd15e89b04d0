"""The 1F1B schedule of one pipeline as rows of a linear program.

The recurrence is that of cost_model.pipeline: an operation ends no earlier than its input and the
operation before it on its stage allow.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE

__all__ = ["PipelineColumns"]

FloatArray = NDArray[np.float64]


class PipelineColumns:
    """Columns of the program: works, then ends of forwards, then ends of backwards."""

    def __init__(self, num_stages: int, num_micro_batches: int) -> None:
        self._p = num_stages
        self._v = num_micro_batches
        self.num = num_micro_batches * (1 + 2 * num_stages)
        """Of all of them; the works come first."""

    def forward(self, stage: int, k: int) -> int:
        """Column of the end of a forward, in ms."""
        return self._v * (1 + stage) + k

    def backward(self, stage: int, k: int) -> int:
        """Column of the end of a backward, in ms."""
        return self._v * (1 + self._p + stage) + k

    def total_work(self) -> FloatArray:
        """A row that adds up the works."""
        row = np.zeros(self.num)
        row[: self._v] = 1.0
        return row

    def rows(self, forward_share: float = FORWARD_SHARE) -> list[FloatArray]:
        """A row ``end - end of what comes before - its work >= 0`` for every precedence."""
        rows = []
        for end, before, k, share in self._precedences(forward_share):
            row = np.zeros(self.num)
            row[end] = 1.0
            if before is not None:
                row[before] = -1.0
            row[k] -= share
            rows.append(row)
        return rows

    def ends_ms(
        self, times_ms: Sequence[float], forward_share: float = FORWARD_SHARE
    ) -> FloatArray:
        """Values of all columns for works in ms: everything as early as can be."""
        values = np.zeros(self.num)
        values[: self._v] = times_ms
        precedences = self._precedences(forward_share)
        is_late = True
        while is_late:
            is_late = False
            for end, before, k, share in precedences:
                ready_ms = 0.0 if before is None else values[before]
                if values[end] < ready_ms + share * values[k]:
                    values[end] = ready_ms + share * values[k]
                    is_late = True
        return values

    def _precedences(self, forward_share: float) -> list[tuple[int, int | None, int, float]]:
        """(end of an operation, end of one before it, its micro-batch, its share of the work)."""
        backward_share = 1.0 - forward_share
        found: list[tuple[int, int | None, int, float]] = []
        for stage in range(self._p):
            num_ahead = self._p - 1 - stage
            for k in range(self._v):
                forward, backward = self.forward(stage, k), self.backward(stage, k)
                if stage > 0:
                    found.append((forward, self.forward(stage - 1, k), k, forward_share))
                if k > num_ahead:
                    before = self.backward(stage, k - num_ahead - 1)
                    found.append((forward, before, k, forward_share))
                elif k > 0:
                    found.append((forward, self.forward(stage, k - 1), k, forward_share))
                elif stage == 0:
                    found.append((forward, None, k, forward_share))
                if num_ahead > 0:
                    found.append((backward, self.backward(stage + 1, k), k, backward_share))
                if k + num_ahead < self._v:
                    before = self.forward(stage, k + num_ahead)
                elif k > 0:
                    before = self.backward(stage, k - 1)
                else:
                    before = self.forward(stage, self._v - 1)
                found.append((backward, before, k, backward_share))
        return found
