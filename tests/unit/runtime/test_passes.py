"""When buckets are posted, and what waits for them."""

from typing import Any

import pytest
import torch

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime import spans
from megatron.hydraulis.runtime.passes import GatherPass, PostFrom, ScatterPass, StallTimer
from megatron.hydraulis.runtime.strategy_runtime import _parts

NUM_BUCKETS = 4


class FakeTicket:
    """Completes when it is waited for."""

    def __init__(self, log: list[str], bucket: int) -> None:
        self._log, self._bucket = log, bucket
        self.is_done = False

    def wait(self) -> None:
        self._log.append(f"wait {self._bucket}")
        self.is_done = True


class FakeTrack:
    """Regrouper and track: jobs are numbers of calls, one for each bucket unless given."""

    may_delay_compute = False

    def __init__(
        self, num_buckets: int = NUM_BUCKETS, calls: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.calls = self.scatter_calls = calls or tuple((b,) for b in range(num_buckets))
        self.posted: list[int] = []
        self.log: list[str] = []

    def gather_job(self, call: tuple[int, ...]) -> int:
        """The number of the call that has these buckets, or had them all."""
        return next(i for i, whole in enumerate(self.calls) if set(call) <= set(whole))

    def scatter_job(self, call: int, *, adds: bool) -> int:
        assert not adds
        return call

    def submit(self, call: Any) -> FakeTicket:
        self.posted.append(call)
        self.log.append(f"post {call}")
        return FakeTicket(self.log, call)

    def close(self) -> None:
        raise AssertionError


def scatter_pass(track: FakeTrack, post_from: PostFrom = PostFrom.LAST_BACKWARD) -> ScatterPass:
    # Parameter 7 lies in buckets 0 and 1; this rank holds nothing of buckets 2, 4 and above.
    buckets_of = {7: (0, 1), 8: (1,), 9: (3,)}
    return ScatterPass(
        track,  # type: ignore[arg-type]
        track,  # type: ignore[arg-type]
        StallTimer("scatter wait"),
        buckets_of=buckets_of,
        post_from=post_from,
    )


class TestScatter:
    def test_complete_buckets_are_posted_by_falling_index(self) -> None:
        track = FakeTrack()
        scatter = scatter_pass(track)
        scatter.arrived(9)
        assert track.posted == [], "not before the last backward"
        scatter.begin_last_backward()
        assert track.posted == []
        scatter.arrived(7)
        assert track.posted == [], "bucket 3 comes first"
        scatter.arrived(9)
        assert track.posted == [3, 2], "nothing is contributed to bucket 2"
        scatter.arrived(8)
        assert track.posted == [3, 2, 1, 0]
        assert not any(entry.startswith("wait") for entry in track.log), "hooks never wait"
        scatter.finish()
        assert track.log[4:] == ["wait 3", "wait 2", "wait 1", "wait 0"]

    def test_a_parameter_without_gradient_does_not_block_forever(self) -> None:
        track = FakeTrack()
        scatter = scatter_pass(track)
        scatter.begin_last_backward()
        scatter.arrived(7)
        scatter.finish()
        assert track.posted == [3, 2, 1, 0]

    def test_buckets_that_a_rank_holds_nothing_of_need_not_wait_for_a_gradient(self) -> None:
        track = FakeTrack(6)
        scatter_pass(track).begin_last_backward()
        assert track.posted == [5, 4]

    def test_a_first_stage_posts_from_the_first_gradient_of_its_last_backward(self) -> None:
        """Before that it may still have to receive what the backward works on."""
        track = FakeTrack(6)
        scatter = scatter_pass(track, PostFrom.FIRST_GRADIENT)
        scatter.arrived(9)
        scatter.begin_last_backward()
        assert track.posted == []
        scatter.arrived(7)
        assert track.posted == [5, 4]
        scatter.arrived(9)
        assert track.posted == [5, 4, 3, 2]
        scatter.finish()
        assert track.posted == [5, 4, 3, 2, 1, 0]

    def test_a_first_stage_without_gradients_in_its_last_backward_posts_at_the_end(self) -> None:
        track = FakeTrack()
        scatter = scatter_pass(track, PostFrom.FIRST_GRADIENT)
        scatter.begin_last_backward()
        scatter.finish()
        assert track.posted == [3, 2, 1, 0]

    def test_a_later_stage_posts_at_the_end(self) -> None:
        track = FakeTrack()
        scatter = scatter_pass(track, PostFrom.FINISH)
        scatter.begin_last_backward()
        for parameter in (9, 8, 7):
            scatter.arrived(parameter)
        assert track.posted == []
        scatter.finish()
        assert track.posted == [3, 2, 1, 0]

    def test_a_call_is_posted_when_all_of_its_buckets_are_complete(self) -> None:
        track = FakeTrack(calls=((3,), (0, 2), (1,)))
        scatter = scatter_pass(track)
        scatter.begin_last_backward()
        scatter.arrived(9)
        assert track.posted == [], "bucket 1 comes first"
        scatter.arrived(8)
        assert track.posted == []
        scatter.arrived(7)
        assert track.posted == [2, 1, 0]

    def test_a_gradient_after_its_bucket_was_sent_is_an_error(self) -> None:
        scatter = scatter_pass(FakeTrack())
        scatter.begin_last_backward()
        scatter.arrived(9)
        with pytest.raises(HydraulisError, match=r"gradient of bucket 3 .* --no-regroup-overlap"):
            scatter.arrived(9)


class TestGather:
    def gather_pass(self, track: FakeTrack, **options: Any) -> GatherPass:
        return GatherPass(
            track,  # type: ignore[arg-type]
            track,  # type: ignore[arg-type]
            StallTimer("gather wait"),
            **options,
        )

    def test_a_bucket_is_waited_for_once_and_the_rest_at_the_end(self) -> None:
        track = FakeTrack()
        gather = self.gather_pass(track)
        gather.updated(0)
        gather.post_rest()
        assert track.posted == [0, 1, 2, 3]
        gather.need((1, 2))
        gather.need((1,))
        assert gather.num_missing_of((1, 2)) == 0
        assert gather.num_missing_of((0, 2, 3)) == 2
        gather.finish()
        gather.finish()
        assert track.log[4:] == ["wait 1", "wait 2", "wait 0", "wait 3"]

    def test_buckets_that_are_held_do_not_travel(self) -> None:
        track = FakeTrack(calls=((3, 0), (2,), (1,)))
        gather = self.gather_pass(track, held={0, 2})
        assert gather.buckets == [3, 1]
        for bucket in gather.buckets:
            gather.updated(bucket)
        assert track.posted == [0, 2]
        gather.need((0, 2))
        assert gather.num_missing_of((0, 1, 2)) == 1
        gather.finish()
        assert track.log[2:] == ["wait 0", "wait 2"]

    def test_a_call_is_posted_once_its_buckets_are_updated_and_waited_for_once(self) -> None:
        track = FakeTrack(calls=((3, 0), (2, 1)))
        gather = self.gather_pass(track)
        assert gather.buckets == [3, 0, 2, 1]
        for bucket, expected in zip(gather.buckets, ([], [0], [0], [0, 1]), strict=True):
            gather.updated(bucket)
            assert track.posted == expected
        gather.need((0,))
        assert gather.num_missing_of((0, 3)) == 0
        assert gather.num_missing_of((1, 2)) == 2
        gather.finish()
        assert track.log == ["post 0", "post 1", "wait 0", "wait 1"]

    def test_without_overlap_each_has_arrived_before_the_next_is_posted(self) -> None:
        track = FakeTrack()
        self.gather_pass(track, waits_at_once=True).post_rest()
        expected = [f"{what} {i}" for i in range(NUM_BUCKETS) for what in ("post", "wait")]
        assert track.log == expected


def test_waits_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter((1.0, 1.5, 10.0, 12.25))
    monkeypatch.setattr(spans.time, "perf_counter", lambda: next(clock_s))
    waits = StallTimer("gather wait")
    tickets = [FakeTicket([], bucket) for bucket in range(2)]
    for ticket in (*tickets, *tickets):  # a completed one needs no wait and takes no time
        waits.wait_for(ticket)
    assert waits.take_s() == 0.5 + 2.25
    assert waits.take_s() == 0.0


def test_waits_of_a_stream_count_after_the_device_has_reached_them() -> None:
    passed: set[int] = set()

    class StreamStamp:
        """The n-th stamp of a stream, half a second after the previous one."""

        num_stamps = 0

        def __init__(self) -> None:
            self.number = StreamStamp.num_stamps
            StreamStamp.num_stamps += 1

        def s_until(self, later: Any) -> float | None:
            return 0.5 * (later.number - self.number) if later.number in passed else None

    waits = StallTimer("gather wait", stamp=StreamStamp)  # type: ignore[arg-type]
    for bucket in range(3):
        waits.wait_for(FakeTicket([], bucket))
    assert waits.take_s() == 0.0
    passed |= {1, 3}
    assert waits.take_s() == 1.0
    assert waits.take_s() == 0.0
    waits.forget()
    passed.add(5)
    assert waits.take_s() == 0.0, "no longer of this iteration"


def test_hooks_are_on_the_largest_called_modules_of_one_unit() -> None:
    class Block(torch.nn.Module):
        def __init__(self, num_layers: int) -> None:
            super().__init__()
            # A list is never called: a hook on it would never fire.
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
                for _ in range(num_layers)
            )
            self.norm = torch.nn.LayerNorm(2)
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for num_layers in (1, 2):
        block = Block(num_layers)
        order_of = {id(p): num_layers for p in (*block.norm.parameters(), block.scale)}
        for i, layer in enumerate(block.layers):
            order_of |= {id(p): i for p in layer.parameters()}
        parts = list(_parts(block, lambda p, order_of=order_of: order_of[id(p)]))  # type: ignore[misc]
        assert [part for part, _ in parts] == [block, *block.layers, block.norm]
        assert parts[0][1] == [block.scale]
        members = [parameter for _, found in parts for parameter in found]
        assert {id(p) for p in members} == {id(p) for p in block.parameters()}
