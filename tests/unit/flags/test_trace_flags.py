"""``--trace`` and ``--trace-iterations``."""

from pathlib import Path

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.observability.trace import TraceWindow
from tests.unit.flags.argument_command import parse


@pytest.mark.parametrize(
    ("typed", "window"),
    [("", None), ("--trace t", None), ("--trace t --trace-iterations 3..9", TraceWindow(3, 9))],
)
def test_flags_of_a_trace(typed: str, window: TraceWindow | None, tmp_path: Path) -> None:
    assert parse(tmp_path, *typed.split()).hydraulis.trace_window == window


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--trace-iterations 3..9", "only with --trace, which is missing; give --trace"),
        ("--trace t --trace-iterations 9..3", r"give for example 1\.\.20"),
    ],
)
def test_flags_that_contradict_each_other(typed: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse(tmp_path, *typed.split())
