import itertools

import numpy as np
import pytest
import torch

from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import DataError

SEQUENCES = [np.array([11, 12, 13, 14]), np.array([21, 22]), np.array([31, 32, 33])]


def row(tensor: torch.Tensor) -> list[int]:
    assert tensor.shape[0] == 1
    values: list[int] = tensor[0].tolist()
    return values


def test_without_padding() -> None:
    batch = pack(SEQUENCES)
    assert row(batch.tokens) == [11, 12, 13, 21, 31, 32]
    assert row(batch.labels) == [12, 13, 14, 22, 32, 33]
    assert row(batch.loss_mask) == [1.0] * 6
    assert row(batch.position_ids) == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == batch.cu_seqlens_padded.tolist() == [0, 3, 4, 6]
    assert (batch.max_seqlen, batch.num_tokens, batch.num_padding) == (3, 6, 0)


def test_padding_is_a_segment_of_its_own_and_not_trained() -> None:
    batch = pack(SEQUENCES, pad_multiple=8)
    assert batch.tokens.shape == (1, 8)
    assert row(batch.tokens)[:6] == row(pack(SEQUENCES).tokens)
    assert row(batch.loss_mask) == [1.0] * 6 + [0.0] * 2
    assert row(batch.position_ids) == [0, 1, 2, 0, 0, 1, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    assert (batch.max_seqlen, batch.num_tokens, batch.num_padding) == (3, 6, 2)


def test_long_padding_counts_for_the_longest_segment() -> None:
    batch = pack(SEQUENCES, pad_multiple=32)
    assert (batch.max_seqlen, batch.num_padding) == (26, 26)


@pytest.mark.parametrize("pad_multiple", [1, 2, 3, 4, 5, 6, 7, 12])
def test_segments_cover_the_row(pad_multiple: int) -> None:
    batch = pack(SEQUENCES, pad_multiple)
    total = batch.tokens.shape[1]
    assert total % pad_multiple == 0
    assert total == batch.num_tokens + batch.num_padding == batch.cu_seqlens[-1]
    assert batch.num_padding < pad_multiple
    assert batch.loss_mask.sum() == batch.num_tokens
    borders = batch.cu_seqlens.tolist()
    assert (torch.diff(batch.cu_seqlens) > 0).all()
    for start, end in itertools.pairwise(borders):
        assert row(batch.position_ids)[start:end] == list(range(end - start))


def test_types_and_device() -> None:
    batch = pack(SEQUENCES, 4).to("meta")
    kinds = {
        name: getattr(batch, name).dtype
        for name in PackedBatch.__dataclass_fields__
        if isinstance(getattr(batch, name), torch.Tensor)
    }
    assert kinds == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "cu_seqlens_padded": torch.int32,
    }
    assert all(getattr(batch, name).device.type == "meta" for name in kinds)
    assert batch.num_padding == 2


def test_refused_input() -> None:
    with pytest.raises(DataError, match="at least 1 sequence but was given 0"):
        pack([])
    with pytest.raises(DataError, match="number 1 of the micro-batch has 1"):
        pack([np.array([1, 2]), np.array([3])])
    with pytest.raises(ValueError, match="pad_multiple is at least 1 but is 0"):
        pack(SEQUENCES, 0)
