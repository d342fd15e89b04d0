"""Reading run folders in any state, and numbers against figures calculated by hand."""

import json
import shutil
import statistics
from pathlib import Path

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import METRICS_FILE_NAME
from megatron.hydraulis.observability.report_data import busy_fraction, read_run
from tests.unit.observability.run_folders import (
    STRATEGY,
    make_pool_records,
    make_record,
    make_records,
    run_of,
    write_config,
    write_run,
    write_trace,
)


def test_a_finished_run_needs_no_note(tmp_path: Path) -> None:
    run = run_of(tmp_path, make_records())
    assert run.notes == ()
    assert run.starts == {1}
    assert [record.iteration for record in run.steady] == [2, 3, 4, 5, 6, 7, 8]
    (strategy,) = run.strategies
    assert [(replica.scheme, replica.ranks) for replica in strategy.replicas] == [
        ("tp2", (0, 1)),
        ("tp1", (2,)),
        ("tp1", (3,)),
    ]


def test_an_interrupted_run_shows_its_progress(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(5))
    write_config(tmp_path)
    with (tmp_path / METRICS_FILE_NAME).open("a") as file:
        file.write('{"iteration": 6, "lm_lo')
    run = read_run(tmp_path)
    assert [record.iteration for record in run.records] == [1, 2, 3, 4, 5]
    cut, came = run.notes
    assert "last line" in cut
    assert came == "The run has reached iteration 5 of 8: it ended early or is still running."
    config = json.loads((tmp_path / "config.json").read_text())
    for has_ended, why in (
        (False, "it was interrupted or is still running"),
        (True, "an --exit option ended it"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"has_ended": has_ended}))
        assert read_run(tmp_path).notes[1:] == (f"The run has reached iteration 5 of 8: {why}.",)


def test_iterations_that_ran_twice_count_once(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(6))
    run = run_of(tmp_path, [make_record(number, lm_loss=1.0) for number in (5, 6, 7, 8)])
    assert [record.iteration for record in run.records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record.lm_loss for record in run.records[4:]] == [1.0] * 4
    assert run.starts == {1, 5}
    (note,) = run.notes
    assert "from iteration 5 after it had reached 6" in note


def test_notes_of_the_configuration_are_in_the_report(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(8))
    write_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"notes": ["Losses mean nothing."]}))
    assert read_run(tmp_path).notes == ("Losses mean nothing.",)


def test_a_resumed_run_continues_the_run_that_was_moved_away(tmp_path: Path) -> None:
    write_run(tmp_path / "earlier.1", make_records(3))
    write_run(tmp_path / "earlier.2", [make_record(number) for number in (3, 4, 5, 6)])
    write_run(tmp_path, [make_record(number) for number in (5, 6, 7, 8)])
    write_config(tmp_path)
    run = read_run(tmp_path)
    assert [record.iteration for record in run.records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.starts == {1, 3, 5}
    assert "iterations 3 to 4 are from earlier.2" in run.notes[0]
    assert "iterations 1 to 2 are from earlier.1" in run.notes[1]


def test_independent_earlier_runs_are_only_named(tmp_path: Path) -> None:
    write_run(tmp_path / "earlier.1", make_records(3))
    write_run(tmp_path / "earlier.10", make_records(4))
    write_run(tmp_path, make_records())
    write_config(tmp_path)
    run = read_run(tmp_path)
    assert len(run.records) == 8
    (note,) = run.notes
    assert "earlier.10, earlier.1" in note
    assert len(read_run(tmp_path / "earlier.1").records) == 3


def test_a_damaged_earlier_folder_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "earlier.1").mkdir()
    (tmp_path / "earlier.1" / METRICS_FILE_NAME).write_text("no json\n")
    run = run_of(tmp_path, [make_record(number) for number in (5, 6)])
    assert len(run.records) == 2
    (note,) = run.notes
    assert "earlier.1 is not included" in note


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"strategies": [{"name": "a"}]}',
        '{"model": "text"}',
        "[" * 100_000,
        '{"settings": [1]}',
    ],
)
def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path: Path, content: str | None) -> None:
    write_run(tmp_path, make_records())
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    run = read_run(tmp_path)
    assert run.strategies == ()
    assert run.num_train_iters is None
    assert any("config.json" in note for note in run.notes)
    assert all(row["scheme"] == "" for row in run.numbers.replicas)


def test_a_folder_without_an_iteration_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(HydraulisError, match=r"needs a run folder but .* is not a folder; give"):
        read_run(tmp_path / "absent")
    with pytest.raises(HydraulisError, match="No such file"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE_NAME).touch()
    with pytest.raises(HydraulisError, match="has 0 complete lines; train"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE_NAME).write_text('{"iteration": 1')
    with pytest.raises(HydraulisError, match="has 0 complete lines; train"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE_NAME).write_text("{}\n")
    with pytest.raises(HydraulisError, match="line 1 of 1 is not"):
        read_run(tmp_path)


def test_the_trace_is_found_where_the_run_wrote_it_or_was_moved_to(tmp_path: Path) -> None:
    records = make_records()
    for run_dir, trace, named in (
        (tmp_path / "a", tmp_path / "a" / "trace", str(tmp_path / "a" / "trace")),
        (tmp_path / "b", tmp_path / "elsewhere", str(tmp_path / "elsewhere")),
        (tmp_path / "c", tmp_path / "c" / "spans", "/gone/spans"),
    ):
        write_run(run_dir, records)
        write_config(run_dir, trace=named)
        write_trace(trace, records[:3])
        assert {span.detail["iteration"] for span in read_run(run_dir).spans} == {1, 2, 3}
    shutil.rmtree(tmp_path / "elsewhere")
    assert len(read_run(tmp_path / "b").spans) == 0
    given = read_run(tmp_path / "b", trace=tmp_path / "c" / "spans")
    assert len(given.spans) > 0
    with pytest.raises(HydraulisError, match="give its folder"):
        read_run(tmp_path / "b", trace=tmp_path / "elsewhere")


def test_the_trace_of_another_run_in_the_folder_is_not_used(tmp_path: Path) -> None:
    records = make_records()
    write_trace(tmp_path / "trace", records)
    write_run(tmp_path, records)
    assert len(read_run(tmp_path).spans) > 0
    write_config(tmp_path, trace=None)
    assert len(read_run(tmp_path).spans) == 0
    earlier = write_run(tmp_path / "earlier.1", records)
    write_config(earlier, trace=str(tmp_path / "trace"))
    assert len(read_run(earlier).spans) == 0


def test_a_damaged_trace_is_a_note(tmp_path: Path) -> None:
    records = make_records()
    write_run(tmp_path, records)
    write_config(tmp_path)
    write_trace(tmp_path / "trace", records)
    path = tmp_path / "trace" / "trace_rank_0002.json"
    path.write_text(path.read_text().replace('"ph": "X"', '"ph": "Q"'))
    run = read_run(tmp_path)
    assert len(run.spans) == 0
    (note,) = run.notes
    assert "is not included" in note


def test_a_trace_of_another_strategy_is_not_used(tmp_path: Path) -> None:
    write_run(tmp_path, make_pool_records())
    write_config(tmp_path)
    write_trace(tmp_path / "trace", make_records())
    assert read_run(tmp_path).numbers.measured_replicas == []


def test_totals_exclude_the_first_iteration_only_from_times(tmp_path: Path) -> None:
    numbers = run_of(tmp_path, make_records(plan_wait_s=0.0055)).numbers
    totals = numbers.totals
    assert totals["tokens_per_s"] == pytest.approx(22_000 / 2.2)
    assert totals["num_tokens"] == 8 * 22_000
    assert totals["iteration_time_s"] == 2.2
    assert (totals["first_loss"], totals["last_loss"]) == (9.0 - 1 / 8, 8.0)
    assert totals["plan_wait_s"] == pytest.approx(7 * 0.0055)
    assert totals["plan_wait_fraction"] == pytest.approx(0.0025)
    assert totals["regroup_bytes"] == 5_000_000
    assert totals["gather_wait_fraction"] == pytest.approx(0.005)
    assert totals["scatter_wait_fraction"] == pytest.approx(0.01)
    assert totals["column_bytes"] == 7_000_000
    assert totals["column_wait_fraction"] == pytest.approx(0.015)
    assert totals["padding_fraction"] == pytest.approx(0.004)
    assert totals["idle_fraction"] == pytest.approx(1 - 1 / 1.07)
    assert totals["marked_plans"] == {}


def test_prediction_of_iterations(tmp_path: Path) -> None:
    records = [make_record(1, iteration_time_s=50.0)] + [
        make_record(number, predicted_time_s=1.0, iteration_time_s=time_s)
        for number, time_s in ((2, 2.0), (3, 2.5), (4, 4.0))
    ]
    prediction = run_of(tmp_path, records).numbers.iterations
    assert prediction is not None
    assert prediction["num_compared"] == 3
    assert prediction["factor"] == 2.5
    # Errors 2/1 - 1, 2.5/1 - 1, 4/1 - 1.
    assert prediction["error"] == pytest.approx(1.5)
    assert prediction["error"] == statistics.median(
        record.prediction_error for record in records[1:] if record.prediction_error is not None
    )
    # Quartiles of three values are the middles between them.
    assert prediction["half"] == pytest.approx((2.25, 3.25))


def test_the_static_strategy_has_the_times_of_the_planner(tmp_path: Path) -> None:
    def times(**found: tuple[float, float]) -> dict[str, dict[str, float]]:
        return {name: {"bound_s": b, "found_s": f} for name, (b, f) in found.items()}

    records = [
        make_record(1, strategy_times_s=times(a=(0.9, 1.0), b=(1.1, 1.5), c=(0.8, 1.1))),
        make_record(2, strategy_times_s=times(a=(1.6, 3.0), b=(0.5, 2.0))),
        # Of a version or a fallback without such times.
        make_record(3),
    ]
    static = run_of(tmp_path, records).numbers.static
    assert static is not None
    # c does not hold the second batch. a takes 1 + 3 s, b 1.5 + 2 s.
    assert (static["name"], static["num_iterations"]) == ("b", 2)
    assert (static["chosen_s"], static["found_s"]) == (3.0, 3.5)
    # a takes at least 1 + 2 s, because it would have been chosen for the second batch; b 1.1 + 2 s.
    assert static["bound_s"] == pytest.approx(3.0)
    assert static["gain"] == pytest.approx((1.0, 3.5 / 3.0))
    assert run_of(tmp_path / "none", records[2:]).numbers.static is None
    alone = make_record(3, strategy_times_s=times(c=(1.0, 1.0)))
    assert run_of(tmp_path / "two", [*records[:2], alone]).numbers.static is None


def test_idle_share_is_that_of_the_ranks_of_replicas() -> None:
    # tp2 for 1 s, tp1 for 0.5 s twice: of 4 rank-seconds 1 is idle.
    record = make_record(replica_times_s=(1.0, 0.5, 0.5), imbalance=4 / 3)
    assert record.idle_share == pytest.approx(0.25)
    assert make_record(imbalance=1.0 - 1e-9).idle_share == 0.0


def test_strategies_of_a_pool_with_one_that_never_ran(tmp_path: Path) -> None:
    numbers = run_of(tmp_path, make_pool_records(), (STRATEGY, "long", "pairs")).numbers
    assert [(row["name"], row["num_iterations"]) for row in numbers.strategies] == [
        ("pairs", 8),
        ("long", 4),
        (STRATEGY, 0),
    ]
    assert sum(row["num_tokens"] for row in numbers.strategies) == numbers.totals["num_tokens"]
    pairs, long, unused = numbers.strategies
    assert pairs["idle_fraction"] == pytest.approx(0.05)
    assert long["idle_fraction"] == 0.0
    assert unused["measured_s"] is None
    assert [(row["strategy"], row["replica"], row["scheme"]) for row in numbers.replicas] == [
        ("pairs", 0, "tp2"),
        ("pairs", 1, "tp2"),
        ("long", 0, "tp4"),
    ]
    assert numbers.replicas[1]["idle_fraction"] == pytest.approx(0.1)


def test_measured_replicas_come_from_the_trace(tmp_path: Path) -> None:
    records = make_records(replica_times_s=(1.0, 0.75, 0.0))
    write_trace(tmp_path / "trace", records)
    numbers = run_of(tmp_path, records).numbers
    # The third replica never had a sequence.
    assert len(numbers.measured_replicas) == 2 * len(records)
    prediction = numbers.replicas_traced
    assert prediction is not None
    assert prediction["num_compared"] == 2 * (len(records) - 1)
    assert prediction["factor"] == pytest.approx(2.0)
    assert prediction["error"] == pytest.approx(1.0)
    assert [row["traced_measured_s"] for row in numbers.replicas[:2]] == pytest.approx([2.0, 1.5])
    # tp2 for 2 s, tp1 for 1.5 s and not at all: of 8 rank-seconds 2.5 are idle.
    assert numbers.totals["measured_idle_fraction"] == pytest.approx(2.5 / 8)
    assert [row["measured_idle_fraction"] for row in numbers.replicas] == pytest.approx(
        [0, 0.25, 1]
    )
    assert numbers.replicas[2]["traced"] is None
    for row in numbers.ranks:
        assert row["busy_fraction"] + row["wait_fraction"] + row["idle_fraction"] == pytest.approx(
            1.0
        )
    assert numbers.ranks[0]["busy_fraction"] == pytest.approx(2.0 / 2.2)
    assert numbers.ranks[3]["idle_fraction"] == pytest.approx(1.0)


def test_marked_plans_are_counted_over_processes(tmp_path: Path) -> None:
    counts = [(1, 0), (2, 1), (3, 1), (4, 2), (3, 1), (4, 1), (5, 2)]
    records = [make_record(n, num_marked_plans=m, plan_status="greedy") for n, m in counts]
    # Of iterations 3 and 4 the second process counts: 2, 3 and 5 are marked.
    assert run_of(tmp_path, records).numbers.totals["marked_plans"] == {"greedy": 3}


def test_busy_share_counts_only_iterations_a_replica_takes_part_in() -> None:
    records = [
        make_record(1, replica_times_s=(1.0, 0.5)),
        make_record(2, replica_times_s=(2.0,)),
        make_record(3, replica_times_s=(1.0, 4.0)),
    ]
    assert busy_fraction(records, replica=0) == pytest.approx(4 / 7)  # of 1 + 2 + 4
    assert busy_fraction(records, replica=1) == pytest.approx(4.5 / 5)  # of 1 + 4


def test_a_replica_without_sequences_was_never_busy() -> None:
    assert busy_fraction([make_record(replica_times_s=(1.0, 0.0))], replica=0) == 1.0
    assert busy_fraction([make_record(replica_times_s=(1.0, 0.0))], replica=1) == 0.0
    assert busy_fraction([make_record(replica_times_s=(0.0, 0.0))], replica=1) is None


def test_the_busy_share_of_a_strategy_weighs_iterations_by_makespan() -> None:
    times_s = ((1.0, 0.5), (1.0, 4.0))
    records = [make_record(replica_times_s=each) for each in times_s]
    assert busy_fraction(records) == pytest.approx(0.65)  # 6.5 of 2 + 8
    assert busy_fraction([make_record(replica_times_s=(2.0,))]) == 1.0
