"""One gather and one scatter of all buckets: what is on the track, and who waits for what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime.cuda_clock import CudaStamp
from megatron.hydraulis.runtime.regroup import Regrouper
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder
from megatron.hydraulis.runtime.track import Ticket, Track


class HostStamp:
    """A moment of the host."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def s_until(self, later: HostStamp) -> float | None:
        """Time to a later moment; None where that is not known yet."""
        return later._time_s - self._time_s


class Waits:
    """Total time for which compute waited.

    Args:
        span: what a wait is called.
        spans: told of every wait.
        stamp: makes a stamp of the present of what waits: of the host, or of a CUDA stream
            (`cuda_clock.CudaStamp`), where the host only queues the wait and goes on.
    """

    def __init__(
        self,
        span: str,
        spans: SpanRecorder = NO_SPANS,
        stamp: Callable[[], HostStamp | CudaStamp] = HostStamp,
    ) -> None:
        self._span = span
        self._spans = spans
        self._stamp: Callable[[], Any] = stamp
        self._waits: list[tuple[Any, Any]] = []
        """Stamps before and after each."""

    def wait_for(self, ticket: Ticket, **detail: int | str) -> None:
        """Wait for a job's end, if it has not come already."""
        if ticket.is_done:
            ticket.wait()  # tells of errors
            return
        span = self._spans.begin(self._span, **detail)
        before = self._stamp()
        try:
            ticket.wait()
        finally:
            self._waits.append((before, self._stamp()))
            self._spans.end(span)

    def take_s(self) -> float:
        """The sum since the last call; never waits for a device. What a device has not come to yet
        counts the next time, unless `forget` comes before."""
        times_s = [before.s_until(after) for before, after in self._waits]
        known = zip(self._waits, times_s, strict=True)
        self._waits = [wait for wait, time_s in known if time_s is None]
        return sum(time_s for time_s in times_s if time_s is not None)

    def forget(self) -> None:
        """What has been waited for so far counts no more."""
        self._waits.clear()


class GatherPass:
    """The parameters of one strategy on their way: each bucket once, by rising index.

    Args:
        regrouper: of the strategy.
        num_buckets: of the layout.
        track: where jobs run.
        waits: told of every wait.
        waits_at_once: let nothing overlap: a bucket has arrived when it has been posted.
    """

    def __init__(
        self,
        regrouper: Regrouper,
        num_buckets: int,
        track: Track,
        waits: Waits,
        *,
        waits_at_once: bool = False,
    ) -> None:
        self._regrouper = regrouper
        self._num_buckets = num_buckets
        self._track = track
        self._waits = waits
        self._waits_at_once = waits_at_once
        self._tickets: list[Ticket | None] = []
        """None where the bucket is known to have arrived."""
        self._num_missing = num_buckets

    def post_next(self) -> None:
        """Post the next bucket: the owned part of it must be up to date."""
        bucket = len(self._tickets)
        self._tickets.append(self._track.submit(self._regrouper.gather_job(bucket)))
        if self._waits_at_once:
            self.need((bucket,))

    def post_rest(self) -> None:
        """Post what has not been posted."""
        while len(self._tickets) < self._num_buckets:
            self.post_next()

    def need(self, buckets: Iterable[int]) -> None:
        """Go on when these buckets are in the arena."""
        if not self._num_missing:
            return
        for bucket in buckets:
            ticket = self._tickets[bucket]
            if ticket is not None:
                self._waits.wait_for(ticket, bucket=bucket)
                self._tickets[bucket] = None
                self._num_missing -= 1

    def num_missing_of(self, buckets: Iterable[int]) -> int:
        """How many of these buckets nobody has waited for."""
        return sum(self._tickets[bucket] is not None for bucket in buckets)

    def finish(self) -> None:
        """Go on when every bucket has arrived everywhere that it is sent to from here."""
        self.post_rest()
        self.need(range(self._num_buckets))


class PostFrom(Enum):
    """The moment from which a rank may post scatters; docs/regrouping.md, section Overlap."""

    LAST_BACKWARD = auto()
    """Where a scatter never delays compute."""
    FIRST_GRADIENT = auto()
    """Of the last backward. Megatron's schedules announce that backward before they receive what it
    works on; once it has added to a gradient, a first stage has no message left."""
    FINISH = auto()
    """After the schedule; at once where there is none."""


class ScatterPass:
    """The gradients of one iteration on their way: each bucket once, by falling index.

    A bucket is posted when this rank's last backward has completed it, all buckets of higher index
    are posted, and ``post_from`` has come. Nothing is waited for before `finish`.

    Args:
        regrouper: of the strategy.
        num_buckets: of the layout.
        track: where jobs run.
        waits: told of every wait.
        buckets_of: the buckets that each parameter of this rank lies in. Ranks of one tp group
            hold the same parameters, so that they post at the same places of their backward.
        post_from: when the first may be posted.
    """

    def __init__(
        self,
        regrouper: Regrouper,
        num_buckets: int,
        track: Track,
        waits: Waits,
        *,
        buckets_of: Mapping[int, Sequence[int]],
        post_from: PostFrom = PostFrom.LAST_BACKWARD,
    ) -> None:
        self._regrouper = regrouper
        self._track = track
        self._waits = waits
        self._buckets_of = buckets_of
        self._post_from = post_from
        self._missing: list[set[int]] = [set() for _ in range(num_buckets)]
        """Of each bucket, the parameters whose gradients are not complete."""
        for parameter, buckets in buckets_of.items():
            for bucket in buckets:
                self._missing[bucket].add(parameter)
        self._num_left = num_buckets
        self._tickets: list[Ticket] = []
        self._is_last_backward = False

    def begin_last_backward(self) -> None:
        """From now on a gradient that is added to is complete."""
        self._is_last_backward = True
        if self._post_from is PostFrom.LAST_BACKWARD:
            self._post_complete()

    def arrived(self, parameter: int) -> None:
        """A backward has added to the gradient of a parameter."""
        if not self._is_last_backward:
            return
        for bucket in self._buckets_of.get(parameter, ()):
            if bucket >= self._num_left:
                raise HydraulisError(
                    f"the last backward adds to a gradient of bucket {bucket} after the bucket "
                    "was sent: the model uses a parameter in several separate graphs; pass "
                    "--no-regroup-overlap"
                )
            self._missing[bucket].discard(parameter)
        if self._post_from is not PostFrom.FINISH:
            self._post_complete()

    def finish(self) -> None:
        """Post the rest and go on when all gradients are on the shards."""
        while self._num_left:
            self._post()
        for ticket in self._tickets:
            self._waits.wait_for(ticket)

    def _post_complete(self) -> None:
        while self._num_left and not self._missing[self._num_left - 1]:
            self._post()

    def _post(self) -> None:
        self._num_left -= 1
        self._tickets.append(self._track.submit(self._regrouper.scatter_job(self._num_left)))


@contextmanager
def at_exit(action: Callable[[], None]) -> Iterator[None]:
    """A context manager for ``config.no_sync_func``: Megatron's schedules leave it before the last
    backward."""
    yield
    action()
