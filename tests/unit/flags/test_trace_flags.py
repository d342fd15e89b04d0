"""``--trace`` and ``--trace-iterations``."""

from pathlib import Path

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.observability.trace import TraceWindow


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
