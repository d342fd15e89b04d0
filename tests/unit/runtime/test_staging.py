"""Staging buffers are taken once, grow, and never overlap between purposes and slots."""

import pytest
import torch

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.track import Staging


def test_a_buffer_is_used_again_and_grows_to_the_largest_request() -> None:
    staging = Staging(torch.device("cpu"), num_slots=1)
    slot = staging.slots[0]
    large = slot.take("sent", 100, torch.float32)
    small = slot.take("sent", 4, torch.float32)
    assert small.numel() == 4
    assert small.data_ptr() == large.data_ptr()
    larger = slot.take("sent", 200, torch.float32)
    assert larger.numel() == 200
    assert slot.take("sent", 100, torch.float32).data_ptr() == larger.data_ptr()
    assert 800 <= staging.num_bytes < 1600


def test_dtypes_share_memory() -> None:
    staging = Staging(torch.device("cpu"))
    wide = staging.slots[0].take("sent", 8, torch.float64)
    narrow = staging.slots[0].take("sent", 32, torch.bfloat16)
    assert wide.data_ptr() == narrow.data_ptr()


def test_purposes_and_slots_do_not_share_memory() -> None:
    staging = Staging(torch.device("cpu"), num_slots=2)
    taken = [
        slot.take(purpose, 8, torch.float32).fill_(10 * index + len(purpose))
        for index, slot in enumerate(staging.slots)
        for purpose in ("sent", "received")
    ]
    assert [tensor.unique().tolist() for tensor in taken] == [[4], [8], [14], [18]]


def test_no_slots_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 staging slot but gets 0"):
        Staging(torch.device("cpu"), num_slots=0)
