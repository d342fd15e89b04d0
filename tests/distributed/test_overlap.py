"""Overlapped regrouping: bitwise equal results, no deadlock, and a trace that shows overlap."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.hydraulis.runtime.spans import RecordedSpan
from megatron.hydraulis.runtime.track import ThreadTrack
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.collective import Collective
from tests.support.gloo_pool import pool_of
from tests.support.law import LENGTHS, MAIN_MODEL, SHORT_MODEL, assert_law, check_law, law_job
from tests.support.models import Job, RankRun, build_engine, run_job, spread
from tests.support.overlap_probes import (
    ChangeProbe,
    MemoryProbe,
    bytes_of_iterations,
    failures_of,
    order_of_update,
    probe_change,
    probe_memory,
    run_there_and_back,
    spans_of_job,
)

pytestmark = pytest.mark.distributed

HANG_S = 30.0
"""A deadlock is a failure within this time."""


def changing_job(num_ranks: int, *texts: str, **changes: object) -> Job:
    """The law's three iterations, each in another of the strategies."""
    jobs = [law_job(num_ranks, text, MAIN_MODEL) for text in texts]
    schedule = tuple(i % len(texts) for i in range(len(LENGTHS)))
    job = replace(
        jobs[0],
        strategies=texts,
        schedule=schedule,
        assignments=tuple(jobs[which].assignments[i] for i, which in enumerate(schedule)),
    )
    return replace(job, **changes)  # type: ignore[arg-type]


POOLS = [
    (2, ("tp2", "pp2", "tp1+idle")),
    (3, ("tp2@2,0+tp1@1", "pp3:2,1,1", "3*tp1")),
    (4, ("tp2@0,3+pp2@2,1", "4*tp1", "pp3:1,1,2+idle")),
]


@pytest.mark.parametrize(("num_ranks", "texts"), POOLS)
def test_overlap_changes_no_bit(num_ranks: int, texts: tuple[str, ...]) -> None:
    plain = changing_job(num_ranks, *texts, overlap=False, knows_next=False)
    expected: list[RankRun] = pool_of(num_ranks).run(run_job, plain)
    assert_law(plain, expected)
    for changes in (
        {"knows_next": False},
        {"knows_next": True},
        {"knows_next": True, "num_slots": 1},
        {"knows_next": True, "num_slots": 7},
    ):
        job = changing_job(num_ranks, *texts, **changes)
        for found, run in zip(pool_of(num_ranks).run(run_job, job), expected, strict=True):
            for name in ("gradients", "parameters", "losses", "norms"):
                for first, second in zip(getattr(found, name), getattr(run, name), strict=True):
                    np.testing.assert_array_equal(first, second, err_msg=f"{name}, {changes}")


@pytest.mark.parametrize(
    ("num_ranks", "texts"),
    [
        (4, ("pp4", "pp2+2*tp1", "pp2:1,3+pp2:3,1")),
        (4, ("pp2+tp2", "pp4", "tp2+2*idle")),
        (6, ("pp4+2*tp1", "pp4@5,3,1,0+tp2@2,4", "tp2pp2+pp2")),
        (6, ("pp3@0,2,4+pp3@5,3,1", "pp4@1,2,3,4+tp1@0+tp1@5", "tp2pp3")),
    ],
)
def test_different_pipelines_do_not_deadlock_with_one_slot(
    num_ranks: int, texts: tuple[str, ...]
) -> None:
    job = changing_job(num_ranks, *texts, num_slots=1)
    assert_law(job, pool_of(num_ranks).run(run_job, job, timeout_s=HANG_S))


def test_with_one_hardware_queue_later_stages_scatter_after_their_schedule() -> None:
    job = law_job(4, "tp2pp2", MAIN_MODEL)
    assert_law(job, pool_of(4).run(run_as_with_one_queue, job, timeout_s=HANG_S))
    by_rank = pool_of(4).run(spans_as_with_one_queue, job)
    for rank, iterations in enumerate(by_rank):
        for spans in iterations:
            last_backward = [s for s in spans if s.name == "backward"][-1]
            first_scatter_ns = min(s.start_ns for s in spans if s.name == "scatter")
            is_first_stage = rank < 2
            assert (first_scatter_ns < last_backward.end_ns) == is_first_stage
            assert first_scatter_ns > last_backward.start_ns, "its gradient was received earlier"


def run_as_with_one_queue(job: Job) -> RankRun:
    """On every rank: the job as it would be run on a CUDA device."""
    with patch.object(ThreadTrack, "may_delay_compute", True):
        return run_job(job)


def spans_as_with_one_queue(job: Job) -> list[list[RecordedSpan]]:
    """On every rank: its spans."""
    with patch.object(ThreadTrack, "may_delay_compute", True):
        return spans_of_job(job, late_rank=0)


class TestThereAndBack:
    """A strategy that trained nothing changes nothing."""

    @pytest.mark.parametrize("knows_next", [False, True])
    @pytest.mark.parametrize(
        ("num_ranks", "texts"), [(2, ("tp2", "2*tp1")), (4, ("2*tp1+pp2", "tp2@3,0+2*idle"))]
    )
    def test_a_b_a_equals_a(self, num_ranks: int, texts: tuple[str, ...], knows_next: bool) -> None:
        # Two strategies with the same batches; the third batch is for the second strategy.
        jobs = [law_job(num_ranks, text) for text in texts]
        job = replace(
            jobs[0],
            strategies=texts,
            assignments=(*jobs[0].assignments[:2], jobs[1].assignments[2]),
            knows_next=knows_next,
        )
        for stayed, returned in pool_of(num_ranks).run(run_there_and_back, job):
            for first, second in zip(stayed, returned, strict=True):
                np.testing.assert_array_equal(first, second)


class TestSpans:
    """Overlap in the spans of a trace."""

    def spans(self, text: str) -> list[list[RecordedSpan]]:
        job = law_job(2, text, MAIN_MODEL)
        runs: list[list[list[RecordedSpan]]] = pool_of(2).run(spans_of_job, job, 1)
        return runs[0]

    def test_a_gather_ends_after_the_first_forward_began(self) -> None:
        # Rank 1 starts late, so nothing can have arrived at rank 0 before its forward began.
        every = self.spans("2*tp1")
        for iteration in (every[0], every[2]):  # rank 0 has no sequence in the second one
            first_forward = min(s.start_ns for s in iteration if s.name == "forward")
            gathers = [s for s in iteration if s.name == "gather"]
            assert len(gathers) == MAIN_MODEL.num_layers + 2
            assert all(s.end_ns > first_forward for s in gathers)
            waits = [s for s in iteration if s.name == "gather wait"]
            assert waits
            assert min(s.start_ns for s in waits) > first_forward

    def test_a_scatter_starts_before_the_last_backward_ends(self) -> None:
        num_early = 0
        every = self.spans("2*tp1")
        for iteration in (every[0], every[2]):  # rank 0 has no sequence in the second one
            last_backward = max(s.end_ns for s in iteration if s.name == "backward")
            scatters = [s for s in iteration if s.name == "scatter"]
            assert len(scatters) == MAIN_MODEL.num_layers + 2
            buckets = [s.detail["bucket"] for s in scatters]
            assert buckets == sorted(buckets, reverse=True)
            num_early += sum(s.start_ns < last_backward for s in scatters)
        # On a busy machine the track may be late for all but a few.
        assert num_early > 0

    def test_without_overlap_no_gather_or_scatter_overlaps(self) -> None:
        job = replace(law_job(2, "2*tp1"), overlap=False)
        every = pool_of(2).run(spans_of_job, job, 1)[0]
        for iteration in (every[0], every[2]):
            compute = [s for s in iteration if s.name in ("forward", "backward")]
            first, last = min(s.start_ns for s in compute), max(s.end_ns for s in compute)
            assert all(s.end_ns <= first for s in iteration if s.name == "gather")
            assert all(s.start_ns >= last for s in iteration if s.name == "scatter")


@pytest.mark.parametrize("text", ["2*tp2", "pp3:1,2,1+idle"])
def test_a_call_is_gathered_for_the_next_strategy_as_soon_as_its_buckets_are_updated(
    text: str,
) -> None:
    job = changing_job(4, "tp2+2*tp1", text)
    num_buckets = MAIN_MODEL.num_layers + 2
    for calls, log in pool_of(4).run(order_of_update, job):
        assert sorted(bucket for call in calls for bucket in call) == list(range(num_buckets))
        assert (len(calls) < num_buckets) == ("pp" in text)
        expected = []
        for call in calls:
            expected += [f"update {bucket}" for bucket in call] + [f"gather {call[0]}"]
        assert log == expected


@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
def test_reported_bytes_are_those_of_the_collectives_after_any_strategy(
    gradient_dtype: torch.dtype | None,
) -> None:
    texts = ("tp2@0,2+tp2@1,3", "4*tp1", "tp2@0,1+pp2@3,2", "tp2@2,1+2*idle")
    schedule = (0, 0, 1, 2, 3, 0, 2)
    job = replace(
        changing_job(4, *texts[:3], ranks_per_node=2),
        strategies=texts,
        schedule=schedule,
        assignments=tuple(
            spread(len(LENGTHS[0]), len(Strategy.parse(texts[i], 4).replicas)) for i in schedule
        ),
        batches=law_job(4, texts[0]).batches[:1] * len(schedule),
        gradient_dtype=gradient_dtype,
    )
    for iterations in pool_of(4).run(bytes_of_iterations, job):
        assert all(exchanged == reported > 0 for _, exchanged, reported in iterations), iterations
        for text in texts:
            assert len({reported for strategy, _, reported in iterations if strategy == text}) == 1


class TestKinds:
    """All three kinds of transfer, with nodes of two ranks."""

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("4*tp1", Collective.ALL_GATHER),
            ("2*tp2", Collective.ALL_TO_ALL),
            ("tp2@0,2+tp2@1,3", Collective.TWO_STEP),
            ("pp2@0,2+pp2@1,3", Collective.TWO_STEP),
            ("3*tp1+idle", Collective.TWO_STEP),
        ],
    )
    @pytest.mark.parametrize("num_slots", [1, 2])
    def test_every_kind_gives_the_same_update(
        self, text: str, kind: Collective, num_slots: int
    ) -> None:
        job = replace(law_job(4, text), ranks_per_node=2, num_slots=num_slots)
        assert set(pool_of(4).run(kind_of, job)) == {kind}
        check_law(job, 4)

    def test_kinds_may_change_between_iterations(self) -> None:
        texts = ("tp2@0,2+tp2@1,3", "4*tp1", "pp2+tp2")
        job = changing_job(4, *texts, ranks_per_node=2)
        assert_law(job, pool_of(4).run(run_job, job, timeout_s=HANG_S))


class TestOwners:
    """Any owner of a share gives the same update."""

    @pytest.mark.parametrize("ranks_per_node", [None, 2])
    @pytest.mark.parametrize("text", ["2*tp2", "tp2@2,1+2*tp1"])
    def test_chosen_owners_give_the_same_update_and_save_bytes(
        self, text: str, ranks_per_node: int | None
    ) -> None:
        by_number = replace(law_job(4, text), ranks_per_node=ranks_per_node)
        chosen = replace(by_number, owners_for=text)
        check_law(chosen, 4)
        before, after = (sum(pool_of(4).run(received_bytes, job)) for job in (by_number, chosen))
        assert after < before

    def test_all_kinds_give_the_same_update_with_owners_chosen_for_one(self) -> None:
        texts = ("tp2@0,2+tp2@1,3", "4*tp1", "pp2+tp2")
        job = changing_job(4, *texts, ranks_per_node=2, owners_for=texts[2])
        assert_law(job, pool_of(4).run(run_job, job, timeout_s=HANG_S))


def received_bytes(job: Job) -> int:
    """On every rank: in an iteration of the job's first strategy."""
    return build_engine(job).runtime_of(job.strategies[0]).regrouper.traffic.received_bytes


def kind_of(job: Job) -> Collective:
    """On every rank: of the job's first strategy."""
    return build_engine(job).runtime_of(job.strategies[0]).regrouper.collective


class TestMemory:
    """A rank holds what the current strategy needs, whatever else is in the pool."""

    SEVEN = ("tp4", "2*tp2", "4*tp1", "pp4", "tp2+2*idle", "tp2+pp2", "pp2@3,0+2*tp1@1,2")

    def probes(self, num_strategies: int) -> list[MemoryProbe]:
        texts = self.SEVEN[:num_strategies]
        job = law_job(4, texts[0], MAIN_MODEL)
        job = replace(
            job,
            strategies=texts,
            assignments=tuple(
                spread(4, len(Strategy.parse(text, 4).replicas), 4) for text in texts
            ),
            batches=(job.batches[0][:4],) * len(texts),
        )
        found: list[MemoryProbe] = pool_of(4).run(probe_memory, job)
        return found

    def test_arenas_follow_the_strategy_and_staging_does_not_grow_with_the_pool(self) -> None:
        by_pool = {num: self.probes(num) for num in (1, 3, 7)}
        for probes in by_pool.values():
            for probe in probes:
                assert probe.arenas == probe.needed
        for rank in range(4):
            seven = by_pool[7][rank]
            for num in (1, 3):
                probe = by_pool[num][rank]
                assert all(seven.arenas[text] == size for text, size in probe.arenas.items())
            assert seven.arenas["4*tp1"] > 2 * seven.arenas["tp4"]
            # Grows to the largest bucket of a strategy in which some rank holds the whole bucket,
            # or to a set, in which a stage has less than twice the largest bucket.
            assert seven.staging <= 2 * by_pool[3][rank].staging
        shard = by_pool[7][3].arenas["tp2+2*idle"]
        assert 0 < 4 * shard <= 1.1 * seven.arenas["4*tp1"] / 2, "the gradient of an idle rank"

    @pytest.mark.parametrize(
        "texts", [("tp4", "4*tp1"), ("4*tp1", "tp2@3,0+2*idle"), ("2*tp2", "tp2@0,1+2*tp1")]
    )
    def test_a_strategy_frees_its_memory_for_the_next(self, texts: tuple[str, str]) -> None:
        probes: list[ChangeProbe] = pool_of(4).run(probe_change, changing_job(4, *texts))
        for probe in probes:
            assert not any(probe.while_built), "nothing is kept while a model is built"
            to_second, to_first = probe.after_update
            assert to_second == probe.parameters[1]
            # Gradients are kept until the next forward, as those of the shards are among them.
            assert to_first == probe.parameters[0] + probe.gradients[1]
        assert any(len(probe.while_built) > 0 for probe in probes)

    def test_strategies_of_one_role_share_a_model(self) -> None:
        text = "2*tp2"
        job = replace(
            law_job(4, text),
            strategies=(text, "tp2+2*tp1", "tp2+2*idle"),
            assignments=(spread(7, 2), spread(7, 3), spread(7, 1)),
            batches=law_job(4, text).batches[:1] * 3,
        )
        found: list[MemoryProbe] = pool_of(4).run(probe_memory, job)
        assert [probe.num_models for probe in found] == [1, 1, 2, 2]


class TestFaults:
    """One rank's error ends the job on all ranks long before the timeout, naming rank and phase."""

    @pytest.mark.parametrize(
        ("phase", "culprit", "where"),
        [
            # A first stage meets its error without the others.
            ("gather", 0, ("gather of bucket 0, unit embedding", "phase 'forward-backward'")),
            # A second one waits for the first one, which waits for this gather.
            ("gather", 1, ("gather of bucket 0, unit embedding", "rank 1: regrouping failed")),
            ("forward", 1, ("rank 1, phase 'forward-backward'",)),
            ("scatter", 1, ("scatter of bucket 3, unit output", "rank 1, phase 'scatter'")),
            ("optimizer", 1, ("rank 1, phase 'optimizer'",)),
        ],
    )
    def test_the_failing_rank_reports_its_error_and_the_others_end(
        self, phase: str, culprit: int, where: tuple[str, ...], tmp_path: Path
    ) -> None:
        job = law_job(3, "pp2+tp1", SHORT_MODEL)
        found = failures_of(job, 3, phase, culprit, tmp_path, timeout_s=HANG_S)
        for rank, failure in enumerate(found):
            assert failure is not None, f"rank {rank} hangs"
            if rank == culprit:
                assert f"injected in {phase}" in failure.text
                assert all(part in failure.text for part in where), failure.text
            elif phase != "optimizer":  # the others notice in their next gather
                assert failure.kind in ("RuntimeError", "ended"), failure
                assert f"rank {rank}" in failure.text
