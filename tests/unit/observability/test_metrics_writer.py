import json
from pathlib import Path

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability import METRICS_FILE_NAME, MetricsWriter, read_metrics
from tests.support.full_disk import largest_file
from tests.unit.observability.records_for_tests import make_record


def test_each_line_is_in_the_file_before_the_next_iteration(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    with MetricsWriter(run_dir) as writer:
        for iteration in (1, 2):
            writer.write(make_record(iteration))
            lines = (run_dir / METRICS_FILE_NAME).read_text().splitlines()
            assert [json.loads(line)["iteration"] for line in lines] == list(
                range(1, iteration + 1)
            )


def test_records_come_back_as_written(tmp_path: Path) -> None:
    records = [make_record(iteration) for iteration in (1, 2, 3)]
    with MetricsWriter(tmp_path) as writer:
        for record in records:
            writer.write(record)
    assert read_metrics(tmp_path) == records


def test_a_resumed_run_appends_and_its_record_counts(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for iteration in (1, 2, 3):
            writer.write(make_record(iteration))
    with MetricsWriter(tmp_path) as writer:
        writer.write(make_record(2, lm_loss=1.0))
    assert [(r.iteration, r.lm_loss) for r in read_metrics(tmp_path)] == [
        (1, 8.875),
        (2, 1.0),
        (3, 8.625),
    ]


@pytest.mark.parametrize("whole_lines", [0, 2])
def test_a_line_cut_off_by_a_kill_harms_no_other(tmp_path: Path, whole_lines: int) -> None:
    with MetricsWriter(tmp_path) as writer:
        for iteration in range(1, whole_lines + 1):
            writer.write(make_record(iteration))
    with open(tmp_path / METRICS_FILE_NAME, "a") as file:
        file.write('{"iteration": 3, "lm_lo')
    assert len(read_metrics(tmp_path)) == whole_lines
    with MetricsWriter(tmp_path) as writer:
        writer.write(make_record(9))
    assert [record.iteration for record in read_metrics(tmp_path)] == [
        *range(1, whole_lines + 1),
        9,
    ]


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE_NAME).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(
        HydraulisError, match=r"iteration 7 need \d+ bytes in .*No space left.*free space"
    ):
        writer.write(make_record(7))
    writer.close()


@pytest.mark.fault
def test_a_disk_that_fills_up_within_a_line_leaves_whole_lines(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(make_record(1))
        line_bytes = (tmp_path / METRICS_FILE_NAME).stat().st_size
        with (
            largest_file(line_bytes + line_bytes // 2),
            pytest.raises(HydraulisError, match="metrics of iteration 2"),
        ):
            writer.write(make_record(2))
        assert [record.iteration for record in read_metrics(tmp_path)] == [1]
        writer.write(make_record(3))
    assert [record.iteration for record in read_metrics(tmp_path)] == [1, 3]


def test_a_run_folder_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HydraulisError, match="choose another --run-dir"):
        MetricsWriter(tmp_path / "file" / "run")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(make_record(1))
    with open(tmp_path / METRICS_FILE_NAME, "a") as file:
        file.write("not json\n")
    with pytest.raises(HydraulisError, match="line 2 of 2 is not"):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HydraulisError, match="No such file"):
        read_metrics(tmp_path)
