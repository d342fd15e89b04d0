import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.hydraulis.data import corpus as corpus_module
from megatron.hydraulis.data.corpus import Corpus, DocumentRange, spread_stretches
from megatron.hydraulis.data.dataset import LONG_SEQUENCES, LongSequences, read_index
from megatron.hydraulis.data.sampler import SequenceGroup
from megatron.hydraulis.errors import DataError
from tests.unit.data.datasets import numbered_documents, write_dataset

LENGTHS = [5, 1, 9, 0, 2, 4]
"""Tokens of the documents; they train 4, –, 8, –, 1 and 3."""


def make(
    tmp_path: Path, policy: LongSequences, seq_length: int = 3, lengths: list[int] = LENGTHS
) -> Corpus:
    prefix = write_dataset(tmp_path / "corpus", numbered_documents(lengths))
    return Corpus(
        [DocumentRange.whole(read_index(prefix))], seq_length=seq_length, long_sequences=policy
    )


def tokens_of(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(i).tolist() for i in range(corpus.num_sequences)]


def test_without_long_documents_every_policy_is_the_same(tmp_path: Path) -> None:
    for policy in LONG_SEQUENCES:
        corpus = make(tmp_path, policy, seq_length=8)
        assert corpus.lengths.tolist() == [4, 8, 1, 3]
        assert tokens_of(corpus)[0] == [0, 1, 2, 3, 4]
        assert corpus.report.num_dropped_short == 2


def test_split(tmp_path: Path) -> None:
    corpus = make(tmp_path, "split")
    assert corpus.lengths.tolist() == [3, 1, 3, 3, 2, 1, 3]
    assert tokens_of(corpus) == [
        [0, 1, 2, 3],
        [3, 4],
        [6, 7, 8, 9],
        [9, 10, 11, 12],
        [12, 13, 14],
        [15, 16],
        [17, 18, 19, 20],
    ]
    report = corpus.report
    assert (report.num_split, report.num_sequences, report.num_tokens) == (2, 7, 16)


@pytest.mark.parametrize("seq_length", [1, 2, 3, 5, 7, 8, 100])
def test_split_trains_every_transition_once(tmp_path: Path, seq_length: int) -> None:
    corpus = make(tmp_path, "split", seq_length=seq_length)
    trained = [pair for tokens in tokens_of(corpus) for pair in itertools.pairwise(tokens)]
    expected = [
        pair
        for document in numbered_documents(LENGTHS)
        for pair in zip(document[0][:-1], document[0][1:], strict=True)
    ]
    assert trained == expected
    assert corpus.lengths.max() <= seq_length


def test_truncate(tmp_path: Path) -> None:
    corpus = make(tmp_path, "truncate")
    assert tokens_of(corpus) == [[0, 1, 2, 3], [6, 7, 8, 9], [15, 16], [17, 18, 19, 20]]
    assert (corpus.report.num_truncated, corpus.report.num_truncated_tokens) == (2, 1 + 5)


def test_drop(tmp_path: Path) -> None:
    corpus = make(tmp_path, "drop")
    assert tokens_of(corpus) == [[15, 16], [17, 18, 19, 20]]
    assert (corpus.report.num_dropped_long, corpus.report.num_dropped_long_tokens) == (2, 4 + 8)


def test_error_names_the_first_long_document(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 documents .* document 0"):
        make(tmp_path, "error")


def test_reports_of_datasets_add_up_and_read_well(tmp_path: Path) -> None:
    report = make(tmp_path, "split").report
    total = report + report
    assert (total.num_documents, total.num_split, total.num_dropped_short) == (12, 4, 4)
    assert str(report) == (
        "6 documents, 7 sequences, 16 tokens, 2 documents split, 2 of fewer than 2 tokens dropped"
    )


def test_document_of_several_stored_sequences_is_one(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "corpus", [[[1, 2], [3]], [], [[4], [5, 6], [7]]], np.uint16)
    corpus = Corpus([DocumentRange.whole(read_index(prefix))], seq_length=2, long_sequences="split")
    assert tokens_of(corpus) == [[1, 2, 3], [4, 5, 6], [6, 7]]
    assert corpus.tokens(0).dtype == np.int64


def test_datasets_follow_each_other(tmp_path: Path) -> None:
    ranges = [
        DocumentRange(read_index(write_dataset(tmp_path / name, numbered_documents(sizes))), 1, 3)
        for name, sizes in (("a", [9, 3, 4, 9]), ("b", [2, 1, 1]), ("c", [1, 6, 2]))
    ]
    corpus = Corpus(ranges, seq_length=16, long_sequences="error", weights=[1, 2, 3])
    assert corpus.lengths.tolist() == [2, 3, 5, 1]
    assert [corpus.dataset_of(i) for i in range(4)] == [0, 0, 2, 2]
    assert corpus.tokens(2).tolist() == [1, 2, 3, 4, 5, 6]
    assert corpus.groups == (SequenceGroup(0, 2, 1), SequenceGroup(2, 2, 3))
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="sequences 0 to 3"):
            corpus.tokens(wrong)


def test_documents_are_split_in_every_dataset(tmp_path: Path) -> None:
    ranges = [
        DocumentRange(read_index(write_dataset(tmp_path / name, numbered_documents(sizes))), 1, 4)
        for name, sizes in (("a", [3, 5, 1, 4]), ("b", [2, 0, 7, 2]))
    ]
    corpus = Corpus(ranges, seq_length=2, long_sequences="split")
    assert corpus.lengths.dtype == np.int32
    assert tokens_of(corpus) == [
        *([3, 4, 5], [5, 6, 7], [9, 10, 11], [11, 12]),
        *([2, 3, 4], [4, 5, 6], [6, 7, 8], [9, 10]),
    ]
    assert corpus.describe(6).endswith("b', document 2, tokens 4 to 6")
    assert corpus.describe(7).endswith("b', document 3, tokens 0 to 1")


def test_without_weights_groups_weigh_their_sequences(tmp_path: Path) -> None:
    assert make(tmp_path, "split").groups == (SequenceGroup(0, 7, 7),)


def test_lengths_are_read_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = IndexedDataset.__init__

    def spy(self: IndexedDataset, path_prefix: str) -> None:
        opened.append(path_prefix)
        original(self, path_prefix)

    monkeypatch.setattr(IndexedDataset, "__init__", spy)
    corpus = make(tmp_path, "split")
    assert corpus.groups
    assert corpus.report.num_tokens == corpus.lengths.sum()
    assert opened == []
    corpus.tokens(0)
    corpus.tokens(1)
    assert opened == [str(tmp_path / "corpus")]


def test_a_corpus_can_be_pickled(tmp_path: Path) -> None:
    corpus = make(tmp_path, "split")
    corpus.tokens(0)
    assert tokens_of(pickle.loads(pickle.dumps(corpus))) == tokens_of(corpus)


def test_token_outside_the_vocabulary_is_found_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "VOCABULARY_STRETCH_TOKENS", 4)
    monkeypatch.setattr(corpus_module, "VOCABULARY_CHECK_TOKENS", 8)
    corpus = make(tmp_path, "split")
    corpus.check_vocabulary(20)
    assert corpus.tokens(5).tolist() == [15, 16]
    with pytest.raises(DataError, match=r"vocabulary of 20 .* 20;"):
        corpus.tokens(6)


def test_ranks_divide_the_check_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "VOCABULARY_STRETCH_TOKENS", 4)
    # Of stretches 0 to 5, the last holds token 20 alone: it falls to share 2.
    for share in (0, 1):
        make(tmp_path, "split").check_vocabulary(20, share=share, num_shares=3)
    with pytest.raises(DataError, match="document 5, tokens 0 to 3"):
        make(tmp_path, "split").check_vocabulary(20, share=2, num_shares=3)
    with pytest.raises(ValueError, match="share 3 is not among 3"):
        make(tmp_path, "split").check_vocabulary(20, share=3, num_shares=3)


@pytest.mark.parametrize("stretch_tokens", [1, 3, 4, 100])
def test_the_check_names_the_sequence_in_every_dataset_and_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretch_tokens: int
) -> None:
    monkeypatch.setattr(corpus_module, "VOCABULARY_STRETCH_TOKENS", stretch_tokens)
    small = write_dataset(tmp_path / "small", numbered_documents([4, 4]))
    large = write_dataset(tmp_path / "large", [[[1], [2], [3]], [], [[4, 90, 6, 7]], [[5, 80]]])

    def check(first: int, end: int, vocab_size: int) -> None:
        ranges = [
            DocumentRange.whole(read_index(small)),
            DocumentRange(read_index(large), first, end),
        ]
        corpus = Corpus(ranges, seq_length=2, long_sequences="split")
        corpus.check_vocabulary(vocab_size)

    with pytest.raises(DataError, match=r"large', document 2, tokens 0 to 2: .* there is 90"):
        check(0, 4, 10)
    with pytest.raises(DataError, match=r"large', document 3, tokens 0 to 1: .* there is 80"):
        check(3, 4, 10)
    with pytest.raises(DataError, match=r"small', document 1, tokens 2 to 3: .* of 7 .* is 7;"):
        check(0, 0, 7)
    check(0, 2, 10)
    check(0, 4, 91)


def test_the_check_ignores_tokens_that_no_sequence_trains(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "corpus", [[[1, 2, 3, 99]], [[98]], [[4, 5]]])
    whole = DocumentRange.whole(read_index(prefix))
    Corpus([whole], seq_length=2, long_sequences="truncate").check_vocabulary(10)
    with pytest.raises(DataError, match="there is 99"):
        Corpus([whole], seq_length=2, long_sequences="split").check_vocabulary(10)


def test_a_bin_cut_during_a_job_is_an_error(tmp_path: Path) -> None:
    corpus = make(tmp_path, "split")
    os.truncate(tmp_path / "corpus.bin", 8)
    with pytest.raises(DataError, match=r"held 21 tokens .* ends after 2 now"):
        corpus.check_vocabulary(21)


def test_stretches_cover_all_or_are_spread_evenly() -> None:
    assert spread_stretches(5, 15, stretch_tokens=4, budget_tokens=12) == (
        *(range(5, 9), range(9, 13), range(13, 15)),
    )
    assert spread_stretches(0, 40, stretch_tokens=4, budget_tokens=12) == (
        *(range(4), range(12, 16), range(24, 28)),
    )
    assert spread_stretches(0, 9, stretch_tokens=4, budget_tokens=1) == (range(4),)
    assert spread_stretches(7, 7, stretch_tokens=4, budget_tokens=12) == ()


def test_negative_token(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "corpus", [[[4, -1, 3]]])
    corpus = Corpus([DocumentRange.whole(read_index(prefix))], seq_length=8, long_sequences="error")
    with pytest.raises(DataError, match=r"document 0.*at least 0 but there is -1"):
        corpus.tokens(0)
