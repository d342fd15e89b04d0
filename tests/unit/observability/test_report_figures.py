"""``summary.png`` for runs of any shape."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.report_figures import (
    running_median,
    summary_of,
    write_summary,
)
from tests.unit.observability.run_folders import STRATEGY, make_record, make_run, run_of


def lines_of(records: list[IterationRecord], panel: int) -> dict[str, np.ndarray[Any, Any]]:
    """Values of the lines of a panel by label."""
    axes = summary_of(make_run(*records)).axes[panel]
    return {str(line.get_label()): np.asarray(line.get_ydata()) for line in axes.get_lines()}


def shares_of(records: list[IterationRecord]) -> dict[str, str]:
    """Numbers over the bars of the last panel by label."""
    axes = summary_of(make_run(*records)).axes[2]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    return dict(zip(labels, [text.get_text() for text in axes.texts], strict=True))


@pytest.mark.parametrize("num_replicas", [0, 1, 6, 7, 242])
@pytest.mark.parametrize("num_iterations", [1, 25])
def test_a_picture_for_any_number_of_replicas(
    tmp_path: Path, num_replicas: int, num_iterations: int
) -> None:
    times_s = tuple(1.0 / (1 + number) for number in range(num_replicas))
    records = [make_record(i, replica_times_s=times_s) for i in range(1, num_iterations + 1)]
    path = write_summary(make_run(*records, folder=tmp_path))
    assert path == tmp_path / "summary.png"
    with Image.open(path) as image:
        colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert image.format == "PNG"
    assert colors is not None
    assert len(colors) > 100


def test_times_and_shares_of_replicas() -> None:
    records = [
        make_record(1, replica_times_s=(1.0, 0.5)),
        make_record(2, replica_times_s=(2.0,)),
        make_record(3, replica_times_s=(1.0, 4.0)),
    ]
    lines = lines_of(records, panel=1)
    assert list(lines) == ["replica 0", "replica 1"]
    np.testing.assert_array_equal(lines["replica 0"], [1000.0, 2000.0, 1000.0])
    np.testing.assert_array_equal(lines["replica 1"], [500.0, np.nan, 4000.0])
    assert shares_of(records) == {"replica 0": "57.1%", "replica 1": "90.0%"}
    assert list(shares_of([make_record(replica_times_s=(0.0,) * 2)]).values()) == ["0.0%"] * 2


def test_of_many_replicas_slowest_median_and_fastest() -> None:
    records = [
        make_record(1, replica_times_s=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)),
        make_record(2, replica_times_s=(2.0, 1.0)),
        make_record(3, replica_times_s=()),
    ]
    lines = lines_of(records, panel=1)
    np.testing.assert_array_equal(lines["slowest"], [8000.0, 2000.0, np.nan])
    np.testing.assert_array_equal(lines["median"], [4000.0, 1500.0, np.nan])
    np.testing.assert_array_equal(lines["fastest"], [1000.0, 1000.0, np.nan])
    assert shares_of(records) == {"slowest": "100.0%", "median": "55.0%", "fastest": "20.0%"}


def test_makespans_and_shares_of_strategies() -> None:
    records = [
        make_record(1, strategy="a", replica_times_s=(1.0, 0.5)),
        make_record(2, strategy="b", replica_times_s=(2.0,)),
        make_record(3, strategy="a", replica_times_s=(1.0, 4.0)),
        make_record(4, strategy="c", replica_times_s=(0.0, 0.0)),
    ]
    lines = lines_of(records, panel=1)
    assert list(lines) == ["a (2)", "b (1)", "c (1)"]
    np.testing.assert_array_equal(lines["a (2)"], [1000.0, np.nan, 4000.0, np.nan])
    assert shares_of(records) == {"a": "65.0%", "b": "100.0%", "c": "0.0%"}


@pytest.mark.parametrize("num_strategies", [2, 6, 9])
def test_any_number_of_strategies(num_strategies: int) -> None:
    names = [f"{'a long name of ' * (i % 2)}strategy {i}" for i in range(num_strategies)]
    records = [
        make_record(i + 1, strategy=names[i % len(names)], replica_times_s=(1.0,) * (1 + i % 3))
        for i in range(18)
    ]
    found = [*lines_of(records, panel=1)]
    assert len(set(found)) == min(num_strategies, 7)
    assert found[0] == f"strategy 0 ({18 // num_strategies})"
    assert found[1] == f"a long name… #2 ({18 // num_strategies})"
    assert (found[-1] == "others (6)") is (num_strategies == 9)


def test_losses_that_are_missing_leave_a_gap() -> None:
    records = [make_record(i, lm_loss=None if i % 2 else 3.0) for i in range(1, 31)]
    lines = lines_of(records, panel=0)
    assert np.isnan(lines["each iteration"]).sum() == 15
    assert np.nanmax(lines["median of 5 iterations"]) == 3.0


def test_the_median_at_the_end_is_not_the_last_value() -> None:
    values = [9.0, 7.0, 5.0, 6.3, 6.4, 5.7, 6.2, 5.8]
    assert running_median(values, 2) == [9.0, 7.0, 6.4, 6.3, 6.2, 6.2, 6.2, 6.2]
    assert running_median(values[:3], 2) == [9.0, 7.0, 7.0]


def test_replicas_are_labelled_by_their_schemes_if_these_are_known(tmp_path: Path) -> None:
    def labels(times_s: tuple[float, ...]) -> list[str]:
        run = run_of(tmp_path / str(len(times_s)), [make_record(1, replica_times_s=times_s)])
        return [str(line.get_label()) for line in summary_of(run).axes[1].get_lines()]

    assert STRATEGY == "tp2+2*tp1"
    assert labels((1.0, 0.5, 0.5)) == ["replica 0 (tp2)", "replica 1 (tp1)", "replica 2 (tp1)"]
    assert labels((1.0, 0.5)) == ["replica 0", "replica 1"]


def test_a_picture_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "summary.png").mkdir()
    with pytest.raises(HydraulisError, match=r"needs a writable file: .*summary\.png"):
        write_summary(make_run(make_record(), folder=tmp_path))
