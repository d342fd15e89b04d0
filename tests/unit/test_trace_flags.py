"""``--trace`` and ``--trace-iterations``, and the folder that held an earlier trace."""

from pathlib import Path

import pytest

from megatron.hydraulis.config import HydraulisConfig
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.observability.earlier_run import set_aside_earlier_trace
from megatron.hydraulis.observability.trace_window import TraceWindow


def test_flags_of_a_trace() -> None:
    assert HydraulisConfig().trace_window is None
    assert HydraulisConfig(trace=Path("t")).trace_window is None
    config = HydraulisConfig(trace=Path("t"), trace_iterations="3..9")
    assert config.trace_window == TraceWindow(3, 9)


def test_flags_that_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="add --trace DIR"):
        HydraulisConfig(trace_iterations="3..9")
    with pytest.raises(ConfigurationError, match=r"give for example 1\.\.20"):
        HydraulisConfig(trace=Path("t"), trace_iterations="9..3")


def test_an_earlier_trace_is_set_aside(tmp_path: Path) -> None:
    assert set_aside_earlier_trace(tmp_path) is None
    names = ["trace.json", "trace_rank_0000.json", "trace_rank_0007.json"]
    for name in [*names, "notes.txt"]:
        (tmp_path / name).write_text(name)
    for number in (1, 2):
        aside = set_aside_earlier_trace(tmp_path)
        assert aside == tmp_path / f"earlier.{number}"
        assert sorted(path.name for path in aside.iterdir()) == names
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.txt"]
        for name in names:
            (tmp_path / name).write_text(name)
