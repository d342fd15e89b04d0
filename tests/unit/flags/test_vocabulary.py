"""The model's vocabulary follows from tokenizer and flags, never from the strategy."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megatron.hydraulis.data.tokenizer import TokenizerFingerprint, tokenizer_path
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags import defaults
from megatron.hydraulis.flags.defaults import Vocabulary, padded_vocabulary_size
from megatron.hydraulis.json_object import write_json
from tests.unit.flags.argument_command import parse

_NUM_WORDS = 50


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> str:
    """A tokenizer of 50 words as Hugging Face stores it."""
    words = {f"w{index}": index for index in range(_NUM_WORDS - 2)}
    words |= {"<unk>": _NUM_WORDS - 2, "<eos>": _NUM_WORDS - 1}
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        eos_token="<eos>",
    ).save_pretrained(str(folder))
    return str(folder)


def _resolve(folder: Path, *typed: str, without: tuple[str, ...] = ()) -> Vocabulary:
    return parse(folder, *typed, without=without).vocabulary


def _hugging_face(folder: str) -> tuple[str, ...]:
    return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)


@pytest.mark.parametrize(
    ("size", "divisible_by", "padded"),
    [(200, 128, 256), (256, 128, 256), (257, 128, 384), (5, 1, 5)],
)
def test_padded_vocabulary_size(size: int, divisible_by: int, padded: int) -> None:
    assert padded_vocabulary_size(size, divisible_by) == padded


@pytest.mark.parametrize("strategy", ["8*tp1", "4*tp2", "2*tp4", "tp4+2*tp1+pp2"])
def test_padding_is_the_same_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    vocabulary = _resolve(tmp_path, "--strategy", strategy)
    assert vocabulary == Vocabulary(size=200, padded_size=256)


def test_a_given_padded_size_is_used_unchanged(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--padded-vocab-size", "208")
    assert resolved.vocabulary == Vocabulary(size=200, padded_size=208)
    assert resolved.args.padded_vocab_size == 208
    assert resolved.shape.vocab_size == 208


def test_size_of_a_tokenizer_from_files(tmp_path: Path, tokenizer_folder: str) -> None:
    typed = _hugging_face(tokenizer_folder)
    assert _resolve(tmp_path, *typed, without=("--vocab-size",)) == Vocabulary(_NUM_WORDS, 128)


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, tokenizer_folder: str) -> None:
    """The ids fit, but most of them mean other words."""
    typed = _hugging_face(tokenizer_folder)
    words = [f"w{index}" for index in range(_NUM_WORDS - 2)] + ["<unk>", "<eos>"]

    def made_by(*tokens: str) -> None:
        tokenizer = SimpleNamespace(inv_vocab=dict(enumerate(tokens)), vocab_size=len(tokens))
        fingerprint = TokenizerFingerprint.of(tokenizer)
        assert fingerprint is not None
        write_json(tokenizer_path(str(tmp_path / "corpus")), asdict(fingerprint))

    made_by(*words)
    assert _resolve(tmp_path, *typed, without=("--vocab-size",)).size == _NUM_WORDS
    made_by(*words[:20])  # the tokenizer has got more words since
    assert _resolve(tmp_path, *typed, without=("--vocab-size",)).size == _NUM_WORDS
    made_by("w1", "w0", *words[2:])
    with pytest.raises(ConfigurationError, match="made with another tokenizer, of 50 tokens"):
        _resolve(tmp_path, *typed, without=("--vocab-size",))
    assert _resolve(tmp_path).size == 200  # NullTokenizer is for ids whatever they mean
    Path(tokenizer_path(str(tmp_path / "corpus"))).unlink()
    assert _resolve(tmp_path, *typed, without=("--vocab-size",)).size == _NUM_WORDS


@pytest.mark.parametrize("inv_vocab", [["a", "b"], None])
def test_a_tokenizer_that_lists_its_tokens_otherwise_has_no_fingerprint(inv_vocab: object) -> None:
    tokenizer = SimpleNamespace(inv_vocab=inv_vocab, vocab_size=2)
    assert TokenizerFingerprint.of(tokenizer) is None


def test_a_larger_vocab_size_gives_the_model_more_tokens(
    tmp_path: Path, tokenizer_folder: str
) -> None:
    vocabulary = _resolve(tmp_path, *_hugging_face(tokenizer_folder), "--vocab-size", "130")
    assert vocabulary == Vocabulary(size=130, padded_size=256)


@pytest.mark.parametrize("option", ["--vocab-size", "--padded-vocab-size"])
def test_a_vocabulary_larger_than_the_models_is_refused(
    option: str, tmp_path: Path, tokenizer_folder: str
) -> None:
    typed = (*_hugging_face(tokenizer_folder), option, "40")
    message = f" {_NUM_WORDS} tokens and {option} is 40; give {option} {_NUM_WORDS} or more"
    with pytest.raises(ConfigurationError, match=message):
        _resolve(tmp_path, *typed, without=("--vocab-size",))


def test_a_tokenizer_that_does_not_exist_is_refused_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "build_tokenizer", None)  # which would ask
    for folder in (str(tmp_path / "nothing" / "here"), "tests/tokenizr"):
        with pytest.raises(ConfigurationError, match=f"{folder} does not exist; give the path"):
            _resolve(tmp_path, *_hugging_face(folder), without=("--vocab-size",))


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _resolve(tmp_path, *_hugging_face(str(tmp_path)), without=("--vocab-size",))
    message = str(caught.value)
    assert message.startswith(f"tokenizer HuggingFaceTokenizer cannot be built of {tmp_path}: ")
    assert "\n" not in message
