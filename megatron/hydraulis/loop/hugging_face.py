"""``--hf FOLDER``: the model, tokenizer and weights of a run are those of a Hugging Face folder.

The folder becomes flags in front of those that are given, which therefore win; what its weights do
not allow is refused.
"""

from __future__ import annotations

import argparse
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel, model_flags
from megatron.hydraulis.checkpoint.manifest import known_settings, model_differences, model_of
from megatron.hydraulis.errors import ConfigurationError, listed
from megatron.hydraulis.flags.arguments import Resolved

_READS_FOLDERS = ("HuggingFaceTokenizer", "SFTTokenizer")
"""Types of tokenizers whose ``--tokenizer-model`` is a Hugging Face folder, the default first."""


@dataclass(frozen=True)
class FolderOfRun:
    """The folder that ``--hf`` names."""

    path: Path
    model: HuggingFaceModel
    flags: tuple[str, ...]
    """Words that stand in front of the command line."""

    @classmethod
    def named_in(cls, words: Sequence[str]) -> FolderOfRun | None:
        """The folder of a command line of training; None without ``--hf``.

        Raises:
            CheckpointError: the folder is damaged or incomplete.
            ConfigurationError: the model has no counterpart in Megatron, its weights are fp16, or
                there is no tokenizer.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for option in ("--hf", "--tokenizer-type", "--tokenizer-model"):
            parser.add_argument(option, nargs="?")
        parser.add_argument("--bf16", action="store_true")
        given, _ = parser.parse_known_args(words)
        if given.hf is None:
            return None
        # Only a job that begins with a folder needs their libraries.
        from megatron.hydraulis.checkpoint.hugging_face.folder import has_tokenizer
        from megatron.hydraulis.checkpoint.hugging_face.import_hf import open_folder

        path = Path(given.hf).absolute()
        model, _, dtype = open_folder(path)
        if dtype == torch.float16 and not given.bf16:
            raise ConfigurationError(
                f"--hf {given.hf}: models train in bf16 or fp32 but these weights are fp16; add "
                f"--bf16, or save the model in fp32"
            )
        flags = shlex.split(" ".join(model_flags(model)))
        if dtype == torch.bfloat16:
            flags.append("--bf16")
        if given.tokenizer_type is None or given.tokenizer_type in _READS_FOLDERS:
            if given.tokenizer_model is None and not has_tokenizer(path):
                raise ConfigurationError(
                    f"--hf {given.hf}: a tokenizer is read from the folder but it has none, such "
                    f"as tokenizer.json; copy it there, or give --tokenizer-model DIR"
                )
            flags += ["--tokenizer-type", _READS_FOLDERS[0], "--tokenizer-model", str(path)]
        return cls(path, model, tuple(flags))

    @contextmanager
    def blamed_for_its_flags(self, words: Sequence[str]) -> Iterator[None]:
        """Let an error about flags say which of them come from the folder.

        words: those of the command line.
        """
        try:
            yield
        except ConfigurationError as error:
            text = str(error)
            given = {word.partition("=")[0] for word in words}
            blamed = [
                flag
                for flag in model_flags(self.model)
                if (option := flag.split()[0]) not in given and re.search(rf"{option}\b(?!-)", text)
            ]
            if blamed:
                error.args = (f"{text}\n(from --hf {self.path}: {', '.join(blamed)})",)
            raise

    def check(self, resolved: Resolved) -> None:
        """Raise ConfigurationError if the whole command line describes another model."""
        own = model_of(Namespace(**self.model.to_arguments()), self.model.vocab_size)
        differences = model_differences(own, model_of(resolved.args, resolved.vocabulary.size))
        if not differences:
            return
        settings = {difference.split()[0] for difference in differences}
        given = [each for each in resolved.given if settings & _names_of(each)]
        raise ConfigurationError(
            f"--hf {self.path} and {' '.join(given) or 'other flags'} contradict each other: "
            f"{listed(differences)}; remove them, or name another folder"
        )


def _names_of(typed: str) -> Set[str]:
    """The names of an option's setting in checkpoints."""
    return known_settings({typed.split()[0].removeprefix("--").replace("-", "_"): None}).keys()
