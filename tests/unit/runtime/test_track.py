"""The track's thread: jobs in order, a few at a time, and errors for every later ticket."""

import threading
from collections.abc import Iterator

import pytest
import torch

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.runtime.spans import MemoryRecorder
from megatron.hydraulis.runtime.track import Staging, StagingSlot, Step, ThreadTrack, TrackJob

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


class PostedWork:
    """Replaces a running collective."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def complete(self) -> None:
        self._future.set_result(None)

    def wait(self) -> None:
        assert self._future.done(), "the track waits only for complete work"


class FakeJob:
    """A `job` whose collectives the test completes, and what happens to it."""

    def __init__(
        self,
        number: int,
        log: list[str],
        *,
        num_steps: int = 1,
        needs_staging: bool = True,
        error: Exception | None = None,
    ) -> None:
        self.job = TrackJob(
            span="gather",
            detail={"bucket": number, "unit": f"layer {number}"},
            num_steps=num_steps,
            needs_staging=needs_staging,
            steps=self.steps,
        )
        self.works = [PostedWork() for _ in range(num_steps)]
        self.posted = [threading.Event() for _ in range(num_steps)]
        self.slot: StagingSlot | None = None
        self._number = number
        self._log = log
        self._error = error

    def steps(self, slot: StagingSlot) -> Iterator[Step]:
        self.slot = slot
        for index, work in enumerate(self.works):
            self._log.append(f"{self._number} posts {index}")
            self.posted[index].set()
            yield (work,)  # type: ignore[misc]
        if self._error is not None:
            raise self._error
        self._log.append(f"{self._number} ends")

    def is_posted(self, index: int = 0) -> bool:
        """Waits until it is posted."""
        return self.posted[index].wait(TIMEOUT_S)


def test_jobs_end_in_order_whichever_is_complete_first() -> None:
    log: list[str] = []
    track = ThreadTrack(Staging(CPU, num_slots=3))
    jobs = [FakeJob(i, log) for i in range(3)]
    tickets = [track.submit(job.job) for job in jobs]
    assert jobs[2].is_posted()
    jobs[2].works[0].complete()
    jobs[1].works[0].complete()
    assert not any(ticket.is_done for ticket in tickets)
    jobs[0].works[0].complete()
    for ticket in tickets:
        ticket.wait()
    assert log == [
        *(f"{i} posts 0" for i in range(3)),
        *(f"{i} ends" for i in range(3)),
    ]
    assert len({id(job.slot) for job in jobs}) == 3
    track.close()


def test_at_most_as_many_jobs_rearrange_at_a_time_as_there_are_slots() -> None:
    log: list[str] = []
    track = ThreadTrack(Staging(CPU, num_slots=1))
    jobs = [FakeJob(i, log) for i in range(2)]
    tickets = [track.submit(job.job) for job in jobs]
    assert jobs[0].is_posted()
    jobs[0].works[0].complete()
    assert jobs[1].is_posted()
    jobs[1].works[0].complete()
    tickets[1].wait()
    assert log == ["0 posts 0", "0 ends", "1 posts 0", "1 ends"]
    assert jobs[0].slot is jobs[1].slot


def test_jobs_in_place_need_no_slot() -> None:
    log: list[str] = []
    track = ThreadTrack(Staging(CPU, num_slots=1))
    jobs = [FakeJob(0, log), *(FakeJob(i, log, needs_staging=False) for i in (1, 2))]
    tickets = [track.submit(job.job) for job in jobs]
    assert jobs[2].is_posted()
    assert log == ["0 posts 0", "1 posts 0", "2 posts 0"]
    for job in jobs:
        job.works[0].complete()
    tickets[2].wait()


def test_a_job_begins_when_those_before_it_have_posted_everything() -> None:
    """Otherwise the order of one job's second collective and the next one's first would vary."""
    log: list[str] = []
    track = ThreadTrack(Staging(CPU, num_slots=2))
    jobs = [FakeJob(i, log, num_steps=2) for i in range(2)]
    tickets = [track.submit(job.job) for job in jobs]
    assert jobs[0].is_posted(0)
    assert log == ["0 posts 0"]
    jobs[0].works[0].complete()
    assert jobs[1].is_posted(0)
    assert log == ["0 posts 0", "0 posts 1", "1 posts 0"]
    # The second one must wait for the end of the first.
    jobs[1].works[0].complete()
    jobs[0].works[1].complete()
    assert jobs[1].is_posted(1)
    jobs[1].works[1].complete()
    tickets[1].wait()
    assert log[3:] == ["0 ends", "1 posts 1", "1 ends"]


def test_an_error_is_raised_by_every_later_ticket_and_says_where() -> None:
    log: list[str] = []
    track = ThreadTrack(Staging(CPU))
    failing = FakeJob(0, log, error=ValueError("no luck"))
    tickets = [track.submit(failing.job), track.submit(FakeJob(1, log).job)]
    assert failing.is_posted()
    failing.works[0].complete()
    for ticket in tickets:
        with pytest.raises(ValueError, match="no luck") as caught:
            ticket.wait()
        assert caught.value.__notes__ == ["gather of bucket 0, unit layer 0"]
    with pytest.raises(ValueError, match="no luck"):
        track.submit(FakeJob(2, log).job).wait()
    assert "2 posts 0" not in log


def test_spans_go_from_the_posting_to_the_end() -> None:
    spans = MemoryRecorder()
    track = ThreadTrack(Staging(CPU, num_slots=2), spans)
    jobs = [FakeJob(i, []) for i in range(2)]
    tickets = [track.submit(job.job) for job in jobs]
    assert jobs[1].is_posted()
    assert spans.take() == []
    for job in jobs:
        job.works[0].complete()
    tickets[1].wait()
    first, second = spans.take()
    assert (first.detail["bucket"], second.detail["bucket"]) == (0, 1)
    assert second.start_ns < first.end_ns <= second.end_ns


def test_a_closed_track_refuses_jobs() -> None:
    track = ThreadTrack(Staging(CPU))
    track.close()
    with pytest.raises(HydraulisError, match="bucket 0, unit layer 0 was submitted after"):
        track.submit(FakeJob(0, []).job)


def test_an_unreferenced_track_ends_its_thread() -> None:
    track = ThreadTrack(Staging(CPU))
    job = FakeJob(0, [])
    ticket = track.submit(job.job)
    thread = track._thread
    assert thread is not None
    assert job.is_posted()
    job.works[0].complete()
    ticket.wait()
    del track
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_buffer_is_used_again_and_grows_to_the_largest_request() -> None:
    staging = Staging(CPU, num_slots=1)
    slot = staging.slots[0]

    def taken(num_elements: int) -> torch.Tensor:
        (part,) = slot.parts([{"sent": 4 * num_elements}])
        return part.take("sent", num_elements, torch.float32)

    large, small = taken(100), taken(4)
    assert small.numel() == 4
    assert small.data_ptr() == large.data_ptr()
    larger = taken(200)
    assert larger.numel() == 200
    assert taken(100).data_ptr() == larger.data_ptr()
    assert 800 <= staging.num_bytes < 1600


def test_buckets_of_a_call_do_not_share_memory() -> None:
    staging = Staging(CPU, num_slots=1)
    needs = [{"sent": 12, "received": 4}, {"sent": 400}, {"sent": 8, "received": 40}]
    for _ in range(2):
        parts = staging.slots[0].parts(needs)
        taken = [
            part.take(purpose, num_bytes, torch.uint8).fill_(10 * index + len(purpose))
            for index, (part, need) in enumerate(zip(parts, needs, strict=True))
            for purpose, num_bytes in need.items()
        ]
        assert [tensor.unique().tolist() for tensor in taken] == [[4], [8], [14], [24], [28]]
    assert staging.num_bytes <= 12 + 400 + 8 + 4 + 40 + 5 * 256


def test_dtypes_share_memory() -> None:
    staging = Staging(CPU)
    (part,) = staging.slots[0].parts([{"sent": 64}])
    wide = part.take("sent", 8, torch.float64)
    narrow = part.take("sent", 32, torch.bfloat16)
    assert wide.data_ptr() == narrow.data_ptr()


def test_purposes_and_slots_do_not_share_memory() -> None:
    staging = Staging(CPU, num_slots=2)
    taken = [
        part.take(purpose, 8, torch.float32).fill_(10 * index + len(purpose))
        for index, slot in enumerate(staging.slots)
        for part in slot.parts([{"sent": 32, "received": 32}])
        for purpose in ("sent", "received")
    ]
    assert [tensor.unique().tolist() for tensor in taken] == [[4], [8], [14], [18]]


def test_no_slots_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 staging slot but gets 0"):
        Staging(CPU, num_slots=0)
