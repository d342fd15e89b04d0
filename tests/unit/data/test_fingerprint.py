"""Fingerprints of datasets: equal for equal data wherever they lie, and cheap for large ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.hydraulis.data import corpus as corpus_module
from megatron.hydraulis.data.corpus import Corpus, DocumentRange, data_differences, keeps_place
from megatron.hydraulis.data.dataset import read_index
from tests.unit.data.datasets import numbered_documents, write_dataset

LENGTHS = [5, 9, 2, 4]


def corpus_of(*prefixes: str, weights: list[float] | None = None, seq_length: int = 8) -> Corpus:
    ranges = [DocumentRange.whole(read_index(prefix)) for prefix in prefixes]
    return Corpus(ranges, seq_length=seq_length, long_sequences="split", weights=weights)


def dataset(
    path: Path, lengths: list[int], first: int = 0, token_type: type[np.integer] = np.int32
) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_dataset(path, numbered_documents(lengths, first_token=first), token_type)


def differences(before: Corpus, now: Corpus) -> list[str]:
    return data_differences(before.fingerprints(), now.fingerprints())


def test_the_same_data_elsewhere_and_in_another_type_are_equal(tmp_path: Path) -> None:
    here = corpus_of(dataset(tmp_path / "a", LENGTHS))
    there = corpus_of(dataset(tmp_path / "other" / "b", LENGTHS, token_type=np.uint16))
    assert differences(here, there) == []


def test_the_last_token_and_the_order_of_lengths_count(tmp_path: Path) -> None:
    before = corpus_of(dataset(tmp_path / "a", LENGTHS))
    documents = numbered_documents(LENGTHS)
    documents[-1][0][-1] += 1
    changed = corpus_of(write_dataset(tmp_path / "b", documents))
    assert differences(before, changed) == [f"dataset '{tmp_path / 'b'}' has other tokens"]
    reordered = corpus_of(dataset(tmp_path / "c", LENGTHS[::-1]))
    assert differences(before, reordered) == [
        f"the sequences of dataset '{tmp_path / 'c'}' have other lengths"
    ]
    assert keeps_place(before.fingerprints(), reordered.fingerprints())
    cut = corpus_of(dataset(tmp_path / "a", LENGTHS), seq_length=3)
    assert "has 4 sequences of 16 tokens there and 7 of 16 here" in differences(before, cut)[0]
    assert not keeps_place(before.fingerprints(), cut.fingerprints())


def test_shares_of_a_blend_count_and_weights_in_another_unit_do_not(tmp_path: Path) -> None:
    prefixes = dataset(tmp_path / "a", LENGTHS), dataset(tmp_path / "b", LENGTHS[:2])
    before = corpus_of(*prefixes, weights=[3, 7])
    assert differences(before, corpus_of(*prefixes, weights=[0.3, 0.7])) == []
    other = corpus_of(*prefixes, weights=[0.5, 0.5])
    assert differences(before, other) == [
        f"dataset '{prefixes[0]}' has a share of 0.3 there and 0.5 here",
        f"dataset '{prefixes[1]}' has a share of 0.7 there and 0.5 here",
    ]
    assert not keeps_place(before.fingerprints(), other.fingerprints())
    assert differences(before, corpus_of(prefixes[0])) == ["2 datasets there and 1 here"]


def test_of_a_large_dataset_a_bounded_sample_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "FINGERPRINT_STRETCH_TOKENS", 4)
    monkeypatch.setattr(corpus_module, "FINGERPRINT_TOKENS", 16)
    num_read = 0
    fromfile = np.fromfile

    def counted(file: Any, dtype: Any, count: int) -> Any:
        nonlocal num_read
        num_read += count
        return fromfile(file, dtype, count)

    before = corpus_of(dataset(tmp_path / "a", [50] * 20))
    monkeypatch.setattr(np, "fromfile", counted)
    assert differences(before, corpus_of(dataset(tmp_path / "b", [50] * 20))) == []
    assert num_read == 2 * 16
    assert differences(before, corpus_of(dataset(tmp_path / "c", [50] * 20, first=1))) != []
