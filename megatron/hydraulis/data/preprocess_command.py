"""``hydraulis preprocess``: flags in, a dataset and a summary out."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from megatron.hydraulis.data.documents import find_files
from megatron.hydraulis.data.tokenizer import (
    TEXT_TOKENIZER_TYPES,
    DocumentEncoder,
    TokenizerSettings,
    build_tokenizer,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.quiet_imports import silence_warnings_of_imports

__all__ = ["add_arguments", "report_run", "run"]

_MODEL_SUFFIXES = (".bin", ".idx")
_BAR_WIDTH = 24


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
        help="files of folders to use, by name, e.g. '*.py' (default: all that are not hidden)",
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
            f"remove the suffix"
        )
    # What costs nothing to check comes before the seconds that importing Megatron takes.
    settings = tokenizer_settings(namespace)
    files = find_files(namespace.input, pattern=namespace.pattern)
    silence_warnings_of_imports()
    encoder = DocumentEncoder(build_tokenizer(settings), append_eod=namespace.append_eod)
    report_run(
        files,
        namespace.output_prefix,
        encoder,
        json_key=namespace.json_key,
        num_workers=namespace.workers,
    )
    return 0


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
        f"({report.num_empty:,} empty ones skipped), {report.num_tokens:,} tokens; "
        f"{_length_summary(report.document_lengths)}",
        highlight=False,
    )
    console.print(f"wrote {output_prefix}.bin and .idx", highlight=False, soft_wrap=True)


def _length_summary(lengths: npt.NDArray[np.int64]) -> str:
    return (
        f"length min {lengths.min():,}, median {np.median(lengths):,.0f}, mean "
        f"{lengths.mean():,.0f}, max {lengths.max():,}"
    )


@dataclass(frozen=True)
class LengthBin:
    """Documents with ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    num_documents: int
    num_tokens: int


def length_bins(lengths: npt.NDArray[np.int64]) -> tuple[LengthBin, ...]:
    """Bins 1, 2–3, 4–7, 8–15, … from the shortest document to the longest.

    Args:
        lengths: (num_documents,) tokens of each document, at least 1.
    """
    if len(lengths) == 0:
        return ()
    # frexp, not log2: exact for every length below 2**53.
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    lowest, highest = int(exponents.min()), int(exponents.max())
    num_documents = np.bincount(exponents - lowest)
    num_tokens = np.bincount(exponents - lowest, weights=lengths)
    return tuple(
        LengthBin(
            first=1 << exponent,
            last=(2 << exponent) - 1,
            num_documents=int(num_documents[exponent - lowest]),
            num_tokens=int(num_tokens[exponent - lowest]),
        )
        for exponent in range(lowest, highest + 1)
    )


def length_table(lengths: npt.NDArray[np.int64]) -> Table:
    """The bins as a table: documents with a bar, and the share of all tokens."""
    bins = length_bins(lengths)
    most = max((row.num_documents for row in bins), default=1)
    all_tokens = max(1, sum(row.num_tokens for row in bins))
    table = Table(title="document lengths", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("", min_width=_BAR_WIDTH)
    table.add_column("tokens in all", justify="right")
    for row in bins:
        # A bin that is not empty shows at least one block: the long tail is what matters here.
        width = -(-row.num_documents * _BAR_WIDTH // most)
        table.add_row(
            f"{row.first:,} – {row.last:,}" if row.last > row.first else f"{row.first:,}",
            f"{row.num_documents:,}",
            "█" * width,
            f"{row.num_tokens / all_tokens:.1%}",
        )
    return table
