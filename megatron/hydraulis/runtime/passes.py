"""One gather or one scatter of all buckets: when calls are posted, and who waits for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime.regroup import Regrouper
from megatron.hydraulis.runtime.spans import NO_SPANS, CudaStamp, HostStamp, SpanRecorder
from megatron.hydraulis.runtime.track import Ticket, Track
from megatron.hydraulis.transfer.calls import Calls, calls_without


class StallTimer:
    """Adds up the time for which compute waited for regrouping.

    Args:
        stamp: the class of stamps before and after a wait: of the host, or of a CUDA stream
            (`spans.CudaStamp`), for which the host only queues the wait.
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
        """Wait for the end of a job, unless it has ended already."""
        if ticket.is_done:
            ticket.wait()  # raises the job's error
            return
        span = self._spans.begin(self._span, **detail)
        before = self._stamp()
        try:
            ticket.wait()
        finally:
            self._waits.append((before, self._stamp()))
            self._spans.end(span)

    def take_s(self) -> float:
        """The sum since the last call; never waits for a device. A wait that the device has not
        reached counts at the next call, unless `forget` is called before."""
        times_s = [before.s_until(after) for before, after in self._waits]
        known = zip(self._waits, times_s, strict=True)
        self._waits = [wait for wait, time_s in known if time_s is None]
        return sum(time_s for time_s in times_s if time_s is not None)

    def forget(self) -> None:
        self._waits.clear()


def call_of_buckets(calls: Calls) -> dict[int, int]:
    """The number of each bucket's call; buckets in the order of the calls."""
    return {bucket: number for number, call in enumerate(calls) for bucket in call}


class GatherPass:
    """A gather of one strategy's parameters: each call once, in the regrouper's order.

    Args:
        held: buckets that no rank needs, as arenas hold them; the same on all ranks.
        waits_at_once: without overlap: wait for each call as soon as it is posted.
    """

    def __init__(
        self,
        regrouper: Regrouper,
        track: Track,
        timer: StallTimer,
        *,
        held: Collection[int] = (),
        waits_at_once: bool = False,
    ) -> None:
        self._regrouper = regrouper
        self._track = track
        self._timer = timer
        self.held = held
        self._waits_at_once = waits_at_once
        self._calls = calls_without(regrouper.calls, held)
        self._call_of = call_of_buckets(self._calls)
        self._tickets: list[Ticket | None] = []
        """One for each posted call; None once it has been waited for."""
        self._num_missing = len(self._calls)
        self._is_counted = False

    def take_bytes(self) -> tuple[int, int]:
        """The bytes that this rank exchanges, and those that it does not as arenas hold buckets;
        both 0 from the second time on, as several batches may use what one gather brings."""
        if self._is_counted:
            return 0, 0
        self._is_counted = True
        traffic, skipped = self._regrouper.traffic, self._regrouper.bytes_of(self.held)
        return traffic.gather_received_bytes + traffic.gather_sent_bytes - skipped, skipped

    @property
    def buckets(self) -> Sequence[int]:
        """The buckets that are gathered, among them all that are trained, in the order in which
        they are to be updated."""
        return list(self._call_of)

    def updated(self, bucket: int) -> None:
        """Post the next call if this bucket, updated in the order of `buckets`, is its last."""
        if bucket == self._calls[len(self._tickets)][-1]:
            self._post_next()

    def _post_next(self) -> None:
        call = self._calls[len(self._tickets)]
        self._tickets.append(self._track.submit(self._regrouper.gather_job(call)))
        if self._waits_at_once:
            self.need(call)

    def post_rest(self) -> None:
        """Post all calls that are not posted yet: the owned parts must be up to date."""
        while len(self._tickets) < len(self._calls):
            self._post_next()

    def need(self, buckets: Iterable[int]) -> None:
        """Wait until these buckets are in the arena."""
        if not self._num_missing:
            return
        for bucket in buckets:
            if bucket in self.held:
                continue
            call = self._call_of[bucket]
            ticket = self._tickets[call]
            if ticket is not None:
                self._timer.wait_for(ticket, bucket=bucket)
                self._tickets[call] = None
                self._num_missing -= 1

    def num_missing_of(self, buckets: Iterable[int]) -> int:
        """Returns how many of these buckets have not been waited for."""
        calls = (self._call_of[bucket] for bucket in buckets if bucket not in self.held)
        return sum(self._tickets[call] is not None for call in calls)

    def finish(self) -> None:
        """Post all calls and wait until each has arrived wherever this rank sends it."""
        self.post_rest()
        self.need(self._call_of)


class PostFrom(Enum):
    """The moment from which a rank may post scatters; docs/regrouping.md, section Overlap."""

    LAST_BACKWARD = auto()
    """The beginning of the last backward, if a scatter never delays compute."""
    FIRST_GRADIENT = auto()
    """The first gradient of the last backward. Megatron's schedules announce that backward before
    they receive its input; once it has added to a gradient, a first stage has no message left."""
    FINISH = auto()
    """The end of the schedule; at once where there is none."""


class ScatterPass:
    """A scatter of one iteration's gradients: each call once, from the last one to the first.

    A call is posted when this rank's last backward has completed its buckets, all calls after it
    are posted, and the moment ``post_from`` is reached. Only `finish` waits.

    Args:
        buckets_of: the buckets that each trained parameter of this rank lies in. Ranks of one tp
            group hold the same parameters, so they post at the same points of their backward.
        post_from: when the first may be posted.
        adds: whether to add to the gradients on the shards instead of replacing them.
    """

    def __init__(
        self,
        regrouper: Regrouper,
        track: Track,
        timer: StallTimer,
        *,
        buckets_of: Mapping[int, Sequence[int]],
        post_from: PostFrom = PostFrom.LAST_BACKWARD,
        adds: bool = False,
    ) -> None:
        self._adds = adds
        self._regrouper = regrouper
        self._track = track
        self._timer = timer
        self._buckets_of = buckets_of
        self._post_from = post_from
        self._call_of = call_of_buckets(regrouper.scatter_calls)
        self._missing: list[set[int]] = [set() for _ in regrouper.scatter_calls]
        """The parameters of each call whose gradients are not complete."""
        for parameter, buckets in buckets_of.items():
            for bucket in buckets:
                self._missing[self._call_of[bucket]].add(parameter)
        self._num_left = len(regrouper.scatter_calls)
        self._tickets: list[Ticket] = []
        self._is_last_backward = False

    def begin_last_backward(self) -> None:
        """Declares that from now on a gradient is complete once it has been added to."""
        self._is_last_backward = True
        if self._post_from is PostFrom.LAST_BACKWARD:
            self._post_complete()

    def arrived(self, parameter: int) -> None:
        """A backward has added to the gradient of a parameter."""
        if not self._is_last_backward:
            return
        for bucket in self._buckets_of.get(parameter, ()):
            call = self._call_of[bucket]
            if call >= self._num_left:
                raise HydraulisError(
                    f"the last backward adds to a gradient of bucket {bucket} after the bucket "
                    "was sent: the model uses a parameter in several separate graphs; pass "
                    "--no-regroup-overlap"
                )
            self._missing[call].discard(parameter)
        if self._post_from is not PostFrom.FINISH:
            self._post_complete()

    def finish(self) -> None:
        """Post all remaining calls and wait until all gradients are on the shards."""
        while self._num_left:
            self._post()
        for ticket in self._tickets:
            self._timer.wait_for(ticket)

    def _post_complete(self) -> None:
        while self._num_left and not self._missing[self._num_left - 1]:
            self._post()

    def _post(self) -> None:
        self._num_left -= 1
        job = self._regrouper.scatter_job(self._num_left, adds=self._adds)
        self._tickets.append(self._track.submit(job))


@contextmanager
def at_exit(action: Callable[[], None]) -> Iterator[None]:
    """A context manager for ``config.no_sync_func``: Megatron's schedules leave it before the last
    backward."""
    yield
    action()
