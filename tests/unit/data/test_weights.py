"""Weights of tokens: the file, how sequences take their part of it, and where they end in a row."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.hydraulis.data import corpus as corpus_module
from megatron.hydraulis.data.corpus import Corpus, DocumentRange, data_differences
from megatron.hydraulis.data.dataset import LongSequences, read_index, read_weights
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.data.preprocess import DatasetWriter
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.loop.job import check_trained
from tests.unit.data.datasets import numbered_documents, write_dataset

LENGTHS = [5, 1, 9, 4]
"""Tokens of the documents; token and weight of a place follow from it, see `write`."""
NUM_TOKENS = sum(LENGTHS)


def write(prefix: Path, *, weights: np.ndarray | None = None) -> str:
    """A dataset whose token k is k, with weight k / 8 unless given."""
    weights = np.arange(NUM_TOKENS) / 8 if weights is None else weights
    with DatasetWriter(prefix, np.uint16, has_weights=True) as writer:
        writer.add_documents(np.arange(6, dtype=np.uint16), LENGTHS[:2], weights[:6])
        writer.add_documents(
            np.arange(6, NUM_TOKENS, dtype=np.uint16), LENGTHS[2:], weights[6:NUM_TOKENS]
        )
        writer.commit()
    return str(prefix)


def corpus_of(
    prefix: str, *, first: int = 0, long_sequences: LongSequences = "split", **settings: Any
) -> Corpus:
    index = read_index(prefix)
    part = DocumentRange(index, first, index.num_documents)
    return Corpus([part], seq_length=3, long_sequences=long_sequences, **settings)


@pytest.mark.parametrize("policy", ["split", "truncate"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_token_keeps_its_weight_in_every_part(
    tmp_path: Path, policy: LongSequences, first: int
) -> None:
    corpus = corpus_of(write(tmp_path / "corpus"), first=first, long_sequences=policy)
    for sequence_id in range(corpus.num_sequences):
        weights = corpus.token_weights(sequence_id)
        assert weights.dtype == np.float32
        assert weights.tolist() == (corpus.tokens(sequence_id) / 8).tolist()


def test_documents_of_several_stored_sequences_have_weights(tmp_path: Path) -> None:
    write(tmp_path / "weighted")
    prefix = write_dataset(
        tmp_path / "corpus", [[[0, 1], [2, 3, 4]], [[5]], [[6], [*range(7, 19)]]]
    )
    (tmp_path / "weighted.weights").rename(tmp_path / "corpus.weights")
    corpus = corpus_of(prefix)
    found = [corpus.token_weights(i).tolist() for i in range(corpus.num_sequences)]
    assert found == [(corpus.tokens(i) / 8).tolist() for i in range(corpus.num_sequences)]


def test_data_without_weights_train_every_token(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "corpus", numbered_documents(LENGTHS))
    assert read_weights(read_index(prefix)) is None
    assert corpus_of(prefix).token_weights(0).tolist() == [1.0] * 4


def test_a_new_dataset_does_not_keep_the_weights_of_an_old_one(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus")
    with DatasetWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.arange(NUM_TOKENS, dtype=np.uint16), LENGTHS)
        writer.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_weights_for_a_dataset_without_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="has no weights but documents come with 2; make the"),
        DatasetWriter(tmp_path / "corpus", np.uint16) as writer,
    ):
        writer.add_documents(np.arange(2, dtype=np.uint16), [2], np.ones(2))


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "corpus", np.uint16, has_weights=True) as writer:
        writer.add_documents(np.arange(2, dtype=np.uint16), [2], np.ones(2))
        assert any(path.suffix == ".weights" for path in tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"one weight a token but 2 tokens have weights of shape \(0,\)"),
        ([1.0], r"one weight a token but 2 tokens have weights of shape \(1,\)"),
        ([1.0, -0.5], r"at least 0 but that of token 1 is -0\.5"),
        ([np.nan, 1.0], r"finite and at least 0 but that of token 0 is nan"),
        ([1.0, 1e39], r"that of token 1 is inf"),
    ],
)
def test_weights_that_mean_nothing_are_not_written(
    tmp_path: Path, weights: Any, message: str
) -> None:
    with (
        DatasetWriter(tmp_path / "corpus", np.uint16, has_weights=True) as writer,
        pytest.raises(DataError, match=message),
    ):
        writer.add_documents(
            np.arange(2, dtype=np.uint16), [2], None if weights is None else np.array(weights)
        )


def header(num_weights: int, version: int = 1) -> bytes:
    return struct.pack("<8sQQ", b"HYDWGHT\x00", version, num_weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-4], rf"of {24 + 4 * NUM_TOKENS} bytes but it has .*cut short"),
        (lambda content: content + b"\0", r"too long"),
        (lambda content: content[:20], r"has 24 bytes but the file ends after 20"),
        (lambda content: b"", r"has 24 bytes but the file ends after 0"),
        (lambda content: b"X" + content[1:], r"begins with .* it was not finished"),
        (lambda content: bytes(24) + content[24:], r"begins with .* it was not finished"),
        (lambda content: header(NUM_TOKENS, 2) + content[24:], r"version 1 .* of version 2"),
        (
            lambda content: header(NUM_TOKENS - 1) + content[24:-4],
            rf"has {NUM_TOKENS - 1} for {NUM_TOKENS} tokens, so it belongs to other data",
        ),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    prefix = write(tmp_path / "corpus")
    file = tmp_path / "corpus.weights"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        corpus_of(prefix)


@pytest.mark.parametrize("value", [-1.0, np.inf])
def test_a_bad_weight_is_found_at_start_or_when_it_is_read(
    tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write(tmp_path / "corpus")
    with open(tmp_path / "corpus.weights", "r+b") as file:
        file.seek(24 + 4 * 8)
        file.write(struct.pack("<f", value))
    corpus = corpus_of(prefix)
    with pytest.raises(DataError, match=rf"corpus', document 2, tokens 0 to 3: .* is {value:g}"):
        corpus.token_weights(2)
    monkeypatch.setattr(corpus_module, "VOCABULARY_STRETCH_TOKENS", 5)
    monkeypatch.setattr(corpus_module, "VOCABULARY_CHECK_TOKENS", 5)  # the first stretch alone
    with pytest.raises(DataError, match=rf"corpus\.weights, from token 5: .* 3 is {value:g}"):
        corpus.check_vocabulary(100)


def test_a_corpus_of_which_no_token_is_trained_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(write(tmp_path / "corpus"))
    assert corpus.check_vocabulary(100)
    with open(tmp_path / "corpus.weights", "r+b") as file:
        num_weights = (file.seek(0, 2) - 24) // 4
        file.seek(24)
        file.write(bytes(4 * num_weights))
    corpus = corpus_of(str(tmp_path / "corpus"))
    assert not corpus.check_vocabulary(100)
    check_trained([corpus], [[False], [True]])  # another rank's share has one
    with pytest.raises(DataError, match=r"'train': .* all weights .* are 0; .*corpus\.weights"):
        check_trained([corpus], [[False], [False]])


@pytest.mark.parametrize("stretch_tokens", [3, 100])
def test_only_tokens_that_something_predicts_count_as_trained(
    tmp_path: Path, stretch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "VOCABULARY_STRETCH_TOKENS", stretch_tokens)
    weights = np.concatenate([[1.0] + [0.0] * (length - 1) for length in LENGTHS])
    assert not corpus_of(write(tmp_path / "firsts", weights=weights)).check_vocabulary(100)
    weights[LENGTHS[0] - 1] = 1.0
    assert corpus_of(write(tmp_path / "second", weights=weights)).check_vocabulary(100)


def test_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    before = corpus_of(write(tmp_path / "a")).fingerprints()
    assert data_differences(before, corpus_of(write(tmp_path / "b")).fingerprints()) == []
    changed = np.arange(NUM_TOKENS) / 8
    changed[-1] = 0.0
    for prefix in (
        write(tmp_path / "c", weights=changed),
        write_dataset(tmp_path / "d", numbered_documents(LENGTHS), np.uint16),
    ):
        assert data_differences(before, corpus_of(prefix).fingerprints()) == [
            f"dataset '{prefix}' has other weights of tokens"
        ]


@pytest.mark.parametrize("policy", ["split", "truncate"])
@pytest.mark.parametrize("has_weights", [True, False])
def test_documents_get_the_same_weight_and_their_parts_share_it(
    tmp_path: Path, policy: LongSequences, has_weights: bool
) -> None:
    weights = np.arange(NUM_TOKENS) / 8
    weights[-4:] = 0.0  # the last document
    prefix = write(tmp_path / "corpus", weights=weights)
    if not has_weights:
        (tmp_path / "corpus.weights").unlink()
    given, found = (
        corpus_of(prefix, long_sequences=policy, loss_normalization=normalization)
        for normalization in ("token", "sequence")
    )
    sums = dict.fromkeys((0, 2, 3), 0.0)  # document 1 has a single token
    for sequence_id in range(found.num_sequences):
        before, after = given.token_weights(sequence_id), found.token_weights(sequence_id)
        assert after.dtype == np.float32
        document = int(np.searchsorted(np.cumsum(LENGTHS), given.tokens(sequence_id)[0], "right"))
        sums[document] += float(after[1:].sum())
        np.testing.assert_allclose(after * before[1:].sum(), before * after[1:].sum(), rtol=1e-6)
    assert sums == pytest.approx({0: 1.0, 2: 1.0, 3: 0.0 if has_weights else 1.0})


def test_the_report_counts_documents_with_weights(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus")
    assert ", 4 documents with token weights" in str(corpus_of(prefix).report)
    (tmp_path / "corpus.weights").unlink()
    assert "weights" not in str(corpus_of(prefix).report)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_label_has_the_weight_of_predicting_it(size: int) -> None:
    rng = np.random.default_rng(size)
    sequences = [rng.permutation(60)[: length + 1] + 1 for length in (13, 1, 16)]
    of_token = (np.arange(61) % 3 / 4).astype(np.float32)
    weights = [of_token[tokens] for tokens in sequences]
    parts = [
        pack(sequences, 2, weights=weights, context_size=size, context_rank=rank)
        for rank in range(size)
    ]
    for part in parts:
        # Padding has label 0, of weight 0.
        np.testing.assert_array_equal(part.weights.numpy(), of_token[part.labels.numpy()])
        assert part.trained_tokens == np.count_nonzero(part.weights)
        assert part.has_fractional_weights
    assert sum(part.num_tokens for part in parts) == 30
    assert sum(part.trained_tokens for part in parts) == sum(
        np.count_nonzero(each[1:]) for each in weights
    )


def test_masks_are_no_fractions() -> None:
    sequences = [np.arange(4), np.arange(3)]
    masks = [np.array([0.5, 1, 0, 1], np.float32), np.zeros(3, np.float32)]
    batch = pack(sequences, 4, weights=masks)
    assert batch.weights.tolist() == [[1, 0, 1, 0, 0, 0, 0, 0]]
    assert (batch.num_tokens, batch.trained_tokens, batch.num_padding) == (5, 2, 3)
    assert not batch.has_fractional_weights
    assert not pack(sequences).has_fractional_weights
