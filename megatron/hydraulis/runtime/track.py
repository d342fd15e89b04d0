"""The regroup track: runs the gathers and scatters of a rank one after another during compute.

All ranks put the same jobs on their tracks in the same order; a track posts the collectives of one
job after those of another and waits for nothing else. docs/regrouping.md, section Overlap, explains
why this cannot deadlock.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder

_ALIGNMENT_BYTES = 256
NUM_STAGING_SLOTS = 2
"""Slots of a thread: one call is rearranged while the next one travels."""


class StagingSlot:
    """The buffer of one call, which grows to the largest call and is then reused.

    On a CPU a new allocation costs a page fault per page, about as long as the copy into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def parts(self, needs: Sequence[Mapping[str, int]]) -> list[StagingPart]:
        """A part for each bucket of a call, valid until the next call of this method.

        Args:
            needs: bytes of each bucket by purpose.
        """
        end = 0
        places: list[dict[str, tuple[int, int]]] = []
        for need in needs:
            place = {}
            for purpose, num_bytes in need.items():
                place[purpose] = (end, end + num_bytes)
                end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            places.append(place)
        if self._buffer.numel() < end:
            self._buffer = self._buffer.new_empty(0)  # free the old one first: never hold both
            self._buffer = self._buffer.new_empty(end)
        return [
            StagingPart({name: self._buffer[slice(*at)] for name, at in place.items()})
            for place in places
        ]

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return self._buffer.numel()


class StagingPart:
    """Buffers of one bucket of a call, by purpose."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = buffers

    def take(self, purpose: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of undefined contents, valid until the next call for the same purpose.

        Buffers of different purposes never overlap; those of different dtypes do.
        """
        return self._buffers[purpose][: num_elements * dtype.itemsize].view(dtype)


class Staging:
    """The staging slots of a rank, at least 1: the number of calls rearranged at the same time."""

    def __init__(self, device: torch.device, num_slots: int = NUM_STAGING_SLOTS) -> None:
        if num_slots < 1:
            raise ConfigurationError(
                f"regrouping needs at least 1 staging slot but gets {num_slots}; give 1 or more"
            )
        self.slots: Sequence[StagingSlot] = tuple(StagingSlot(device) for _ in range(num_slots))

    @property
    def num_bytes(self) -> int:
        """Memory in use over all slots."""
        return sum(slot.num_bytes for slot in self.slots)


Step = Sequence[dist.Work]
"""Works that a job waits for next; empty where there is nothing to wait for."""


@dataclass(frozen=True, kw_only=True)
class TrackJob:
    """The gather or scatter of one call."""

    span: str
    """'gather' or 'scatter'."""
    detail: Mapping[str, int | str]
    """Details of the job for its span and for errors."""
    num_steps: int
    """How often `steps` yields."""
    needs_staging: bool
    """Whether `steps` takes memory from its slot."""
    steps: Callable[[StagingSlot], Iterator[Step]]
    """Posts collectives before each ``yield`` and continues once they are complete."""

    def __str__(self) -> str:
        return f"{self.span} of " + ", ".join(
            f"{key} {value}" for key, value in self.detail.items()
        )


class Ticket(Protocol):
    """A job on a track."""

    @property
    def is_done(self) -> bool:
        """True if the job has ended, successfully or not; never waits."""
        ...

    def wait(self) -> None:
        """Wait for the end of the job; raises the error of this job or of one before it."""
        ...


class Track(Protocol):
    """Runs jobs one after another, their waits overlapping."""

    may_delay_compute: bool
    """Whether a job that waits for other ranks may delay compute that this rank queues later."""

    def submit(self, job: TrackJob) -> Ticket:
        """Append a job; returns at once. Not after `close`."""
        ...

    def finish(self) -> None:
        """Wait for the end of all jobs, also of those that nobody waits for after an error."""
        ...

    def close(self) -> None:
        """Accept no more jobs."""
        ...


def make_track(device: torch.device, staging: Staging, spans: SpanRecorder = NO_SPANS) -> Track:
    """The track that overlaps with compute on this device."""
    if device.type == "cuda":
        return StreamTrack(device, staging, spans)
    return ThreadTrack(staging, spans)


@dataclass
class _Failure:
    """The first error on a track; no later job can succeed."""

    error: BaseException
    noticed: threading.Event = field(default_factory=threading.Event)
    """Set once a `wait` has raised it."""


@dataclass
class _ThreadTicket:
    job: TrackJob
    ended: threading.Event = field(default_factory=threading.Event)
    failure: _Failure | None = None
    # Used by the track's thread only.
    steps: Iterator[Step] | None = None
    works: Step = ()
    completed: list[None] = field(default_factory=list)
    """An entry for each of the works that is complete; other threads append to it."""
    num_posted: int = 0
    slot: StagingSlot | None = None
    span: Any = None

    @property
    def is_done(self) -> bool:
        return self.ended.is_set()

    @property
    def is_step_complete(self) -> bool:
        return len(self.completed) == len(self.works)

    def wait(self) -> None:
        self.ended.wait()
        if self.failure is not None:
            self.failure.noticed.set()
            raise self.failure.error


SECONDS_TO_NOTICE = 2.0
"""Time after an error on the track for compute to notice it in `Ticket.wait`."""

_CLOSE, _COMPLETE = "close", "complete"


class ThreadTrack:
    """A thread that runs jobs in their order, since waiting for a CPU collective blocks.

    At most as many jobs that need staging are under way as there are slots. A job begins once all
    collectives of the jobs before it are posted; jobs end in their order.
    """

    may_delay_compute = False

    def __init__(self, staging: Staging, spans: SpanRecorder = NO_SPANS) -> None:
        self._events: queue.SimpleQueue[_ThreadTicket | str] = queue.SimpleQueue()
        self._runner = _Runner(self._events, staging, spans)
        self._thread: threading.Thread | None = None
        self._last: Ticket | None = None
        self._is_closed = False
        # The thread must not keep the track alive, or it would never be closed.
        weakref.finalize(self, self._events.put, _CLOSE)

    def submit(self, job: TrackJob) -> Ticket:
        if self._is_closed:
            raise HydraulisError(
                f"{job} was submitted after the end of regrouping and would never run; "
                "close the engine after its last iteration and evaluation"
            )
        ticket = _ThreadTicket(job)
        if self._thread is None:
            # With OpenMP's default number of threads it would compete with compute for the cores.
            self._thread = threading.Thread(
                target=self._runner.run,
                args=(torch.get_num_threads(),),
                name="hydraulis-regroup",
                daemon=True,
            )
            self._thread.start()
        self._events.put(ticket)
        self._last = ticket
        return ticket

    def finish(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def close(self) -> None:
        self._is_closed = True
        self._events.put(_CLOSE)


class _Runner:
    """State of the track's thread."""

    def __init__(
        self,
        events: queue.SimpleQueue[_ThreadTicket | str],
        staging: Staging,
        spans: SpanRecorder,
    ) -> None:
        self._events = events
        self._free_slots = deque(staging.slots)
        self._no_slot = staging.slots[0]
        self._spans = spans
        self._waiting: deque[_ThreadTicket] = deque()
        self._under_way: deque[_ThreadTicket] = deque()
        self._failure: _Failure | None = None

    def run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        with torch.no_grad():
            while True:
                event = self._events.get()
                if event is _CLOSE:
                    return
                if isinstance(event, _ThreadTicket):
                    self._waiting.append(event)
                del event  # an idle thread must keep nothing alive
                self._advance()
                if self._failure is not None:
                    _end_process_unless_noticed(self._failure)

    def _advance(self) -> None:
        """Do all that can be done without waiting."""
        try:
            while self._failure is None:
                if self._under_way and self._under_way[0].is_step_complete:
                    self._next_step(self._under_way[0])
                elif self._can_begin():
                    self._begin(self._waiting.popleft())
                else:
                    return
        except BaseException as error:
            self._failure = _Failure(error)
        while self._under_way or self._waiting:
            ticket = (self._under_way or self._waiting).popleft()
            ticket.failure = self._failure
            ticket.ended.set()

    def _can_begin(self) -> bool:
        if not self._waiting:
            return False
        if self._under_way:
            last = self._under_way[-1]
            if last.num_posted < last.job.num_steps:
                return False
        return bool(self._free_slots) or not self._waiting[0].job.needs_staging

    def _begin(self, ticket: _ThreadTicket) -> None:
        job = ticket.job
        self._under_way.append(ticket)
        if job.needs_staging:
            ticket.slot = self._free_slots.popleft()
        ticket.span = self._spans.begin(job.span, **job.detail)
        self._next_step(ticket)

    def _next_step(self, ticket: _ThreadTicket) -> None:
        try:
            if ticket.steps is None:
                ticket.steps = ticket.job.steps(ticket.slot or self._no_slot)
            for work in ticket.works:
                work.wait()  # it is complete: this raises its error
            works = next(ticket.steps)
        except StopIteration:
            self._end(ticket)
        except BaseException as error:
            error.add_note(str(ticket.job))
            raise
        else:
            ticket.num_posted += 1
            ticket.works, ticket.completed = works, []
            for work in works:
                self._wake_when_complete(ticket.completed, work)

    def _wake_when_complete(self, completed: list[None], work: dist.Work) -> None:
        events = self._events

        def complete(_: Any) -> None:
            completed.append(None)
            events.put(_COMPLETE)

        work.get_future().add_done_callback(complete)

    def _end(self, ticket: _ThreadTicket) -> None:
        ended = self._under_way.popleft()
        assert ended is ticket, "jobs end in their order"
        self._spans.end(ticket.span)
        if ticket.slot is not None:
            self._free_slots.append(ticket.slot)
        ticket.slot = ticket.steps = None
        ticket.works = ()
        ticket.ended.set()


def _end_process_unless_noticed(failure: _Failure) -> None:
    """End the process if compute does not notice the failure: it may be waiting for a rank that
    waits for the failed job, which would last until the collectives' timeout."""
    if failure.noticed.wait(SECONDS_TO_NOTICE):
        return
    traceback.print_exception(failure.error)
    print(
        f"rank {dist.get_rank()}: regrouping failed while compute was waiting for another rank; "
        "the process ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


class _StreamTicket:
    def __init__(self, ended: torch.cuda.Event) -> None:
        self._ended = ended

    @property
    def is_done(self) -> bool:
        return self._ended.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._ended)


class StreamTrack:
    """A CUDA stream: jobs are queued on the device in their order; the host never waits."""

    may_delay_compute = True
    """If streams share one hardware queue, a waiting job delays everything queued after it."""

    def __init__(
        self, device: torch.device, staging: Staging, spans: SpanRecorder = NO_SPANS
    ) -> None:
        self._stream = torch.cuda.Stream(device)
        # The stream's order separates the users of a slot, so more would not be used at once.
        self._slot = staging.slots[0]
        self._spans = spans

    def submit(self, job: TrackJob) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            span = self._spans.begin(job.span, **job.detail)
            try:
                for works in job.steps(self._slot):
                    for work in works:
                        work.wait()
            except BaseException as error:
                error.add_note(str(job))
                raise
            self._spans.end(span)
            ended = torch.cuda.Event()
            ended.record(self._stream)
        return _StreamTicket(ended)

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Does nothing: there is nothing to end."""
