import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers import MegatronTokenizer

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sources import (
    Blend,
    Corpora,
    load_corpora,
    load_corpora_from_arguments,
)
from megatron.hydraulis.errors import ConfigurationError, DataError
from tests.unit.data.datasets import numbered_documents, write_dataset


def dataset(tmp_path: Path, name: str, num_documents: int, first_token: int = 0) -> str:
    documents = numbered_documents([3] * num_documents, first_token=first_token)
    return write_dataset(tmp_path / name, documents)


def first_tokens(corpus: Corpus | None) -> list[int]:
    return [] if corpus is None else [int(corpus.tokens(i)[0]) for i in range(corpus.num_sequences)]


def load(blend: Blend | None, split: str | None = None, **others: object) -> Corpora:
    return load_corpora(
        seq_length=8,
        long_sequences="error",
        blend=blend,
        split=split,
        **others,  # type: ignore[arg-type]
    )


class DocumentsOfPart(GPTDataset):
    """The documents that Megatron's builder assigns to a part, before samples are made."""

    def __init__(
        self, low_level: object, path: str, documents: np.ndarray, *others: object
    ) -> None:
        self.documents = documents


@pytest.mark.parametrize("split", ["969,30,1", "969, 30, 1", "90,10", "1,1,1", "1", "0.5,.25,.25"])
@pytest.mark.parametrize("num_documents", [7, 33])
def test_parts_are_those_of_megatrons_gpt_dataset(
    tmp_path: Path, split: str, num_documents: int
) -> None:
    prefix = dataset(tmp_path, "a", num_documents)
    corpora = load(Blend((prefix,)), split)

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=2,
        blend=([prefix], None),
        split=split,
        tokenizer=MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null-text"}, vocab_size=1000
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    builder = BlendedMegatronDatasetBuilder(
        DocumentsOfPart, [None, None, None], lambda: True, config
    )
    upstream = builder._build_megatron_dataset_splits(prefix, config.split_matrix, [None] * 3)
    for ours, theirs in zip((corpora.train, corpora.valid, corpora.test), upstream, strict=True):
        documents = [] if theirs is None else theirs.documents.tolist()
        assert first_tokens(ours) == [3 * document for document in documents]


def test_each_dataset_of_a_blend_is_divided_separately(tmp_path: Path) -> None:
    blend = Blend((dataset(tmp_path, "a", 4), dataset(tmp_path, "b", 2, first_token=500)), (3, 1))
    corpora = load(blend, "1,1")
    assert first_tokens(corpora.train) == [0, 3, 500]
    assert first_tokens(corpora.valid) == [6, 9, 503]
    assert corpora.test is None
    assert [group.weight for group in corpora.train.groups] == [3, 1]


def test_datasets_for_each_part(tmp_path: Path) -> None:
    train, valid = dataset(tmp_path, "a", 3), dataset(tmp_path, "b", 2, first_token=500)
    corpora = load(None, blend_per_part=[Blend((train,)), Blend((valid,)), None])
    assert first_tokens(corpora.train) == [0, 3, 6]
    assert first_tokens(corpora.valid) == [500, 503]
    assert corpora.test is None


def test_a_valid_part_may_be_empty_but_not_a_training_dataset(tmp_path: Path) -> None:
    small = dataset(tmp_path, "small", 3)
    assert load(Blend((small,))).valid is None
    pair = Blend((small, write_dataset(tmp_path / "short", [[[1]], [[2]]])))
    with pytest.raises(DataError, match="short': a dataset of the training blend gives at least 1"):
        load(pair)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "969;30;1", "0,1", "٣", "9" * 400])
def test_refused_splits(tmp_path: Path, split: str) -> None:
    with pytest.raises(ConfigurationError, match="--split"):
        load(Blend((dataset(tmp_path, "a", 3),)), split)


def test_data_must_be_given_once(tmp_path: Path) -> None:
    blend = Blend((dataset(tmp_path, "a", 3),))
    with pytest.raises(ConfigurationError, match="neither is given"):
        load(None)
    with pytest.raises(ConfigurationError, match="neither is given"):
        load(None, blend_per_part=[None, None, None])
    with pytest.raises(ConfigurationError, match="both are given"):
        load(blend, blend_per_part=[blend, None, None])
    with pytest.raises(ConfigurationError, match="remove --split"):
        load(None, "9,1", blend_per_part=[blend, None, None])
    with pytest.raises(ConfigurationError, match="give --train-data-path"):
        load(None, blend_per_part=[None, blend, None])


def arguments(**given: object) -> argparse.Namespace:
    names = (
        "data_path data_args_path train_data_path valid_data_path test_data_path "
        "per_split_data_args_path split"
    )
    return argparse.Namespace(**dict.fromkeys(names.split()) | {"seq_length": 8} | given)


def test_from_megatrons_flags(tmp_path: Path) -> None:
    a, b = dataset(tmp_path, "a", 4), dataset(tmp_path, "b", 4, first_token=500)
    listed, per_part = tmp_path / "blend.txt", tmp_path / "parts.json"
    listed.write_text(f"2 {a} 1 {b}")
    per_part.write_text(json.dumps({"train": [a], "valid": b, "test": None}))

    def loaded(**given: object) -> Corpora:
        return load_corpora_from_arguments(arguments(**given), long_sequences="error")

    assert first_tokens(loaded(data_path=[a], split="1,1").valid) == [6, 9]
    for given in ({"data_path": ["2", a, "1", b]}, {"data_args_path": str(listed)}):
        train = loaded(**given).train
        assert [group.weight for group in train.groups] == [2, 1]
    for given in (
        {"train_data_path": [a], "valid_data_path": [b]},
        {"per_split_data_args_path": str(per_part)},
    ):
        corpora = loaded(**given)
        assert first_tokens(corpora.train) == [0, 3, 6, 9]
        assert first_tokens(corpora.valid) == [500, 503, 506, 509]
    for words in ([a], [a, b], ["1", a]):
        train = loaded(data_path=words).train
        assert len(train.prefixes) == len([word for word in words if word != "1"])
    with pytest.raises(ConfigurationError, match="a weight for every dataset or for none"):
        loaded(data_path=[a, b, "0.5", a])
    with pytest.raises(ConfigurationError, match="neither is given"):
        loaded()
    with pytest.raises(ConfigurationError, match="cannot read the file that lists"):
        loaded(data_args_path=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 0.0), "that of 'b' is 0.0"),
        ((-1.0, 1.0), "that of 'a' is -1.0"),
        ((float("nan"), 1.0), "that of 'a' is nan"),
        ((float("inf"), 1.0), "that of 'a' is inf"),
    ],
)
def test_refused_weights(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Blend(("a", "b"), weights)
