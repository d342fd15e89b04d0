from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability import METRICS_FILE_NAME, MetricsWriter, write_summary
from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.strategy_panels import busy_shares_of_strategies
from megatron.hydraulis.observability.summary import busy_shares, replica_times_ms
from tests.unit.observability.records_for_tests import make_record


def write_run(run_dir: Path, records: list[IterationRecord]) -> None:
    with MetricsWriter(run_dir) as writer:
        for record in records:
            writer.write(record)


def test_times_of_strategies_with_unequal_numbers_of_replicas() -> None:
    records = [
        make_record(1, replica_times_s=(1.0, 0.5)),
        make_record(2, replica_times_s=(2.0,)),
    ]
    np.testing.assert_array_equal(replica_times_ms(records), [[1000.0, 2000.0], [500.0, np.nan]])


def test_busy_share_counts_only_iterations_a_replica_takes_part_in() -> None:
    records = [
        make_record(1, replica_times_s=(1.0, 0.5)),
        make_record(2, replica_times_s=(2.0,)),
        make_record(3, replica_times_s=(1.0, 4.0)),
    ]
    # Replica 0: 4 of 1 + 2 + 4; replica 1: 4.5 of 1 + 4.
    np.testing.assert_allclose(busy_shares(records), [4 / 7, 4.5 / 5])


def test_a_replica_without_sequences_was_never_busy() -> None:
    np.testing.assert_array_equal(busy_shares([make_record(replica_times_s=(1.0, 0.0))]), [1, 0])
    np.testing.assert_array_equal(busy_shares([make_record(replica_times_s=(0.0, 0.0))]), [0, 0])


@pytest.mark.parametrize("num_replicas", [0, 1, 6, 7, 242])
@pytest.mark.parametrize("num_iterations", [1, 25])
def test_a_picture_for_any_number_of_replicas(
    tmp_path: Path, num_replicas: int, num_iterations: int
) -> None:
    times_s = tuple(1.0 / (1 + number) for number in range(num_replicas))
    write_run(
        tmp_path,
        [make_record(i, replica_times_s=times_s) for i in range(1, num_iterations + 1)],
    )
    path = write_summary(tmp_path)
    assert path == tmp_path / "summary.png"
    with Image.open(path) as image:
        colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert image.format == "PNG"
    assert colors is not None
    assert len(colors) > 100


def test_shares_of_strategies_weigh_their_iterations_by_makespan() -> None:
    records = [
        make_record(1, strategy="a", replica_times_s=(1.0, 0.5)),
        make_record(2, strategy="b", replica_times_s=(2.0,)),
        make_record(3, strategy="a", replica_times_s=(1.0, 4.0)),
        make_record(4, strategy="c", replica_times_s=(0.0, 0.0)),
    ]
    # Of a: 6.5 of 2 + 8.
    shares = busy_shares_of_strategies(records)
    assert list(shares) == ["a", "b", "c"]
    assert shares == pytest.approx({"a": 0.65, "b": 1.0, "c": 0.0})


@pytest.mark.parametrize("num_strategies", [2, 6, 9])
def test_a_picture_of_any_number_of_strategies(tmp_path: Path, num_strategies: int) -> None:
    names = [f"{'a long name of ' * (i % 2)}strategy {i}" for i in range(num_strategies)]
    write_run(
        tmp_path,
        [
            make_record(i + 1, strategy=names[i % len(names)], replica_times_s=(1.0,) * (1 + i % 3))
            for i in range(20)
        ],
    )
    several = write_summary(tmp_path).read_bytes()
    # Labels are of replicas, which are not drawn here.
    assert write_summary(tmp_path, replica_labels=["tp2"]).read_bytes() == several


def test_losses_that_are_missing_leave_a_gap(tmp_path: Path) -> None:
    write_run(tmp_path, [make_record(i, lm_loss=None if i % 2 else 3.0) for i in range(1, 31)])
    assert write_summary(tmp_path).stat().st_size > 0


def test_labels_are_drawn_only_where_they_fit_every_iteration(tmp_path: Path) -> None:
    labelled, other = tmp_path / "labelled", tmp_path / "other"
    for run_dir, second in ((labelled, (1.0, 0.5)), (other, (1.0,))):
        write_run(
            run_dir,
            [
                make_record(1, replica_times_s=(1.0, 0.5)),
                make_record(2, replica_times_s=second),
            ],
        )

    def pictures(run_dir: Path) -> tuple[bytes, bytes]:
        plain = write_summary(run_dir).read_bytes()
        return plain, write_summary(run_dir, replica_labels=["tp2", "tp1"]).read_bytes()

    plain, with_labels = pictures(labelled)
    assert plain != with_labels
    plain, with_labels = pictures(other)
    assert plain == with_labels


def test_no_iteration_no_picture(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE_NAME).touch()
    with pytest.raises(HydraulisError, match="has 0; train an iteration first"):
        write_summary(tmp_path)


def test_a_picture_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    write_run(tmp_path, [make_record()])
    (tmp_path / "summary.png").mkdir()
    with pytest.raises(HydraulisError, match="summary needs a file"):
        write_summary(tmp_path)
