"""The vocabulary of the model: a property of tokenizer and flags, whatever the strategy."""

import argparse
import copy
import math
from dataclasses import dataclass
from pathlib import Path

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron.hydraulis.errors import ConfigurationError

__all__ = ["Vocabulary", "padded_vocabulary_size", "resolve_vocabulary"]

# What each tokenizer is made from. HuggingFaceTokenizer also takes the name of a published one.
_MADE_FROM_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
}
_MADE_FROM_VALUES = {
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
# These take --vocab-size to build the tokenizer with; for others it is a wish about the model.
_SIZED_BY_FLAG = ("NullTokenizer", "TikTokenizer")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Numbers of entries."""

    size: int
    """Tokens that exist; logits beyond are masked."""
    padded_size: int
    """Rows of the embedding and of the output layer."""


def padded_vocabulary_size(size: int, divisible_by: int) -> int:
    """The least multiple of divisible_by that holds size entries."""
    return math.ceil(size / divisible_by) * divisible_by


def resolve_vocabulary(args: argparse.Namespace) -> Vocabulary:
    """Read the tokenizer and size the model's vocabulary after it.

    A given --padded-vocab-size is taken as it is. Otherwise the vocabulary, or a larger
    --vocab-size, is padded to a multiple of --make-vocab-size-divisible-by.

    Raises ConfigurationError when the tokenizer is missing or cannot be read, and when its
    vocabulary is larger than the model's.
    """
    _check_sources(args)
    size = _tokenizer_size(args)
    if args.vocab_size is not None and args.tokenizer_type not in _SIZED_BY_FLAG:
        _check_holds(size, args.vocab_size, "--vocab-size")
        size = args.vocab_size
    if args.padded_vocab_size is not None:
        _check_holds(size, args.padded_vocab_size, "--padded-vocab-size")
        return Vocabulary(size, args.padded_vocab_size)
    return Vocabulary(size, padded_vocabulary_size(size, args.make_vocab_size_divisible_by))


def _check_holds(size: int, num_entries: int, option: str) -> None:
    if size > num_entries:
        raise ConfigurationError(
            f"the vocabulary must fit the model but has {size} tokens and {option} is "
            f"{num_entries}; give {option} {size} or more, or leave it out"
        )


def _check_sources(args: argparse.Namespace) -> None:
    kind = args.tokenizer_type
    files = _MADE_FROM_FILES.get(kind, ())
    for dest in files + _MADE_FROM_VALUES.get(kind, ()):
        option = "--" + dest.replace("_", "-")
        value = getattr(args, dest)
        if value is None:
            raise ConfigurationError(
                f"{kind} is made from {option}, which is missing; give {option}"
            )
        if dest in files and not Path(value).is_file():
            raise ConfigurationError(
                f"{kind} is made from {option}, but there is no file {value}; correct the path"
            )


def _tokenizer_size(args: argparse.Namespace) -> int:
    try:
        # Upstream writes the padded size into the arguments it is given.
        return int(build_tokenizer(copy.copy(args)).vocab_size)
    except Exception as error:  # Each of the tokenizer libraries raises its own kinds.
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{args.tokenizer_type} {args.tokenizer_model or ''} cannot be read: "
            f"{type(error).__name__}: {reason}; check the --tokenizer-* flags"
        ) from error
