"""Text to token ids with Megatron's own tokenizers."""

import argparse
import hashlib
import logging
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.documents import RawDocument
from megatron.hydraulis.errors import ConfigurationError, DataError
from megatron.hydraulis.json_object import JsonObject, read_json

TEXT_TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
)
"""Megatron's tokenizers that turn a plain text into ids and know an end of document."""

# The flags that each tokenizer needs. HuggingFaceTokenizer also takes the name of a published one.
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
    "SFTTokenizer": ("tokenizer_model",),
}

_UINT16_VOCABULARY_LIMIT = 65_500
"""Size below which Megatron stores 2-byte ids (``DType.optimal_dtype``)."""

_FROM_HUB = ("HuggingFaceTokenizer", "SFTTokenizer")
_HUB_PATIENCE_S = 2.0
"""Patience with each of the Hub's addresses, about eight; a lost packet is resent after 1 s."""
_HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"
"""Names on the Hugging Face hub: ``gpt2``, ``owner/name``."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Settings of Megatron's ``build_tokenizer``; names and defaults are those of its flags."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    metadata_path: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    special_tokens: Sequence[str] | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    tokenizer_hf_no_use_fast: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False
    trust_remote_code: bool = False
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int = -1
    chat_template: str | None = None
    pad_vocab_size: bool = False
    """Padding is the model's concern; False keeps ``build_tokenizer`` from asking for its shape."""

    def __post_init__(self) -> None:
        if self.tokenizer_type not in TEXT_TOKENIZER_TYPES:
            raise ConfigurationError(
                f"--tokenizer-type is one of {', '.join(TEXT_TOKENIZER_TYPES)} but is "
                f"'{self.tokenizer_type}'"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigurationError(
                f"a vocabulary has at least 1 token but --vocab-size is {self.vocab_size}; give "
                f"the number of tokens"
            )
        files = (self.tokenizer_model, self.metadata_path, self.vocab_file, self.merge_file)
        if self.tokenizer_type == "NullTokenizer" and any(files):
            raise ConfigurationError(
                f"NullTokenizer is made from --vocab-size alone but files are given: "
                f"{', '.join(filter(None, files))}; remove them"
            )
        check_tokenizer_sources(self)


def check_tokenizer_sources(settings: TokenizerSettings | argparse.Namespace) -> None:
    """Raise ConfigurationError unless what a tokenizer is made from is given and exists.

    A Hugging Face tokenizer may also be named as on the Hub, where asking for a mistyped path would
    take long. ``owner/name`` is a path if there is a folder ``owner`` here.
    """
    kind = settings.tokenizer_type
    files = _MADE_FROM_FILES.get(kind, ())
    for name in files + _MADE_FROM_VALUES.get(kind, ()):
        option, value = f"--{name.replace('_', '-')}", getattr(settings, name)
        if value is None:
            raise ConfigurationError(
                f"{kind} is made from {option}, which is missing; give {option}"
            )
        if name in files and not os.path.isfile(value):
            raise ConfigurationError(
                f"{kind} is made from {option}, but there is no file {value}; correct the path"
            )
    model = str(settings.tokenizer_model)
    if kind == "HuggingFaceTokenizer" and not os.path.exists(model):
        folder = os.path.dirname(model)
        if not re.fullmatch(_HUB_NAME, model) or (folder and os.path.isdir(folder)):
            raise ConfigurationError(
                f"--tokenizer-model: {model} does not exist; give the path of the tokenizer's file "
                "or folder"
            )


def _hub_problem() -> str | None:
    """Reason why the Hugging Face Hub is out of reach; None if it is not, or if nobody asks it from
    here, because its library is offline or uses a proxy."""
    from huggingface_hub import constants

    try:
        place = urlsplit(constants.ENDPOINT)
        proxies = {place.scheme, "all"} & getproxies().keys()
        if constants.HF_HUB_OFFLINE or (proxies and not proxy_bypass(place.hostname or "")):
            return None
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), _HUB_PATIENCE_S).close()
    except (OSError, ValueError) as error:  # ValueError: HF_ENDPOINT is no address
        return f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'strerror', '') or error})"
    return None


def _copy_of(model: str, problem: str) -> str:
    """The folder of the copy of a Hub's tokenizer. Raises DataError without one.

    The Hub's library would ask the Hub for a minute, on every rank.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"--tokenizer-model {model}: there is no such path, so it is the name of a tokenizer "
            f"on the Hugging Face Hub, but {problem} and {constants.HF_HUB_CACHE} has no copy; "
            f"give a folder, or run hf download {model} where there is internet, with HF_HOME set "
            "to a folder that ranks can read"
        ) from error


def build_tokenizer(settings: TokenizerSettings | argparse.Namespace) -> Any:
    """Megatron's tokenizer of that type; the settings may be Megatron's arguments.

    Raises:
        DataError: the tokenizer cannot be built, with the reason.
    """
    # Our workers are the parallelism; the library's own threads would not survive their fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It warns of texts longer than some model's context; documents may have any length here.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    source = str(settings.tokenizer_model or settings.vocab_file)
    tried, fix = "", "check --tokenizer-type and the paths of its files"
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as upstream

        if settings.tokenizer_type in _FROM_HUB and not os.path.exists(source):
            tried = (
                f" ({os.path.abspath(source)} does not exist, so it was taken for a name on the "
                "Hugging Face Hub)"
            )
            fix = "check --tokenizer-type, the name and, if it is set, HF_ENDPOINT"
            problem = _hub_problem() if re.fullmatch(_HUB_NAME, source) else None
            if problem is not None:
                copy = _copy_of(source, problem)
                tried += f" by its copy {copy}, as {problem}"
                fix += f", or run hf download {source} where there is internet"
                settings = argparse.Namespace(**vars(settings) | {"tokenizer_model": copy})
        return upstream(settings)
    except DataError:
        raise
    except ImportError as error:
        raise DataError(
            f"tokenizer {settings.tokenizer_type} needs a package that is not installed ({error}); "
            f"install it with pip"
        ) from None
    except Exception as error:
        # Each library fails in its own way; all that the user can act on is which and why.
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(
            f"tokenizer {settings.tokenizer_type} cannot be built of {source}{tried}: {lines[0]}; "
            f"{fix}"
        ) from error


@dataclass(frozen=True)
class TokenizerFingerprint:
    """The meaning of a dataset's token ids; written next to it as ``prefix.tokenizer.json``."""

    num_tokens: int
    """Size of the tokenizer's vocabulary."""
    vocabulary: str
    """SHA-256 of its tokens in the order of their ids."""

    @classmethod
    def of(cls, tokenizer: Any, num_tokens: int | None = None) -> "TokenizerFingerprint | None":
        """Fingerprint of num_tokens ids, by default of all; None if tokens cannot be listed."""
        digest = hashlib.sha256()
        try:
            token_of = tokenizer.inv_vocab
            size = int(tokenizer.vocab_size) if num_tokens is None else num_tokens
            for token in range(size):
                digest.update(f"{token_of.get(token)!r}\n".encode())
        except Exception:  # libraries raise their own kinds, and NullTokenizer has no tokens
            return None
        return cls(size, digest.hexdigest())

    @classmethod
    def read(cls, prefix: str) -> "TokenizerFingerprint | None":
        """Fingerprint of the dataset ``prefix``; None if there is none. Raises DataError."""
        path = tokenizer_path(prefix)
        if not os.path.exists(path):
            return None
        content = JsonObject(read_json(path, "tokenizer", DataError), path, DataError)
        return cls(content.integer("num_tokens"), content.text("vocabulary"))


def tokenizer_path(prefix: str) -> str:
    """Path of the file that says which tokenizer made the dataset ``prefix``."""
    return prefix + ".tokenizer.json"


def check_made_with(tokenizer: Any, prefixes: Sequence[str]) -> None:
    """Raise ConfigurationError for a dataset whose ids mean other tokens than the tokenizer's.

    Tokens that the tokenizer has in addition do not matter, nor does a dataset without a record.
    """
    for prefix in prefixes:
        recorded = TokenizerFingerprint.read(prefix)
        if recorded is None:
            continue
        here = TokenizerFingerprint.of(tokenizer, recorded.num_tokens)
        if here is not None and here != recorded:
            raise ConfigurationError(
                f"dataset '{prefix}' was made with another tokenizer, of {recorded.num_tokens} "
                f"tokens, and this one, of {tokenizer.vocab_size}, has others for its ids; give "
                f"the tokenizer of the data, or remove {tokenizer_path(prefix)}"
            )


@dataclass(frozen=True, eq=False)
class DocumentEncoder:
    """Turns documents into token ids of the type that the dataset stores.

    Args:
        tokenizer: as ``build_tokenizer`` gives it.
        append_eod: end every document with the tokenizer's end-of-document token.

    Raises:
        DataError: the tokenizer has no such token.
    """

    tokenizer: Any
    append_eod: bool = True

    def __post_init__(self) -> None:
        if self.append_eod and self._eod() is None:
            raise DataError(
                "documents end with the tokenizer's end-of-document token but it has none; choose "
                "another tokenizer or give --no-append-eod"
            )

    def _eod(self) -> int | None:
        try:
            eod: int | None = self.tokenizer.eod
        except (AttributeError, KeyError, NotImplementedError):
            return None
        return eod

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.vocab_size)

    @property
    def fingerprint(self) -> TokenizerFingerprint | None:
        return TokenizerFingerprint.of(self.tokenizer)

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of ``transformers`` behind a ``HuggingFaceTokenizer``."""
        return self.tokenizer._tokenizer.tokenizer

    @property
    def token_type(self) -> type[np.integer]:
        """The type Megatron stores ids of this vocabulary in."""
        return np.uint16 if self.vocab_size < _UINT16_VOCABULARY_LIMIT else np.int32

    def encode(self, document: RawDocument) -> npt.NDArray[np.integer] | None:
        """Token ids of a document, or None if it has no text.

        Raises:
            DataError: the text cannot be read or tokenized.
        """
        text = document.text()
        if not text:
            return None
        try:
            ids = list(self.tokenizer.tokenize(text))
        except Exception as error:
            raise DataError(
                f"{document.origin}: the tokenizer refuses the text ({error}); correct the text or "
                f"choose another --tokenizer-type"
            ) from error
        if self.append_eod:
            ids.append(self._eod())
        return self.stored(ids, document.origin) if ids else None

    def stored(self, ids: Sequence[int], origin: str) -> npt.NDArray[np.integer]:
        """Ids as the dataset stores them.

        Raises:
            DataError: no id, or one outside the vocabulary.
        """
        if not ids:
            raise DataError(
                f"{origin}: a sequence has at least 1 token but the tokenizer gave 0; check the "
                f"text and, of a conversation, the chat template"
            )
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= self.vocab_size:
            raise DataError(
                f"{origin}: token ids must be below the vocabulary of {self.vocab_size} "
                f"but the tokenizer gave {lowest if lowest < 0 else highest}; check the "
                f"tokenizer's files and --vocab-size"
            )
        return np.array(ids, dtype=self.token_type)
