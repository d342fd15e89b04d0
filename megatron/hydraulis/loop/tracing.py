"""``--trace``: writes measured and planned spans of the traced iterations of one rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.observability.trace import (
    BarrierStamps,
    ClockOffset,
    Span,
    TraceWindow,
    TraceWriter,
    clock_offsets,
    merge_trace,
    rank_file,
    rank_files,
)
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.runtime.process_groups import of_all_ranks
from megatron.hydraulis.runtime.spans import (
    ALL_TRACKS,
    NO_TRACKS,
    REGROUP,
    CudaClock,
    MemoryRecorder,
)

NUM_BARRIERS = 8
"""Barriers to compare clocks by; each can only narrow the bounds."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NS_PER_US = 1e3


class RunTrace:
    """The trace of this rank.

    Collective: construction compares the clocks of all ranks.

    Args:
        folder: of the trace; shared by the ranks, or the merged file holds those of rank 0's node.
        window: iterations to trace; the first ones of the run if None.

    Raises:
        HydraulisError: the file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        window: TraceWindow | None,
        cost_model: CostModel,
        *,
        has_cuda: bool,
    ) -> None:
        self._folder = folder
        self._window = window
        self._cost_model = cost_model
        self._rank = dist.get_rank()
        self._clock, self._epoch_ns = _compare_clocks()
        self._is_traced = False
        self._writer = TraceWriter(rank_file(folder, self._rank))
        self.spans = MemoryRecorder(CudaClock() if has_cuda else None)
        """Records the work of engine and data, in traced iterations only."""
        self.spans.tracks = NO_TRACKS

    def expect(self, iteration: int) -> None:
        """Record from now on if this iteration, which is about to begin, is traced."""
        if self._window is None:
            self._window = TraceWindow.starting_at(iteration)
        self._is_traced = iteration in self._window
        self.spans.tracks = ALL_TRACKS if self._is_traced else NO_TRACKS
        self.spans.common_detail = {"iteration": iteration}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Records regrouping alone, as micro-batches of an evaluation belong to no iteration."""
        before = self.spans.tracks
        self.spans.tracks = before & {REGROUP}
        yield
        self.spans.tracks = before

    @contextmanager
    def iteration(self, iteration: int, plan: IterationPlan) -> Iterator[None]:
        """Writes the spans of the work inside at its end."""
        if not self._is_traced:
            yield
            return
        start_ns = time.perf_counter_ns()
        yield
        end_ns = time.perf_counter_ns()
        self._write(iteration, plan, start_ns, end_ns)
        assert self._window is not None
        # Not earlier: gathers for the next iteration may begin between two traced ones.
        if iteration == self._window.last:
            self.spans.tracks = NO_TRACKS
            self._writer.close()

    def close(self) -> None:
        """End this rank's file."""
        self._writer.close()

    def merge(self) -> None:
        """Merge the files of all ranks, which have closed them; called on one rank."""
        merged = merge_trace(self._folder)
        num_ranks, num_files = dist.get_world_size(), len(rank_files(self._folder))
        missing = "" if num_files == num_ranks else f", of {num_files} of {num_ranks} ranks"
        print(f"trace: {merged}{missing}; open it at https://ui.perfetto.dev", flush=True)

    def _write(self, iteration: int, plan: IterationPlan, start_ns: int, end_ns: int) -> None:
        detail: dict[str, int | str] = {"iteration": iteration, "strategy": plan.strategy}
        if self._clock.error_ns:
            detail["clock_error_ns"] = self._clock.error_ns
        start_us = self._on_axis_us(start_ns)
        whole = Span(
            rank=self._rank,
            track="iteration",
            name="iteration",
            start_us=start_us,
            end_us=self._on_axis_us(end_ns),
            detail=detail,
        )
        measured = [
            Span(
                rank=self._rank,
                track=span.track,
                name=span.name,
                start_us=self._on_axis_us(span.start_ns),
                end_us=self._on_axis_us(span.end_ns),
                detail=span.detail,
            )
            for span in self.spans.take()
        ]
        from megatron.hydraulis.planner.planned import planned_spans  # slow to import

        planned = planned_spans(
            plan, self._cost_model, rank=self._rank, iteration=iteration, start_us=start_us
        )
        self._writer.write([whole, *measured, *planned])

    def _on_axis_us(self, time_ns: int) -> float:
        return (time_ns - self._clock.offset_ns - self._epoch_ns) / _NS_PER_US


def _compare_clocks() -> tuple[ClockOffset, int]:
    """Collective: this rank's clock against rank 0's, and rank 0's time when the trace begins."""
    before_ns, after_ns = [], []
    for _ in range(NUM_BARRIERS):
        before_ns.append(time.perf_counter_ns())
        dist.barrier()
        after_ns.append(time.perf_counter_ns())
    own = BarrierStamps(_clock_name(), tuple(before_ns), tuple(after_ns))
    stamps = of_all_ranks(own)
    return clock_offsets(stamps)[dist.get_rank()], stamps[0].after_ns[-1]


def _clock_name() -> str:
    """Name of the clock: on Linux ``time.perf_counter`` counts from the boot of the machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
