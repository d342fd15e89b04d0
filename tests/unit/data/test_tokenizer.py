import dataclasses
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, get_args, get_type_hints

import numpy as np
import pytest
from huggingface_hub import constants
from megatron.core.datasets.indexed_dataset import DType
from megatron.training.config import TokenizerConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron.hydraulis.data.documents import RawDocument
from megatron.hydraulis.data.tokenizer import (
    TEXT_TOKENIZER_TYPES,
    DocumentEncoder,
    TokenizerSettings,
    build_tokenizer,
)
from megatron.hydraulis.errors import ConfigurationError, DataError


def document(text: str) -> RawDocument:
    return RawDocument("a.txt", None, text.encode(), None, len(text))


def named(model: str) -> TokenizerSettings:
    return TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)


def null_encoder(vocab_size: int = 100, *, append_eod: bool = True) -> DocumentEncoder:
    settings = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=vocab_size)
    return DocumentEncoder(build_tokenizer(settings), append_eod=append_eod)


def test_settings_are_megatrons_with_its_defaults() -> None:
    upstream = {field.name: field.default for field in dataclasses.fields(TokenizerConfig)}
    for field in dataclasses.fields(TokenizerSettings):
        assert field.name in upstream
        if field.name not in ("tokenizer_type", "pad_vocab_size"):
            assert field.default == upstream[field.name], field.name
    assert set(TEXT_TOKENIZER_TYPES) <= set(
        get_args(get_type_hints(TokenizerConfig)["tokenizer_type"])
    )


def test_hugging_face_folder(tokenizer_folder: Path) -> None:
    tokenizer = build_tokenizer(named(str(tokenizer_folder)))
    encoder = DocumentEncoder(tokenizer)
    text = "the cat – and the dog,\n  and   the bird"
    ids = encoder.encode(document(text))
    assert ids is not None
    assert ids[-1] == tokenizer.eod == 0
    assert tokenizer.detokenize(ids[:-1].tolist()) == text
    assert len(ids) < len(text)
    assert ids.dtype == np.uint16


def test_end_of_document_is_appended_by_default() -> None:
    for append_eod, expected in ((True, [5, 7, 99]), (False, [5, 7])):
        ids = null_encoder(append_eod=append_eod).encode(document("5 7"))
        assert ids is not None
        assert ids.tolist() == expected


def test_documents_without_text_are_skipped() -> None:
    assert null_encoder().encode(document("")) is None


@pytest.mark.parametrize("vocab_size", [100, 65_499, 65_500, 200_000])
def test_ids_are_stored_as_megatron_does(vocab_size: int) -> None:
    assert null_encoder(vocab_size).token_type is DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5 x", r"a\.txt: the tokenizer refuses the text"),
        ("5 100", r"a\.txt: .* vocabulary of 100 .* gave 100"),
        ("5 -1", r"gave -1"),
    ],
)
def test_refused_texts(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        null_encoder().encode(document(text))


def test_tokenizer_without_end_of_document() -> None:
    tokenizer = SimpleNamespace(eod=None, vocab_size=9)
    with pytest.raises(DataError, match="--no-append-eod"):
        DocumentEncoder(tokenizer)
    assert DocumentEncoder(tokenizer, append_eod=False).vocab_size == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_type": "Word"}, "--tokenizer-type is one of .* but is 'Word'"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size, which is missing"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "--vocab-size is 0"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model, which is missing"),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/nowhere/at/all"},
            "--tokenizer-model: /nowhere/at/all does not exist",
        ),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "none.model"},
            r"made from --tokenizer-model, but there is no file none\.model",
        ),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v.json"}, r"-file, .* file v\.json"),
    ],
)
def test_refused_settings(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TokenizerSettings(**settings)  # type: ignore[arg-type]


def test_a_name_on_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("gpt2", "owner/gpt2"):
        named(name)
    for path in ("data/tokenizr", "./gpt2", "a/b/c", "owner/"):
        with pytest.raises(ConfigurationError, match=f"--tokenizer-model: {path} does not exist"):
            named(path)


def test_an_unknown_name_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("there is no\nreason")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tried = rf"gpt2x \({tmp_path}/gpt2x does not exist.*there is no; check --tokenizer-type"
    with pytest.raises(DataError, match=tried):
        build_tokenizer(named("gpt2x"))


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer HuggingFaceTokenizer cannot be built of"):
        build_tokenizer(named(str(tmp_path)))


@pytest.fixture
def hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns who is asked."""
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    asked: list[object] = []

    def out_of_reach(place: object, patience_s: float) -> NoReturn:
        asked.append(place)
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", out_of_reach)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example:8443")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return asked


def snapshot_of(cache: Path) -> Path:
    """The empty folder of a copy of own/er."""
    revision = "0" * 40
    copy = cache / "models--own--er" / "snapshots" / revision
    copy.mkdir(parents=True)
    (copy.parent.parent / "refs").mkdir()
    (copy.parent.parent / "refs" / "main").write_text(revision)
    return copy


def test_a_name_on_a_hub_out_of_reach_is_one_error_or_the_copy(
    tmp_path: Path, hub_out_of_reach: list[object]
) -> None:
    with pytest.raises(DataError, match=r"er: .* https://hub\.example:8443 .* hf download own/er"):
        build_tokenizer(named("own/er"))
    assert hub_out_of_reach == [("hub.example", 8443)]
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(snapshot_of(tmp_path))
    assert build_tokenizer(named("own/er")).tokenize("b") == [1]


@pytest.mark.parametrize("name", ["a--b", "my..model", "gpt2-", "m" * 97])
def test_a_name_that_the_hub_cannot_have_is_one_error(
    name: str, hub_out_of_reach: list[object]
) -> None:
    with pytest.raises(DataError, match=rf"built of {name} \(.*so it was taken for a nam"):
        build_tokenizer(named(name))
    assert hub_out_of_reach


@pytest.mark.parametrize(
    "endpoint", ["http://mirror:80x", "https://h:99999", "h.com", "https://", "https://[h"]
)
@pytest.mark.usefixtures("hub_out_of_reach")
def test_a_wrong_address_of_the_hub_is_one_error(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(DataError, match=rf"own/er: .* {re.escape(endpoint)} cannot be"):
        build_tokenizer(named("own/er"))


@pytest.mark.usefixtures("hub_out_of_reach")
def test_an_incomplete_copy_says_why_it_was_read(tmp_path: Path) -> None:
    copy = snapshot_of(tmp_path)
    (copy / "config.json").write_text("{}")
    with pytest.raises(DataError, match=rf"own/er .*{copy}, as https://hub.* hf download own/er"):
        build_tokenizer(named("own/er"))


@pytest.mark.parametrize(
    ("variables", "is_offline", "is_asked"),
    [
        ({}, True, False),
        ({"HF_HUB_OFFLINE": "0"}, False, True),
        ({"https_proxy": "http://proxy:3128"}, False, False),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "hub.example"}, False, True),
    ],
)
def test_the_hub_is_asked_as_its_library_would(
    variables: dict[str, str],
    is_offline: bool,
    is_asked: bool,
    hub_out_of_reach: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("no such model")

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(DataError):
        build_tokenizer(named("own/er"))
    assert bool(hub_out_of_reach) is is_asked
