import itertools
from typing import Any

import numpy as np
import pytest
import torch

from megatron.hydraulis.data.packed_batch import PackedBatch, gathered_places, pack
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
    assert row(batch.weights) == [1.0] * 6
    assert row(batch.position_ids) == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == batch.cu_seqlens_padded.tolist() == [0, 3, 4, 6]
    assert (batch.max_seqlen, batch.num_tokens, batch.num_padding) == (3, 6, 0)


def test_padding_is_a_separate_segment_and_not_trained() -> None:
    batch = pack(SEQUENCES, pad_multiple=8)
    assert batch.tokens.shape == (1, 8)
    assert row(batch.tokens)[:6] == row(pack(SEQUENCES).tokens)
    assert row(batch.weights) == [1.0] * 6 + [0.0] * 2
    assert row(batch.position_ids) == [0, 1, 2, 0, 0, 1, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    assert (batch.max_seqlen, batch.num_tokens, batch.num_padding) == (3, 6, 2)


def test_predictions_stay_in_their_sequence() -> None:
    weights = [np.arange(len(tokens), dtype=np.float32) for tokens in SEQUENCES]
    batch = pack(SEQUENCES, 8, weights=weights, num_predictions=2)
    first, second = batch.predictions
    assert row(first.tokens) == [12, 13, 0, 0, 32, 0, 0, 0]
    assert row(first.labels) == [13, 14, 0, 0, 33, 0, 0, 0]
    assert row(first.weights) == [2.0, 3.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    assert row(second.tokens) == [13, 0, 0, 0, 0, 0, 0, 0]
    assert row(second.labels) == [14, 0, 0, 0, 0, 0, 0, 0]
    assert row(second.weights) == [3.0, *[0.0] * 7]
    assert batch.to("meta").predictions[1].labels.is_meta


@pytest.mark.parametrize("size", [2, 4])
def test_predictions_of_context_ranks_are_parts_of_those_of_one(size: int) -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(1, 99, size=length + 1) for length in (11, 1, 24)]
    parts = [
        pack(sequences, context_size=size, context_rank=rank, num_predictions=2)
        for rank in range(size)
    ]
    alone = pack(sequences, num_predictions=2)
    places = gathered_places(parts[0].segment_lengths, size).argsort()
    kept = [  # places in the padded row that the row of one rank has
        begin + i
        for begin, length in zip(parts[0].cu_seqlens_padded.tolist(), (11, 1, 24), strict=False)
        for i in range(length)
    ]
    for depth in range(2):
        for name in ("tokens", "labels", "weights"):
            found = torch.cat([getattr(part.predictions[depth], name)[0] for part in parts])
            expected = getattr(alone.predictions[depth], name)[0]
            assert found[places][kept].tolist() == expected.tolist()


def test_long_padding_counts_for_the_longest_segment() -> None:
    batch = pack(SEQUENCES, pad_multiple=32)
    assert (batch.max_seqlen, batch.num_padding) == (26, 26)
    # A model with learned positions needs none beyond those of sequences.
    assert max(row(batch.position_ids)) == 2


@pytest.mark.parametrize("pad_multiple", [1, 2, 3, 4, 5, 6, 7, 12])
def test_segments_cover_the_row(pad_multiple: int) -> None:
    batch = pack(SEQUENCES, pad_multiple)
    total = batch.tokens.shape[1]
    assert total % pad_multiple == 0
    assert total == batch.num_tokens + batch.num_padding == batch.cu_seqlens[-1]
    assert batch.num_padding < pad_multiple
    assert batch.weights.sum() == batch.num_tokens
    borders = batch.cu_seqlens.tolist()
    assert (torch.diff(batch.cu_seqlens) > 0).all()
    positions = row(batch.position_ids)
    for sequence, (start, end) in zip(SEQUENCES, itertools.pairwise(borders), strict=False):
        assert positions[start:end] == list(range(len(sequence) - 1))
    assert not any(positions[batch.num_tokens :])


@pytest.mark.parametrize(("size", "row_tokens"), [(1, 32), (1, 3), (2, 32), (2, 30)])
def test_a_row_has_at_least_the_requested_tokens(size: int, row_tokens: int) -> None:
    parts, _ = parts_of(SEQUENCES, 2, size, row_tokens=row_tokens)
    needed = sum(pack(SEQUENCES, 2, context_size=size).segment_lengths)
    multiple = 2 * (1 if size == 1 else 2 * size)
    assert sum(parts[0].segment_lengths) == max(needed, -(-row_tokens // multiple) * multiple)
    assert sum(part.num_tokens for part in parts) == 6
    empty = pack([], 2, context_size=size, row_tokens=row_tokens, allow_empty=True)
    assert empty.num_tokens == 0
    assert sum(empty.segment_lengths) == -(-row_tokens // multiple) * multiple


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
        "weights": torch.float32,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "cu_seqlens_padded": torch.int32,
    }
    assert all(getattr(batch, name).device.type == "meta" for name in kinds)
    assert batch.num_padding == 2


def test_refused_input() -> None:
    with pytest.raises(DataError, match=r"1 sequence .* 0"):
        pack([])
    with pytest.raises(DataError, match=r"2 tokens.* 1 .* has 1"):
        pack([np.array([1, 2]), np.array([3])])
    with pytest.raises(ValueError, match="pad_multiple is at least 1 but is 0"):
        pack(SEQUENCES, 0)


def parts_of(
    sequences: list[np.ndarray], tp: int, size: int, **kwargs: Any
) -> tuple[list[PackedBatch], np.ndarray]:
    """The parts of all ranks, and the place in the row of each of their tokens."""
    parts = [
        pack(sequences, tp, context_size=size, context_rank=rank, **kwargs) for rank in range(size)
    ]
    return parts, gathered_places(parts[0].cu_seqlens_padded.diff().tolist(), size)


def whole_row(parts: list[PackedBatch], places: np.ndarray, name: str) -> list[float]:
    """The row before it is divided."""
    gathered = torch.cat([getattr(part, name)[0] for part in parts])
    restored: list[float] = gathered[places.argsort()].tolist()
    return restored


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_parts_of_a_group_make_up_the_row(size: int, tp: int) -> None:
    sequences = [np.arange(100 * n, 100 * n + length + 1) for n, length in enumerate([13, 1, 16])]
    parts, places = parts_of(sequences, tp, size)
    tokens, labels, mask, positions = (
        whole_row(parts, places, name) for name in ("tokens", "labels", "weights", "position_ids")
    )
    borders = parts[0].cu_seqlens_padded.tolist()
    for sequence, start, stop in zip(sequences, borders, borders[1:], strict=False):
        length = len(sequence) - 1
        num_pads = stop - start - length
        assert stop - start == -(-length // (2 * size)) * 2 * size
        assert tokens[start:stop] == [*sequence[:-1], *[0] * num_pads]
        assert labels[start:stop] == [*sequence[1:], *[0] * num_pads]
        assert mask[start:stop] == [1.0] * length + [0.0] * num_pads
        assert positions[start:stop] == [*range(length), *[0] * num_pads]
    tail = borders[len(sequences)]
    nothing = [0] * (len(tokens) - tail)
    assert mask[tail:] == labels[tail:] == tokens[tail:] == positions[tail:] == nothing
    assert len(tokens) % (tp * 2 * size) == 0
    assert sum(part.num_tokens for part in parts) == 30
    for part in parts:
        assert part.tokens.shape == (1, len(tokens) // size)
        assert part.tokens.shape[1] % tp == 0
        assert part.num_tokens == part.weights.sum()
        assert part.num_tokens + part.num_padding == part.tokens.shape[1]
        assert part.sequence_lengths == (13, 1, 16)
        assert part.max_seqlen == max(np.diff(borders))
        assert torch.equal(part.cu_seqlens_padded, parts[0].cu_seqlens_padded)
        assert part.cu_seqlens.diff().tolist()[:3] == [13, 1, 16]


@pytest.mark.parametrize(("size", "tp", "length"), [(1, 1, 1), (1, 2, 2), (2, 1, 4), (4, 2, 16)])
def test_a_row_of_only_padding_is_the_shortest_that_can_be_shared(
    size: int, tp: int, length: int
) -> None:
    parts, _ = parts_of([], tp, size, allow_empty=True)
    for part in parts:
        assert part.tokens.shape == (1, length // size)
        assert (part.num_tokens, part.num_padding) == (0, length // size)
        assert part.weights.sum() == 0
        assert part.cu_seqlens.tolist() == part.cu_seqlens_padded.tolist() == [0, length]
        assert part.max_seqlen == length
        assert part.sequence_lengths == ()


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def test_a_part_knows_its_group() -> None:
    part = pack(SEQUENCES, context_size=2, context_rank=1)
    group: Any = Group(2, 1)
    assert part.in_group(group).context_group is group
    assert part.in_group(group).to("meta").context_group is group
    assert pack(SEQUENCES).in_group(None).context_group is None
    alone: Any = Group(1, 0)
    assert pack(SEQUENCES).in_group(alone).context_group is None
    other: Any = Group(2, 0)
    for wrong in (None, other):
        with pytest.raises(DataError, match="rank 1 of 2"):
            part.in_group(wrong)
