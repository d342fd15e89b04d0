"""What is read out of a run folder, whatever state it is in."""

import shutil
from pathlib import Path

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability import METRICS_FILE_NAME
from megatron.hydraulis.observability.report_numbers import numbers_of
from megatron.hydraulis.observability.report_run import read_run
from tests.unit.observability.records_for_tests import make_record
from tests.unit.observability.run_folders import (
    make_pool_records,
    make_records,
    write_config,
    write_run,
    write_trace,
)


def test_a_finished_run_needs_no_note(tmp_path: Path) -> None:
    write_run(tmp_path, make_records())
    write_config(tmp_path)
    run = read_run(tmp_path)
    assert run.notes == ()
    assert run.starts == {1}
    assert [record.iteration for record in run.steady] == [2, 3, 4, 5, 6, 7, 8]
    (strategy,) = run.strategies
    assert [(replica.scheme, replica.ranks) for replica in strategy.replicas] == [
        ("tp2", (0, 1)),
        ("tp1", (2,)),
        ("tp1", (3,)),
    ]


def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(5))
    write_config(tmp_path)
    with (tmp_path / METRICS_FILE_NAME).open("a") as file:
        file.write('{"iteration": 6, "lm_lo')
    run = read_run(tmp_path)
    assert [record.iteration for record in run.records] == [1, 2, 3, 4, 5]
    cut, came = run.notes
    assert "last line" in cut
    assert "iteration 5 of 8" in came


def test_iterations_that_ran_twice_count_once(tmp_path: Path) -> None:
    write_run(tmp_path, make_records(6))
    again = [make_record(number, lm_loss=1.0) for number in (5, 6, 7, 8)]
    write_run(tmp_path, again)
    write_config(tmp_path)
    run = read_run(tmp_path)
    assert [record.iteration for record in run.records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record.lm_loss for record in run.records[4:]] == [1.0] * 4
    assert run.starts == {1, 5}
    (note,) = run.notes
    assert "from iteration 5 after it had come to 6" in note


def test_a_resumed_run_goes_on_from_the_folder_set_aside(tmp_path: Path) -> None:
    write_run(tmp_path / "earlier.1", make_records(3))
    write_run(tmp_path / "earlier.2", [make_record(number) for number in (3, 4, 5, 6)])
    write_run(tmp_path, [make_record(number) for number in (5, 6, 7, 8)])
    write_config(tmp_path)
    run = read_run(tmp_path)
    assert [record.iteration for record in run.records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.starts == {1, 3, 5}
    assert "iterations 3 to 4 are those of earlier.2" in run.notes[0]
    assert "iterations 1 to 2 are those of earlier.1" in run.notes[1]


def test_earlier_runs_of_their_own_are_only_named(tmp_path: Path) -> None:
    write_run(tmp_path / "earlier.1", make_records(3))
    write_run(tmp_path / "earlier.10", make_records(4))
    write_run(tmp_path, make_records())
    write_config(tmp_path)
    run = read_run(tmp_path)
    assert len(run.records) == 8
    (note,) = run.notes
    assert "earlier.10, earlier.1" in note
    assert len(read_run(tmp_path / "earlier.1").records) == 3


def test_a_damaged_earlier_folder_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "earlier.1").mkdir()
    (tmp_path / "earlier.1" / METRICS_FILE_NAME).write_text("no json\n")
    write_run(tmp_path, [make_record(number) for number in (5, 6)])
    write_config(tmp_path, train_iters=6)
    run = read_run(tmp_path)
    assert len(run.records) == 2
    (note,) = run.notes
    assert "earlier.1 was left out" in note


@pytest.mark.parametrize("content", [None, "{", "[]", '{"strategies": [{"name": "a"}]}'])
def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path: Path, content: str | None) -> None:
    write_run(tmp_path, make_records())
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    run = read_run(tmp_path)
    assert run.strategies == ()
    assert run.num_train_iters is None
    assert any("config.json" in note for note in run.notes)
    assert all(row.scheme == "" for row in numbers_of(run).replicas)


def test_a_folder_without_an_iteration_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(HydraulisError, match=r"is of a run folder but .* is none; give"):
        read_run(tmp_path / "absent")
    with pytest.raises(HydraulisError, match="No such file"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE_NAME).touch()
    with pytest.raises(HydraulisError, match="has 0 whole lines; train"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE_NAME).write_text('{"iteration": 1')
    with pytest.raises(HydraulisError, match="has 0 whole lines; train"):
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


def test_the_trace_of_another_run_in_the_folder_is_not_taken_for_this_one(tmp_path: Path) -> None:
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
    assert "is left out" in note


def test_a_trace_of_another_strategy_tells_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, make_pool_records())
    write_config(tmp_path)
    write_trace(tmp_path / "trace", make_records())
    assert numbers_of(read_run(tmp_path)).measured_replicas == ()
