"""``metrics.jsonl``: one JSON object an iteration, appended and flushed line by line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import IterationRecord

METRICS_FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends records to ``<run_dir>/metrics.jsonl``; makes the folder if there is none.

    Writes are unbuffered, so a line is in the file when `write` returns, and after a failed write
    nothing is left behind that could fail once more at close. A line that a killed run left
    unfinished is cut off at opening. A resumed run appends; `read_metrics` lets the later record
    of an iteration win.

    Raises `HydraulisError` if the file cannot be opened or written, e.g. on a full disk.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / METRICS_FILE_NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(self.path)
            self._file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise HydraulisError(
                f"metrics need a file that can be written: {self.path}: {error.strerror}; "
                "choose another --run-dir"
            ) from error

    def write(self, record: IterationRecord) -> None:
        """Appends one line, whole or not at all."""
        line = json.dumps(record.to_json(), allow_nan=False).encode() + b"\n"
        num_written = 0
        try:
            while num_written < len(line):
                num_written += self._file.write(line[num_written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._file.seek(0, 2) - num_written)
            raise HydraulisError(
                f"metrics of iteration {record.iteration} need {len(line)} bytes in {self.path}: "
                f"{error.strerror}; free space there or resume with another --run-dir"
            ) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[IterationRecord]:
    """Records of ``<run_dir>/metrics.jsonl`` by iteration; the last one of an iteration counts.

    A last line without its end, as a killed run leaves it, is passed over.
    Raises `HydraulisError` if there is no such file, or a whole line is not a record.
    """
    path = Path(run_dir) / METRICS_FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HydraulisError(
            f"a run folder holds {METRICS_FILE_NAME}: {path}: {error.strerror}; "
            "give the folder of a run that finished an iteration"
        ) from error
    whole_lines = content.split(b"\n")[:-1]
    records: dict[int, IterationRecord] = {}
    for number, line in enumerate(whole_lines, start=1):
        try:
            record = IterationRecord.from_json(json.loads(line))
        except (ValueError, TypeError, HydraulisError) as error:
            raise HydraulisError(
                f"every line of {path} is one iteration record, but line {number} of "
                f"{len(whole_lines)} is not ({error}); remove that line"
            ) from error
        records[record.iteration] = record
    return [records[iteration] for iteration in sorted(records)]


def _cut_unfinished_line(path: Path) -> None:
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
