"""``python -m megatron.hydraulis preprocess``: flags in, a dataset and a summary out."""

import argparse
import importlib
import logging
import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.documents import find_files
from megatron.hydraulis.data.tokenizer import (
    TEXT_TOKENIZER_TYPES,
    DocumentEncoder,
    TokenizerSettings,
    build_tokenizer,
)
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["add_arguments", "import_megatron_quietly", "report_run", "run"]

_MODEL_SUFFIXES = (".bin", ".idx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files and folders (recursively, by name): text files, one document each; .jsonl, "
        ".json and .jsonl.gz with one JSON object a line; .parquet",
    )
    group.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin and P.idx")
    group.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key of JSON lines, or column of Parquet files, that holds the text (default: text)",
    )
    group.add_argument(
        "--pattern",
        default="*",
        metavar="GLOB",
        help="files of folders to take, by name, e.g. '*.py' (default: all that are not hidden)",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenize; the output does not depend on it (default: the %(default)s "
        "cores of this machine)",
    )
    group.add_argument(
        "--no-append-eod",
        dest="append_eod",
        action="store_false",
        help="do not end documents with the end-of-document token",
    )
    _add_tokenizer_arguments(parser)


def _add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokenizer", "Megatron's flags, with their meaning there")
    group.add_argument(
        "--tokenizer-type",
        required=True,
        metavar="TYPE",
        choices=TEXT_TOKENIZER_TYPES,
        help=", ".join(TEXT_TOKENIZER_TYPES),
    )
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="tokenizer file, or folder of a Hugging Face one"
    )
    group.add_argument(
        "--tokenizer-metadata", dest="metadata_path", metavar="FILE", help="its metadata, JSON"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges of GPT2BPETokenizer")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens, for NullTokenizer and TikTokenizer"
    )
    group.add_argument(
        "--tokenizer-special-tokens", dest="special_tokens", nargs="+", metavar="TOKEN"
    )
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"))
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    group.add_argument("--tokenizer-sentencepiece-legacy", action="store_true")
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true")
    group.add_argument("--trust-remote-code", action="store_true")
    group.add_argument("--null-tokenizer-eod-id", type=int, metavar="ID")


def tokenizer_settings(namespace: argparse.Namespace) -> TokenizerSettings:
    """The tokenizer that the flags describe."""
    names = TokenizerSettings.__dataclass_fields__.keys() & vars(namespace).keys()
    given = {name: getattr(namespace, name) for name in names}
    if given["special_tokens"] is not None:
        given["special_tokens"] = tuple(given["special_tokens"])
    return TokenizerSettings(**given)


def run(namespace: argparse.Namespace) -> int:
    """Preprocess as the flags say and print the counts.

    Raises:
        ConfigurationError: flags that make no sense.
        DataError: as ``preprocess``.
    """
    if namespace.workers < 1:
        raise ConfigurationError(f"--workers is at least 1 but is {namespace.workers}; raise it")
    if namespace.output_prefix.endswith(_MODEL_SUFFIXES):
        raise ConfigurationError(
            f"--output-prefix is a path without .bin or .idx but is '{namespace.output_prefix}'; "
            f"leave the suffix out"
        )
    # What costs nothing to check comes before the seconds that importing Megatron takes.
    settings = tokenizer_settings(namespace)
    files = find_files(namespace.input, pattern=namespace.pattern)
    import_megatron_quietly()
    encoder = DocumentEncoder(build_tokenizer(settings), append_eod=namespace.append_eod)
    report_run(
        files,
        namespace.output_prefix,
        encoder,
        json_key=namespace.json_key,
        num_workers=namespace.workers,
    )
    return 0


def import_megatron_quietly() -> None:
    """Megatron and torch warn of missing GPU libraries, of which tokenizing needs none."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")


def report_run(
    files: list[Path],
    output_prefix: str | Path,
    encoder: DocumentEncoder,
    *,
    json_key: str = "text",
    num_workers: int = 1,
) -> None:
    """Preprocess with a progress bar, then print counts and a length histogram.

    Arguments and errors as ``preprocess``.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from megatron.hydraulis.data.length_histogram import length_table
    from megatron.hydraulis.data.preprocess import preprocess

    progress = Progress(
        TextColumn("tokenizing"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    num_bytes = sum(file.stat().st_size for file in files)
    task = progress.add_task("tokenizing", total=num_bytes)

    def advance(num_read: int) -> None:
        # Started late, because it is a thread and workers are forked before this first call.
        progress.start()
        progress.advance(task, num_read)

    try:
        report = preprocess(
            files,
            output_prefix,
            encoder,
            json_key=json_key,
            num_workers=num_workers,
            on_progress=advance,
        )
        progress.update(task, completed=num_bytes)
    finally:
        progress.stop()
    console = Console()
    console.print(length_table(report.document_lengths))
    console.print(
        f"{report.num_files:,} files, {report.num_documents:,} documents "
        f"({report.num_empty:,} empty ones left out), {report.num_tokens:,} tokens; "
        f"{_length_summary(report.document_lengths)}",
        highlight=False,
    )
    console.print(f"wrote {output_prefix}.bin and .idx", highlight=False, soft_wrap=True)


def _length_summary(lengths: npt.NDArray[np.int64]) -> str:
    return (
        f"length min {lengths.min():,}, median {np.median(lengths):,.0f}, mean "
        f"{lengths.mean():,.0f}, max {lengths.max():,}"
    )
