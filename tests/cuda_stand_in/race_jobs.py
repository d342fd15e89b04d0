"""Jobs whose streams are checked for races, and our waits, which can be removed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock, patch

import torch

from megatron.hydraulis.checkpoint.saving import CheckpointSaver
from megatron.hydraulis.runtime import track
from megatron.hydraulis.runtime.passes import StallTimer
from tests.cuda_stand_in.device import events_never_ready
from tests.cuda_stand_in.lone_ranks import log_of, run_alone
from tests.cuda_stand_in.orders import (
    IN_SUITE,
    NIGHTLY,
    SHARED_WEIGHTS,
    WITH_EXPERTS,
    OrderCase,
    run_case,
    train_and_save,
)
from tests.cuda_stand_in.pool import run_logged
from tests.cuda_stand_in.races import AccessMarks, Race, find_races
from tests.support.gloo_pool import pool_of

CASES = (*IN_SUITE, *NIGHTLY)
SHARED_EXPERTS = OrderCase(("cp4fsep2", "tp2cp2fsep4"), 4, model=WITH_EXPERTS)
WHOLE_EXPERTS = (
    *(
        OrderCase(("tp2cp2ep4", "cp4~ep4", "cp2ep2pp2"), 4, model=model)
        for model in (WITH_EXPERTS, replace(WITH_EXPERTS, granularity="selective"))
    ),
    SHARED_EXPERTS,
)
"""Their ranks have peers."""
PEERS_TIMEOUT_S = 110.0
"""Every access is logged: with Transformer Engine's experts a job takes 45 s on a slow core. Less
than the limit of a test."""


def races_of(case: OrderCase, folder: Path, removed: str = "") -> list[list[Race]]:
    """Run all ranks of a job without peers, optionally without a wait; each rank's races."""
    # An event that is ready would order what nothing waits for.
    run_alone(_run, case, removed, num_ranks=case.num_ranks, logs=folder, STAND_IN_NEVER_READY=1)
    return [find_races(log_of(folder, rank)) for rank in range(case.num_ranks)]


def _run(case: OrderCase, removed: str) -> None:
    """Run the job on a lone rank with its accesses in the log."""
    without = WAITS[removed].without() if removed else nullcontext()
    with without, events_never_ready(), AccessMarks():
        run_case(case)


def races_with_peers(case: OrderCase, folder: Path, removed: str = "") -> list[list[Race]]:
    """`races_of` for four ranks that exchange data: what experts' ranks exchange depends on it,
    which a lone rank cannot know."""
    pool_of(4, "cuda").run(run_logged, folder, _run, case, removed, timeout_s=PEERS_TIMEOUT_S)
    return [find_races(log_of(folder, rank)) for rank in range(4)]


def races_while_saving(folder: Path, *, without_wait: bool = False) -> list[list[Race]]:
    """Races of four ranks with peers that train while a checkpoint is saved, optionally without the
    wait for the ranks' votes."""
    root = str(folder / "checkpoints")
    pool_of(4, "cuda").run(run_logged, folder, train_and_save_marked, root, without_wait)
    return [find_races(log_of(folder, rank)) for rank in range(4)]


def train_and_save_marked(root: str, without_wait: bool) -> None:
    """Run on a rank with peers, with its accesses in the log."""
    vote = CheckpointSaver._vote

    def changed(saver: CheckpointSaver, current: Any) -> None:
        vote(saver, current)
        if without_wait:
            current.vote = (current.vote[0], Mock())

    changed_vote = patch.object(CheckpointSaver, "_vote", changed)
    with changed_vote, events_never_ready(), AccessMarks():
        train_and_save(root)


@contextmanager
def _track_does_not_wait_for_compute() -> Iterator[None]:
    class Stream(torch.cuda.Stream):
        def wait_stream(self, stream: Any) -> None:
            pass

    with patch.object(track.torch.cuda, "Stream", Stream):
        yield


@contextmanager
def _compute_does_not_wait_for(span: str) -> Iterator[None]:
    wait_for = StallTimer.wait_for

    def changed(waits: StallTimer, ticket: Any, **detail: Any) -> None:
        if waits._span != span:
            wait_for(waits, ticket, **detail)

    with patch.object(StallTimer, "wait_for", changed):
        yield


@contextmanager
def _track_does_not_wait_for_collectives_of(span: str) -> Iterator[None]:
    submit = track.StreamTrack.submit

    def changed(on_track: track.StreamTrack, job: track.TrackJob) -> track.Ticket:
        if job.span == span:
            steps = job.steps
            job = replace(job, steps=lambda slot: (() for _ in steps(slot)))
        return submit(on_track, job)

    with patch.object(track.StreamTrack, "submit", changed):
        yield


@dataclass(frozen=True)
class RemovableWait:
    """A wait that jobs can run without."""

    place: str
    """File below megatron/hydraulis, and the line that waits."""
    without: Callable[[], AbstractContextManager[None]]


_TICKET = "runtime/track.py: torch.cuda.current_stream().wait_event(self._ended)"
_WORK = "runtime/track.py: work.wait()"
WAITS = {
    "the track's stream for compute": RemovableWait(
        "runtime/track.py: self._stream.wait_stream(torch.cuda.current_stream())",
        _track_does_not_wait_for_compute,
    ),
} | {
    name: wait
    for kind in ("gather", "scatter", "column gather", "column scatter")
    for name, wait in (
        (
            f"compute for {kind}s",
            RemovableWait(_TICKET, partial(_compute_does_not_wait_for, f"{kind} wait")),
        ),
        (
            f"the track's stream for collectives of {kind}s",
            RemovableWait(_WORK, partial(_track_does_not_wait_for_collectives_of, kind)),
        ),
    )
}
"""What waits for what."""

VOTE = "checkpoint/saving.py: work.wait()"
"""Removed by `races_while_saving`."""
CANNOT_RACE = {
    "runtime/passes.py: ticket.wait()": "calls the wait of a track's ticket, which is taken out",
    "runtime/track.py: self.ended.wait()": "a thread's, on the CPU",
    "runtime/track.py: last.wait()": "likewise",
    "runtime/track.py: torch.cuda.current_stream().wait_stream(self._stream)": (
        "for jobs of micro-batches that failed; all others have been waited for"
    ),
    "runtime/memory.py: torch.cuda.synchronize()": "completes a measurement; orders no data",
    "runtime/spans.py: stamp.event.synchronize()": "completes a time; orders no data",
    "runtime/spans.py: event.synchronize()": "completes a time; orders no data",
    "profiler/rig.py: torch.cuda.synchronize()": "completes a measurement; orders no data",
    "runtime/process_groups.py: return on_host.to(device, non_blocking=True)": (
        "used on the stream that copies; torch keeps pinned memory until the copy has ended"
    ),
    "data/packed_batch.py: return self._with_tensors(lambda tensor: tensor.to(device, "
    "non_blocking=non_blocking))": "as above",
    "library/batches.py: part = part.pinned().to(device, non_blocking=True)": "as above",
    "loop/preflight.py: work.wait()": "completes a measurement of the links; orders no data",
    "planner/ahead.py: self._process.wait()": "a process",
    "flags/convert.py: process.wait()": "a process",
}
"""Other places that wait, or copy without waiting, and why their removal cannot race."""


def print_table() -> None:
    """All jobs, then one job without each wait, for docs/results.md."""
    print("| job | ranks | races |\n|---|---|---|")
    runs = [(case, "") for case in CASES]
    runs += [
        (SHARED_WEIGHTS if "columns" in removed else IN_SUITE[0], removed) for removed in WAITS
    ]
    for case, removed in runs:
        with TemporaryDirectory() as folder:
            found = races_of(case, Path(folder), removed)
        missing = f", without the wait of {removed}" if removed else ""
        name = f"`{'`, `'.join(case.strategies)}`{case.details}{missing}"
        print(f"| {name} | {case.num_ranks} | {sum(map(len, found))} |", flush=True)


if __name__ == "__main__":
    # Imported by name, so that ranks unpickle the same class.
    from tests.cuda_stand_in import race_jobs

    race_jobs.print_table()
