"""``hydraulis.json``: what a checkpoint holds beside tensors, and what its files must be.

Written last. It has a checksum of its own, so that no flipped bit in it goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import CheckpointError
from megatron.hydraulis.json_object import JsonObject, parse_json

__all__ = ["MANIFEST_NAME", "FileRecord", "Manifest", "files_of", "sha256_of", "share_of_files"]

MANIFEST_NAME = "hydraulis.json"
VERSION = 1
MAX_BYTES = 64 << 20
"""Of a manifest that is read: it holds a line a file and a state of a few kilobytes."""
_READ_BYTES = 1 << 20
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    num_bytes: int
    sha256: str

    def problem(self, path: Path, *, checks_content: bool) -> str | None:
        """What is wrong with the file, None where nothing is."""
        try:
            size = path.stat().st_size
            if size != self.num_bytes:
                return f"{path.name} has {size} bytes instead of {self.num_bytes}"
            if checks_content and sha256_of(path) != self.sha256:
                return f"{path.name} is damaged: its SHA-256 is not that of what was written"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror}"
        return None


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint's description."""

    iteration: int
    num_ranks: int
    """That wrote it."""
    model: Mapping[str, Any]
    """Shape, vocabulary and dtype: what a run that loads it must have as well."""
    state: Mapping[str, Any]
    """Of the run: counters, sampler, scheduler, optimizer, planner."""
    configuration: Mapping[str, Any]
    """Settings of the run that wrote it; for people."""
    files: Mapping[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        """Of all files, without the manifest itself."""
        return sum(record.num_bytes for record in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Fit for JSON."""
        content: dict[str, Any] = {
            "version": VERSION,
            "iteration": self.iteration,
            "num_ranks": self.num_ranks,
            "model": dict(self.model),
            "state": dict(self.state),
            "configuration": dict(self.configuration),
            "files": {
                name: {"bytes": record.num_bytes, "sha256": record.sha256}
                for name, record in sorted(self.files.items())
            },
        }
        return content | {"sha256": _digest(content)}

    def write(self, folder: Path) -> None:
        """Write it into the folder, at once or not at all. Raises OSError."""
        unfinished = folder / f".{MANIFEST_NAME}"
        with unfinished.open("w") as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / MANIFEST_NAME)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises CheckpointError, FileNotFoundError where there is none.
        """
        path = folder / MANIFEST_NAME
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
            text = raw.decode()
        except FileNotFoundError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: must be readable text but: {error}; load another checkpoint"
            ) from error
        if len(raw) > MAX_BYTES:
            raise CheckpointError(
                f"{path}: a manifest has at most {MAX_BYTES} bytes but this one has more; load "
                "another checkpoint"
            )
        content = JsonObject(
            parse_json(text, str(path), CheckpointError), str(path), CheckpointError
        )
        content.check_version(VERSION)
        rest = {key: content.value(key) for key in content.keys if key != "sha256"}
        if content.text("sha256") != _digest(rest):
            raise CheckpointError(
                f"{path}: its own SHA-256 is not that of its content, so it is damaged; load "
                "another checkpoint"
            )
        files = content.nested(content.value("files"), f"{path}, files")
        return cls(
            iteration=content.integer("iteration"),
            num_ranks=content.integer("num_ranks"),
            model=_mapping(content, "model"),
            state=_mapping(content, "state"),
            configuration=_mapping(content, "configuration"),
            files={
                name: _record(files.nested(files.value(name), f"{path}, file {name}"), name)
                for name in files.keys
            },
        )

    def problems(
        self,
        folder: Path,
        *,
        share: int = 0,
        num_shares: int = 1,
        checks_content: bool = True,
        advance: Callable[[int], None] | None = None,
    ) -> list[str]:
        """What is wrong with the files.

        Args:
            folder: of the checkpoint.
            share: which part of the files is looked at, of ``num_shares``.
            num_shares: callers that share them out.
            checks_content: compare checksums too, not sizes alone.
            advance: told bytes of files that are done.
        """
        sizes = {name: record.num_bytes for name, record in self.files.items()}
        problems = []
        for name in share_of_files(sizes, share, num_shares):
            problem = self.files[name].problem(folder / name, checks_content=checks_content)
            if problem is not None:
                problems.append(problem)
            if advance is not None:
                advance(sizes[name])
        return problems


def share_of_files(sizes: Mapping[str, int], share: int, num_shares: int) -> list[str]:
    """The files that one of several readers takes: largest first to whoever has least."""
    loads = [0] * num_shares
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        to = loads.index(min(loads))
        loads[to] += sizes[name] + 1
        if to == share:
            mine.append(name)
    return mine


def files_of(folder: Path) -> list[str]:
    """Names of the files that a manifest lists: all but itself."""
    return sorted(
        path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_NAME
    )


def sha256_of(path: Path) -> str:
    """Of a file's content, read piece by piece. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in _pieces(file):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Any) -> Iterable[bytes]:
    return iter(lambda: file.read(_READ_BYTES), b"")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _mapping(content: JsonObject, key: str) -> dict[str, Any]:
    value = content.value(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{content.what}: {key} must be an object; load another checkpoint")
    return value


def _record(content: JsonObject, name: str) -> FileRecord:
    record = FileRecord(content.integer("bytes"), content.text("sha256"))
    if not _HEX_SHA256.fullmatch(record.sha256) or Path(name).name != name:
        raise CheckpointError(
            f"{content.what}: a file has a plain name and a SHA-256 of 64 hex digits; load another "
            "checkpoint"
        )
    return record
