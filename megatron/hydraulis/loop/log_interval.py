"""What lies between two lines of the log: with ``--log-interval`` n, n iterations."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter

from megatron.hydraulis.observability.records import IterationRecord

AVERAGED = ("imbalance", "iteration_time_s", "plan_time_s", "plan_wait_s", "predicted_time_s")
"""Fields of the record whose mean over the iterations is shown as it is."""

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
"""Fields whose largest value is shown."""


class LogInterval:
    """The iterations since the last line that ended an interval."""

    def __init__(self) -> None:
        self._records: list[IterationRecord] = []
        self._sums: list[tuple[float, float]] = []

    def add(self, record: IterationRecord, lengths: tuple[int, ...]) -> None:
        """Takes note of an iteration and the lengths of its sequences, in tokens."""
        self._records.append(record)
        squares = sum(length * length for length in lengths)
        self._sums.append((float(sum(lengths)), float(squares)))

    def clear(self) -> None:
        """Begin the next interval."""
        self._records.clear()
        self._sums.clear()

    @property
    def last_sums(self) -> tuple[float, float] | tuple[None, None]:
        """(Σ s, Σ s²) of the last iteration."""
        return self._sums[-1] if self._sums else (None, None)

    @property
    def mean_sums(self) -> tuple[float, float] | tuple[None, None]:
        """Means of (Σ s, Σ s²): upstream divides by the mean time of an iteration."""
        if not self._sums:
            return None, None
        tokens, squares = zip(*self._sums, strict=True)
        return statistics.fmean(tokens), statistics.fmean(squares)

    @property
    def mean_record(self) -> IterationRecord | None:
        """The last iteration's record with means for what a line shows of a batch and its plan."""
        if not self._records:
            return None
        num_tokens = sum(record.num_tokens for record in self._records)
        num_padding = sum(record.num_padding for record in self._records)
        num_all = num_tokens + num_padding
        means = {
            name: statistics.fmean(getattr(record, name) for record in self._records)
            for name in AVERAGED
        }
        peaks = {
            name: max(found, default=None)
            for name in PEAKS
            if (found := [n for r in self._records if (n := getattr(r, name)) is not None])
        }
        return dataclasses.replace(
            self._records[-1],
            strategy=self._strategies,
            num_tokens=round(num_tokens / len(self._records)),
            num_sequences=round(statistics.fmean(r.num_sequences for r in self._records)),
            padding_fraction=num_padding / num_all if num_all else 0.0,
            **means,  # type: ignore[arg-type]
            **peaks,  # type: ignore[arg-type]
        )

    @property
    def _strategies(self) -> str:
        """The strategy, or each with the iterations that it ran."""
        counts = Counter(record.strategy for record in self._records)
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{name} ({count})" for name, count in counts.most_common())
