"""Documents out of text files, JSON lines and Parquet, in a fixed order."""

import contextlib
import fnmatch
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import DataError

JSON_LINES_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
"""Files with one JSON object a line; Megatron's own examples call them ``.json``."""
PARQUET_SUFFIX = ".parquet"

_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RawDocument:
    """A document as it is in its file. ``text`` decodes it, in the workers."""

    path: str
    line: int | None
    """Line of a JSON lines file or row of a Parquet file, from 1; None: the whole file."""
    content: bytes
    json_key: str | None
    """Key of the text, if ``content`` is a JSON object."""
    read_bytes: int
    """Number of bytes of the file that this document took, for progress."""

    @property
    def origin(self) -> str:
        """File and line, for messages."""
        return self.path if self.line is None else f"{self.path}, line {self.line}"

    def text(self) -> str:
        """The text of the document.

        Raises:
            DataError: not UTF-8, not JSON, or without the key.
        """
        if self.json_key is None:
            return self._decoded()
        key, value = self.json_key, self.json()
        if not isinstance(value, dict) or key not in value:
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(
                f"{self.origin}: the text is under key '{key}' but the line has {found or 'no key'}"
                f"; set --json-key"
            )
        if not isinstance(value[key], str):
            raise DataError(
                f"{self.origin}: key '{key}' holds a text but here is {type(value[key]).__name__}; "
                f"correct the line or set --json-key"
            )
        return str(value[key])

    def json(self) -> Any:
        """The content as JSON.

        Raises:
            DataError: not UTF-8, or not JSON.
        """
        try:
            return json.loads(self._decoded())
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.origin}: a line is one JSON object but this one is not ({error}); correct "
                f"or remove it"
            ) from None

    def _decoded(self) -> str:
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.origin}: text is UTF-8 but byte {error.start} is "
                f"0x{self.content[error.start]:02x}; convert the file or exclude it "
                f"(--pattern chooses files of a folder)"
            ) from None


def find_files(inputs: Sequence[str | Path], *, pattern: str = "*") -> list[Path]:
    """The files behind ``--input``: files as given, folders recursively in order of names.

    Args:
        inputs: files and folders.
        pattern: which files of a folder to take, by name (as a shell's ``*.py``). Hidden files and
            folders are skipped.

    Raises:
        DataError: a path that does not exist, or no file at all.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            files.extend(_files_of_folder(path, pattern))
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"input {path} does not exist; --input takes files and folders")
    if not files:
        raise DataError(
            f"preprocessing needs at least one file but {', '.join(map(str, inputs))} has none "
            f"that matches '{pattern}'; check --input and --pattern"
        )
    return files


def _files_of_folder(folder: Path, pattern: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and fnmatch.fnmatchcase(name, pattern) and path.is_file():
                yield path


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot read folder {error.filename}: {error.strerror}")


def read_documents(path: Path, *, json_key: str | None) -> Iterator[RawDocument]:
    """The documents of one file: a text file is one, JSON lines and Parquet hold many.

    Args:
        path: of the file.
        json_key: key, or column, of the text; None: documents are whole JSON objects, as which rows
            of Parquet are given, too.

    Raises:
        DataError: the file cannot be read, is damaged or lacks the column.
    """
    name = path.name.lower()
    try:
        if name.endswith(JSON_LINES_SUFFIXES):
            yield from _read_json_lines(path, json_key)
        elif name.endswith(PARQUET_SUFFIX):
            yield from _read_parquet(path, json_key)
        else:
            content = path.read_bytes()
            yield RawDocument(str(path), None, content, None, len(content))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({error}); copy or compress it again"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _read_json_lines(path: Path, json_key: str | None) -> Iterator[RawDocument]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        lines: Iterable[bytes] = file
        if path.suffix.lower() == ".gz":
            lines = stack.enter_context(gzip.GzipFile(fileobj=file))
        position = 0
        for number, line in enumerate(lines, start=1):
            before, position = position, file.tell()
            if line.strip():
                yield RawDocument(str(path), number, line, json_key, position - before)


def _read_parquet(path: Path, column: str | None) -> Iterator[RawDocument]:
    # Imported here: only Parquet needs it.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = None if column is None else [column]
            if column is not None:
                _check_text_column(path, file.schema_arrow, column)
            row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
            batches = file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                text = json.dumps(row, default=str) if column is None else row[column] or ""
                yield RawDocument(str(path), number, text.encode(), None, row_bytes)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a whole Parquet file ({reason}); write it again") from None


def _check_text_column(path: Path, schema: Any, column: str) -> None:
    import pyarrow

    if column not in schema.names:
        raise DataError(
            f"{path}: the text is in column '{column}' but the columns are "
            f"{', '.join(schema.names)}; set --json-key"
        )
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(
            f"{path}: column '{column}' holds text but is of type {kind}; set --json-key"
        )
