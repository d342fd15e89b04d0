"""The regroup track: the one sequence of a rank's regrouping, beside its compute.

All ranks put the same jobs on their tracks in the same order; a track posts the collectives of one
job after those of another and waits for nothing but them. What follows from that, and why no
deadlock can, is in docs/regrouping.md, section Overlap.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder
from megatron.hydraulis.runtime.staging import Staging, StagingSlot

Step = dist.Work | None
"""What a job waits for next; None where there is nothing to wait for."""


class Job(Protocol):
    """One bucket's gather or scatter."""

    span: str
    """'gather' or 'scatter'."""
    detail: dict[str, int | str]
    """For the span, and for errors."""
    num_collectives: int
    needs_staging: bool
    """Whether `steps` takes memory of its slot."""

    def steps(self, slot: StagingSlot) -> Iterator[Step]:
        """Posts a collective before each ``yield``; goes on once it is complete."""
        ...


class Ticket(Protocol):
    """A job on a track."""

    @property
    def is_done(self) -> bool:
        """Whether the job has ended; never waits. A job that failed has ended."""
        ...

    def wait(self) -> None:
        """Go on when the job has ended; raises what it, or one before it, raised."""
        ...


class Track(Protocol):
    """Runs jobs one after another, their waits overlapping."""

    may_delay_compute: bool
    """Whether a job that waits for other ranks may hold up what this rank's compute does after."""

    def submit(self, job: Job) -> Ticket:
        """Put a job at the end of the sequence; returns at once. Not after `close`."""
        ...

    def close(self) -> None:
        """No more jobs."""
        ...


def make_track(device: torch.device, staging: Staging, spans: SpanRecorder = NO_SPANS) -> Track:
    """The kind of track that overlaps on this device."""
    if device.type == "cuda":
        return StreamTrack(device, staging, spans)
    return ThreadTrack(staging, spans)


def _describe(job: Job) -> str:
    detail = ", ".join(f"{key} {value}" for key, value in job.detail.items())
    return f"{job.span} of {detail}"


@dataclass
class _Failure:
    """The first error on a track; nothing after it can be right."""

    error: BaseException
    noticed: threading.Event = field(default_factory=threading.Event)
    """Set once somebody has been told."""


@dataclass
class _ThreadTicket:
    job: Job
    ended: threading.Event = field(default_factory=threading.Event)
    failure: _Failure | None = None
    # What follows belongs to the track's thread.
    steps: Iterator[Step] | None = None
    work: Step = None
    is_step_complete: bool = True
    num_posted: int = 0
    slot: StagingSlot | None = None
    span: int = 0

    @property
    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait()
        if self.failure is not None:
            self.failure.noticed.set()
            raise self.failure.error


SECONDS_TO_NOTICE = 2.0
"""After an error on the track, time for compute to come upon it by itself."""

_CLOSE, _COMPLETE = "close", "complete"


class ThreadTrack:
    """A thread that runs jobs in their order: collectives of the CPU block who waits for them.

    As many jobs are under way as there are staging slots for, jobs that need none not counted. A
    job begins once all collectives of those before it are posted; jobs end in their order.
    """

    may_delay_compute = False

    def __init__(self, staging: Staging, spans: SpanRecorder = NO_SPANS) -> None:
        self._events: queue.SimpleQueue[_ThreadTicket | str] = queue.SimpleQueue()
        self._runner = _Runner(self._events, staging, spans)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # The thread must not keep the track alive, or nobody would ever close it.
        weakref.finalize(self, self._events.put, _CLOSE)

    def submit(self, job: Job) -> Ticket:
        if self._is_closed:
            raise HydraulisError(
                f"{_describe(job)} comes after the end of regrouping, so that nobody would run it; "
                "close the engine after its last iteration and evaluation"
            )
        ticket = _ThreadTicket(job)
        if self._thread is None:
            # A thread of OpenMP's own choice of threads would fight with compute for the cores.
            self._thread = threading.Thread(
                target=self._runner.run,
                args=(torch.get_num_threads(),),
                name="hydraulis-regroup",
                daemon=True,
            )
            self._thread.start()
        self._events.put(ticket)
        return ticket

    def close(self) -> None:
        self._is_closed = True
        self._events.put(_CLOSE)


class _Runner:
    """The thread's own state."""

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
                del event  # an idle thread keeps nothing alive
                self._go_on()
                if self._failure is not None:
                    _end_process_unless_noticed(self._failure)

    def _go_on(self) -> None:
        """All that can be done without waiting."""
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
            if last.num_posted < last.job.num_collectives:
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
            if ticket.work is not None:
                ticket.work.wait()  # complete: this tells of errors
            ticket.work = next(ticket.steps)
        except StopIteration:
            self._end(ticket)
        except BaseException as error:
            error.add_note(_describe(ticket.job))
            raise
        else:
            ticket.num_posted += 1
            ticket.is_step_complete = ticket.work is None
            if ticket.work is not None:
                self._wake_when_complete(ticket, ticket.work)

    def _wake_when_complete(self, ticket: _ThreadTicket, work: dist.Work) -> None:
        events = self._events

        def complete(_: Any) -> None:
            ticket.is_step_complete = True
            events.put(_COMPLETE)

        work.get_future().add_done_callback(complete)

    def _end(self, ticket: _ThreadTicket) -> None:
        ended = self._under_way.popleft()
        assert ended is ticket, "jobs end in their order"
        self._spans.end(ticket.span)
        if ticket.slot is not None:
            self._free_slots.append(ticket.slot)
        ticket.slot = ticket.steps = ticket.work = None
        ticket.ended.set()


def _end_process_unless_noticed(failure: _Failure) -> None:
    """Compute may be waiting for a rank that in turn waits for what failed here: nobody would be
    told before the collectives' timeout."""
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
    """A CUDA stream: jobs are queued on the device in their order, and nobody waits on the host."""

    may_delay_compute = True
    """Where streams share one hardware queue, what waits in it holds up all that came after."""

    def __init__(
        self, device: torch.device, staging: Staging, spans: SpanRecorder = NO_SPANS
    ) -> None:
        self._stream = torch.cuda.Stream(device)
        self._slots = staging.slots
        self._num_submitted = 0
        self._spans = spans

    def submit(self, job: Job) -> Ticket:
        # The stream's order keeps a slot's users apart.
        slot = self._slots[self._num_submitted % len(self._slots)]
        self._num_submitted += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            span = self._spans.begin(job.span, **job.detail)
            try:
                for work in job.steps(slot):
                    if work is not None:
                        work.wait()
            except BaseException as error:
                error.add_note(_describe(job))
                raise
            self._spans.end(span)
            ended = torch.cuda.Event()
            ended.record(self._stream)
        return _StreamTicket(ended)

    def close(self) -> None:
        """Nothing to end."""
