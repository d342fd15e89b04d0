import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.hydraulis.data import dataset as dataset_module
from megatron.hydraulis.data.dataset import read_index
from megatron.hydraulis.errors import DataError
from tests.unit.data.datasets import numbered_documents, write_dataset


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "corpus", numbered_documents([5, 1, 9]))


def is_mapped(array: object) -> bool:
    """Whether an array is a view into a mapped file."""
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


def overwrite(path: str, position: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(content)


@pytest.mark.parametrize("token_type", [np.uint16, np.int32, np.int64, np.uint8])
def test_lengths_of_a_dataset_of_megatron(tmp_path: Path, token_type: type[np.integer]) -> None:
    prefix = write_dataset(tmp_path / "corpus", numbered_documents([5, 1, 9]), token_type)
    index = read_index(prefix)
    assert index.document_lengths.tolist() == [5, 1, 9]
    assert index.first_sequences.tolist() == [0, 1, 2]
    assert index.token_type == np.dtype(token_type)
    assert (index.num_documents, index.num_tokens) == (3, 15)


def test_sentences_of_a_document_count_as_one(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "corpus", [[[1, 2], [3]], [], [[4], [5, 6], [7]]])
    index = read_index(prefix)
    assert index.document_lengths.tolist() == [3, 0, 4]
    assert index.first_sequences.tolist() == [0, 2, 2]


def test_lengths_of_single_sequences_are_the_mapped_file(tmp_path: Path) -> None:
    one_each = read_index(write_dataset(tmp_path / "a", numbered_documents([5, 1, 9])))
    several = read_index(write_dataset(tmp_path / "b", [[[1, 2], [3]], [[4]]]))
    assert [index.document_lengths.dtype for index in (one_each, several)] == [np.int32] * 2
    for array in (one_each.document_lengths, *(i.first_sequences for i in (one_each, several))):
        assert is_mapped(array)


def test_as_many_sequences_as_documents_are_one_each(tmp_path: Path) -> None:
    # The effect of a flipped bit in the document boundaries of nearly every dataset.
    prefix = write_dataset(tmp_path / "c", [[[1], [2, 3]], [], [[4]]])
    with pytest.raises(DataError, match="document 1 has none and another several"):
        read_index(prefix)
    more = read_index(write_dataset(tmp_path / "d", [[[1], [2], [3]], [], [[4]]]))
    assert more.document_lengths.tolist() == [3, 0, 1]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(prefix: str, suffix: str) -> None:
    with pytest.raises(DataError, match=r"without \.bin or \.idx"):
        read_index(prefix + suffix)
    os.unlink(prefix + suffix)
    with pytest.raises(DataError, match=rf"corpus\{suffix} does not exist"):
        read_index(prefix)
    os.mkdir(prefix + suffix)
    with pytest.raises(DataError, match=rf"corpus\{suffix} is a folder"):
        read_index(prefix)


@pytest.mark.parametrize(
    ("position", "content", "message"),
    [
        (0, b"TNTIDX", "begins with .*MMIDIDX.* this one with .*TNTIDX"),
        (9, struct.pack("<Q", 2), r"\.idx version 1 .* version 2"),
        *((17, bytes([code]), f"names type {code}") for code in (0, 6, 7, 9)),
    ],
)
def test_other_headers(prefix: str, position: int, content: bytes, message: str) -> None:
    overwrite(prefix + ".idx", position, content)
    with pytest.raises(DataError, match=message):
        read_index(prefix)


def test_every_cut_of_the_index_is_detected(prefix: str) -> None:
    whole = Path(prefix + ".idx").read_bytes()
    for size in range(len(whole)):
        Path(prefix + ".idx").write_bytes(whole[:size])
        with pytest.raises(DataError, match="cut short"):
            read_index(prefix)
    Path(prefix + ".idx").write_bytes(whole)
    assert read_index(prefix).num_tokens == 15


@pytest.mark.parametrize(("excess", "cause"), [(3, "multimodal"), (7, "too long")])
def test_index_too_long(prefix: str, excess: int, cause: str) -> None:
    with open(prefix + ".idx", "ab") as file:
        file.write(bytes(excess))
    with pytest.raises(DataError, match=cause):
        read_index(prefix)


@pytest.mark.parametrize(("excess", "cause"), [(-1, "cut short"), (4, "of another .idx")])
def test_bin_of_another_size(prefix: str, excess: int, cause: str) -> None:
    os.truncate(prefix + ".bin", 60 + excess)
    with pytest.raises(DataError, match=rf"\.bin file of 60 bytes .* {60 + excess} .*{cause}"):
        read_index(prefix)


@pytest.mark.parametrize("documents", [[], [[]], [[[]], [[]]]])
def test_empty_corpus(tmp_path: Path, documents: list[list[list[int]]]) -> None:
    prefix = write_dataset(tmp_path / "corpus", documents)
    with pytest.raises(DataError, match="a corpus needs at least one"):
        read_index(prefix)


@pytest.mark.parametrize(
    ("position", "content", "message"),
    [
        (34, struct.pack("<i", -5), "sequence 0 -5 tokens"),
        (34 + 8, struct.pack("<i", -1), "sequence 2 -1 tokens"),
        (34, struct.pack("<i", 6), "sequence 1 must begin at byte 24"),
        (34 + 12 + 8, struct.pack("<q", 21), "sequence 1 must begin at byte 20"),
        (34 + 36, struct.pack("<q", 1), "must rise from 0 to 3"),
        (34 + 36 + 8, struct.pack("<q", 3), "must rise from 0 to 3"),
        (34 + 36 + 24, struct.pack("<q", 4), "must rise from 0 to 3"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_arrays_that_contradict_each_other(
    prefix: str,
    position: int,
    content: bytes,
    message: str,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset_module, "_BLOCK", block)
    assert read_index(prefix).num_tokens == 15
    overwrite(prefix + ".idx", position, content)
    with pytest.raises(DataError, match=message):
        read_index(prefix)
