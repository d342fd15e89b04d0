"""``--trace``: what a run of four ranks writes, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.hydraulis.loop import entry
from megatron.hydraulis.observability.trace import Spans, rank_file, read_trace
from megatron.hydraulis.planner.plan import IterationPlan
from tests.support.forked_job import Kill, run_job
from tests.support.tiny_corpus import tiny_command
from tests.support.trace_probes import one_f_one_b, operations, overlaps
from tests.support.training_run import Launch, Run

pytestmark = pytest.mark.distributed

STRATEGY, NUM_RANKS = "pp2+tp2", 4
TRACED = (2, 3)
NUM_MICRO_BATCHES_AT_LEAST = 3
"""The pipeline has so many in a traced iteration: fewer would show no 1F1B."""
FLAGS = (
    *("--max-tokens-per-micro-batch", "96", "--trace-iterations", f"{TRACED[0]}..{TRACED[1]}"),
    *("--eval-interval", "2", "--eval-iters", "1"),
)


@dataclass(frozen=True)
class Traced:
    run: Run
    folder: Path
    spans: Spans
    plans: dict[int, IterationPlan]


@pytest.fixture(scope="module")
def traced(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("trace")
    run = launch(STRATEGY, NUM_RANKS, "--trace", str(folder), *FLAGS)
    plans = {number: run.plans[number - 1] for number in TRACED}
    return Traced(run, folder, read_trace(folder / "trace.json"), plans)


@pytest.mark.parametrize("is_planned", [False, True])
def test_each_stage_runs_each_micro_batch_once_in_the_order_of_1f1b(
    traced: Traced, is_planned: bool
) -> None:
    most = 0
    for number, plan in traced.plans.items():
        for replica in plan.replicas:
            for rank in replica.ranks:
                position = replica.replica.position_of(rank)
                assert position is not None
                own = traced.spans.where(iteration=number, rank=rank, is_planned=is_planned)
                wanted = one_f_one_b(len(replica.micro_batches), replica.scheme.pp, position.stage)
                assert operations(own) == wanted
                assert set(own.named("forward", "backward").values("stage")) <= {position.stage}
        most = max(most, len(plan.replicas[0].micro_batches), len(plan.replicas[1].micro_batches))
    assert most >= NUM_MICRO_BATCHES_AT_LEAST


def test_a_pipeline_passes_micro_batches_on(traced: Traced) -> None:
    """The clocks of two ranks agree, which the order on a single rank cannot show."""
    for number, plan in traced.plans.items():
        ((first, last),) = [r.ranks for r in plan.replicas if r.scheme.pp == 2]
        own = traced.spans.where(iteration=number, is_planned=False)
        for forward in own.where(rank=last, name="forward"):
            key = {"micro_batch": forward.detail["micro_batch"], "rank": first}
            assert own.where(name="forward", **key).last_end_us <= forward.end_us
            backward = own.where(rank=last, name="backward", micro_batch=key["micro_batch"])
            first_end_us = min(span.end_us for span in own.where(name="backward", **key))
            assert first_end_us >= backward.first_start_us


def test_spans_of_one_thread_follow_one_another(traced: Traced) -> None:
    for rank in range(NUM_RANKS):
        own = traced.spans.where(rank=rank, is_planned=False)
        assert own.where(track="compute")
        for track in ("compute", "host", "iteration"):
            assert overlaps(own.where(track=track)) == []
    events = json.loads((traced.folder / "trace.json").read_text())
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            times = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(times)
    for times_us in threads.values():
        times_us.sort()
        for (_, end_us), (start_us, _) in pairwise(times_us):
            assert start_us >= end_us - 2e-3, "rounded to 1 ns each"


def test_spans_are_within_their_iteration(traced: Traced) -> None:
    measured = traced.spans.where(is_planned=False)
    assert sorted(set(measured.values("iteration"))) == list(TRACED)
    assert set(measured.values("rank")) == set(range(NUM_RANKS))
    for rank in range(NUM_RANKS):
        for number in TRACED:
            own = measured.where(rank=rank, iteration=number)
            (whole,) = own.where(name="iteration")
            work = own.named("forward", "backward", "pipeline wait", "optimizer")
            assert whole.start_us <= work.first_start_us
            assert work.last_end_us <= whole.end_us
            assert whole.detail["strategy"] == traced.plans[number].strategy
            assert own.where(name="planning wait").last_end_us <= whole.start_us


def test_every_rank_regroups_every_bucket_and_updates(traced: Traced) -> None:
    buckets: set[tuple[int | str, ...]] = set()
    for rank in range(NUM_RANKS):
        # Also for the evaluation in between, whose parameters the next iteration uses.
        assert traced.spans.where(rank=rank, name="gather")
        for number in TRACED:
            own = traced.spans.where(rank=rank, iteration=number, is_planned=False)
            scattered = own.where(name="scatter").values("bucket")
            assert len(set(scattered)) == len(scattered) > 1
            buckets.add(tuple(sorted(scattered)))
            (optimizer,) = own.where(name="optimizer")
            assert own.where(name="scatter").last_end_us <= optimizer.end_us
    assert len(buckets) == 1, "all ranks take part in the scatter of all buckets"


def overlaps_compute(spans: Spans) -> tuple[bool, bool]:
    """Whether, on any rank in any iteration, a scatter starts before the last backward ends; and
    whether a gather of parameters of the same iteration ends after the first forward began."""
    scatters_early = gathers_late = False
    for rank in range(NUM_RANKS):
        for number in TRACED:
            own = spans.where(rank=rank, iteration=number, is_planned=False)
            forwards = own.where(name="forward")
            scatters = own.where(name="scatter")
            scatters_early |= scatters.first_start_us < own.where(name="backward").last_end_us
            gathers_late |= any(
                # One that starts later is for the next iteration.
                gather.start_us < forwards.last_end_us and gather.end_us > forwards.first_start_us
                for gather in own.where(name="gather")
            )
    return scatters_early, gathers_late


@pytest.mark.parametrize(
    "flags", [(), ("--no-regroup-overlap",)], ids=["overlapped", "not overlapped"]
)
def test_regrouping_overlaps_compute_unless_disabled(
    flags: tuple[str, ...], launch: Launch, tmp_path: Path
) -> None:
    # A plan made when its iteration begins: parameters are not gathered ahead.
    extra = ("--plan-ahead", "0", "--eval-iters", "0", "--train-iters", str(TRACED[-1]), *flags)
    launch(STRATEGY, NUM_RANKS, "--trace", str(tmp_path), *FLAGS, *extra)
    spans = read_trace(tmp_path / "trace.json")
    is_overlapped = not flags
    assert overlaps_compute(spans) == (is_overlapped, is_overlapped)


def test_planned_spans_end_at_the_planned_times(traced: Traced) -> None:
    for number, plan in traced.plans.items():
        starts = []
        for replica in plan.replicas:
            first_stage = traced.spans.where(
                iteration=number, is_planned=True, rank=replica.ranks[0]
            ).named("forward", "backward")
            starts.append(first_stage.first_start_us)
            length_s = (first_stage.last_end_us - first_stage.first_start_us) * 1e-6
            assert length_s == pytest.approx(replica.predicted_time_s, abs=1e-8)
        wholes = traced.spans.where(iteration=number, name="iteration")
        assert starts == [wholes.first_start_us] * len(starts)


def test_trace_files_are_complete_and_the_run_prints_their_place(traced: Traced) -> None:
    for rank in range(NUM_RANKS):
        assert json.loads(rank_file(traced.folder, rank).read_text())
    assert f"trace: {traced.folder / 'trace.json'};" in traced.run.outcome.stdout


def test_a_killed_run_leaves_a_readable_trace(corpus_prefix: str, tmp_path: Path) -> None:
    argv = tiny_command(
        corpus_prefix,
        tmp_path / "run",
        *("--strategy", "2*tp1", "--train-iters", "100000", "--trace", str(tmp_path / "trace")),
        *("--trace-iterations", "1..100000"),
    )
    kill = Kill(rank=1, after=" iteration        3/")
    outcome = run_job(argv, 2, tmp_path / "output", program=entry.main, kill=kill)
    assert outcome.statuses[1] == -9
    spans = read_trace(tmp_path / "trace")
    for rank in range(2):
        own = spans.where(rank=rank, is_planned=False)
        for number in (1, 2):
            assert own.where(iteration=number, name="backward")
