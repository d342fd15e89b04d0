"""Staging buffers are taken once, grow, and never overlap between purposes."""

import torch

from megatron.hydraulis.runtime.staging import Staging


def test_a_buffer_is_used_again_and_grows_to_the_largest_request() -> None:
    staging = Staging(torch.device("cpu"))
    large = staging.take("sent", 10, torch.float32)
    small = staging.take("sent", 4, torch.float32)
    assert small.numel() == 4
    assert small.data_ptr() == large.data_ptr()
    larger = staging.take("sent", 11, torch.float32)
    assert larger.numel() == 11
    assert staging.take("sent", 10, torch.float32).data_ptr() == larger.data_ptr()


def test_purposes_and_dtypes_do_not_share_memory() -> None:
    staging = Staging(torch.device("cpu"))
    taken = [
        staging.take("sent", 8, torch.float32).fill_(1),
        staging.take("received", 8, torch.float32).fill_(2),
        staging.take("sent", 8, torch.bfloat16).fill_(3),
    ]
    assert [tensor.unique().tolist() for tensor in taken] == [[1], [2], [3]]
