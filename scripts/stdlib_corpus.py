"""A real corpus that every machine with Python has: the standard library's own source.

One file is one document: some 600 of them, 11 MB, from a few tokens to nearly two hundred thousand.
A byte-level BPE is trained on them on the spot, so nothing is downloaded. Writes

    DIR/tokenizer/             --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR/tokenizer
    DIR/stdlib.bin, .idx       --data-path DIR/stdlib
    DIR/complete.json          what they were made from; a later run that agrees keeps them
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.hydraulis.data.preprocess import report_run
from megatron.hydraulis.data.tokenizer import (
    DocumentEncoder,
    TokenizerSettings,
    build_tokenizer,
)
from megatron.hydraulis.errors import DataError, HydraulisError
from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

VOCABULARY_SIZE = 2048
END_OF_DOCUMENT = "<|endoftext|>"
RECIPE = 1
"""Raise it when the same files must give another corpus; old corpora are then rebuilt."""

_LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
_EXIT_BAD_INPUT = 2


def source_files(root: Path) -> list[Path]:
    """The library's ``.py`` files without tests and installed packages.

    In the order of a hash of their names: a validation part cut off the end is then a fair sample,
    which it would not be in alphabetical order.
    """

    def found() -> Iterator[Path]:
        for parent, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS]
            yield from (Path(parent, name) for name in names if name.endswith(".py"))

    def place(file: Path) -> str:
        return hashlib.sha256(file.relative_to(root).as_posix().encode()).hexdigest()

    return sorted((file for file in found() if file.stat().st_size > 0), key=place)


def train_tokenizer(files: Sequence[Path], folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE and save it as Megatron's HuggingFaceTokenizer reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.read_text("utf-8") for file in files), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n")


def provenance(files: Sequence[Path], vocab_size: int) -> dict[str, Any]:
    """Everything that the corpus depends on; an equal one need not be made again."""
    return {
        "python": platform.python_version(),
        "recipe": RECIPE,
        "vocabulary_size": vocab_size,
        "num_files": len(files),
        "num_bytes": sum(file.stat().st_size for file in files),
    }


def is_complete(folder: Path, made_from: dict[str, Any]) -> bool:
    """True if the folder holds a whole corpus made from just this."""
    names = ("stdlib.bin", "stdlib.idx", "tokenizer/tokenizer.json")
    if not all((folder / name).is_file() for name in names):
        return False
    try:
        written: dict[str, Any] = json.loads((folder / "complete.json").read_text())
    except (OSError, ValueError):
        return False
    return written == made_from


def build(
    folder: Path, root: Path, *, vocab_size: int = VOCABULARY_SIZE, num_workers: int = 1
) -> bool:
    """Make the corpus unless it is there.

    Args:
        folder: where it goes.
        root: the standard library.
        vocab_size: tokens of the vocabulary, the end-of-document token included.
        num_workers: processes that tokenize.

    Returns:
        True if it was made, False if it was kept.

    Raises:
        DataError: no source files, or the folder cannot be written.
    """
    files = source_files(root)
    if not files:
        raise DataError(
            f"the corpus is made of the standard library's .py files but {root} has none; install "
            f"a Python that comes with its source"
        )
    made_from = provenance(files, vocab_size)
    print(
        f"{made_from['num_files']} source files of Python {made_from['python']}, "
        f"{made_from['num_bytes'] / 1e6:.1f} MB"
    )
    if is_complete(folder, made_from):
        print(f"{folder} is complete and is kept")
        return False
    marker = folder / "complete.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.unlink(missing_ok=True)
        print(f"training a byte-level BPE of {vocab_size} tokens …", flush=True)
        train_tokenizer(files, folder / "tokenizer", vocab_size)
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}; choose another --output-dir"
        ) from error
    silence_warnings_of_imports()
    tokenizer = build_tokenizer(
        TokenizerSettings(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer")
        )
    )
    report_run(files, folder / "stdlib", DocumentEncoder(tokenizer), num_workers=num_workers)
    marker.write_text(json.dumps(made_from, indent=2) + "\n")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR")
    namespace = parser.parse_args(argv)
    # A relative path without a separator could be taken for a name on a model hub.
    folder = namespace.output_dir.absolute()
    try:
        build(
            folder,
            Path(sysconfig.get_paths()["stdlib"]),
            num_workers=len(os.sched_getaffinity(0)),
        )
    except HydraulisError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
