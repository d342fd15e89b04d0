"""What a Hugging Face folder has beside the model, taken from another one: its tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.checkpoint.hugging_face.config_json import CONFIG_NAME
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.json_object import JsonObject, read_json

__all__ = ["Companions"]

_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Names that transformers gives to the files of a tokenizer."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Companions:
    """Files of a tokenizer and ids of its special tokens."""

    files: tuple[Path, ...]
    token_ids: dict[str, Any]
    """By their keys of config.json."""

    @classmethod
    def of(cls, folder: Path, vocab_size: int) -> Companions:
        """Those of a Hugging Face folder.

        Raises:
            CheckpointError: it has no configuration that can be read.
            ConfigurationError: a special token is beyond the vocabulary.
        """
        what = f"{folder / CONFIG_NAME}"
        config = JsonObject(
            read_json(folder / CONFIG_NAME, "config", CheckpointError), what, CheckpointError
        )
        token_ids = {key: config.value(key) for key in _IDS if config.has(key)}
        for key, value in token_ids.items():
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not (type(token) is int and 0 <= token < vocab_size):
                    raise ConfigurationError(
                        f"{what}: {key} must be a token below the vocabulary's {vocab_size} but is "
                        f"{token!r}; name the folder whose tokenizer the model was trained with"
                    )
        there = tuple(folder / name for name in _FILES if (folder / name).is_file())
        return cls(there, token_ids)

    def copy_to(self, folder: Path) -> None:
        """Copy the files. Raises OSError."""
        for file in self.files:
            shutil.copyfile(file, folder / file.name)
