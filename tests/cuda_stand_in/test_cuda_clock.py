"""Times between moments of a CUDA stream."""

from __future__ import annotations

import time

import pytest

from megatron.hydraulis.runtime.spans import CudaStamp
from tests.cuda_stand_in.device import events_never_ready
from tests.cuda_stand_in.lone_ranks import run_alone

PAUSE_S = 0.2


def take_stamps() -> tuple[float | None, float | None]:
    """A lone rank measures from one stamp to another, and to one not reached."""
    first = CudaStamp()
    time.sleep(PAUSE_S)
    known = first.s_until(CudaStamp())
    with events_never_ready():
        return known, first.s_until(CudaStamp())


def test_a_time_is_known_once_the_stream_has_reached_its_end() -> None:
    ((known, unknown),) = run_alone(take_stamps, num_ranks=1)
    assert known == pytest.approx(PAUSE_S, rel=0.5)
    assert unknown is None
