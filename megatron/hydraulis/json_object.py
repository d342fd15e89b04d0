"""Reads JSON files and objects by key and type, with errors that say what is wrong, and writes
files atomically."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import FULL_DISK, ConfigurationError, HydraulisError, why_not_written

MAX_FILE_BYTES = 256 << 20
"""Limit of a file that is read: far more than the lengths of a large global batch take."""
MAX_DEPTH = 32
"""Limit of nested objects and lists."""

# Larger whole numbers are typing errors that neither numpy nor a float can hold.
_MOST = 10**18
_MAX_SHOWN_CHARS = 60


class JsonObject:
    """A JSON object whose values are read by key and type.

    The constructor and all methods raise the given class of error, with the object's name, the key
    and the value.
    """

    def __init__(self, content: Any, what: str, error: type[HydraulisError]) -> None:
        self.what = what
        """The object's name in errors."""
        self._error = error
        if not isinstance(content, Mapping):
            raise error(
                f"{what}: must be an object but is {_shown(content)}; write it as an object"
            )
        self._content = content
        self._read: set[str] = set()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, in the order of the file."""
        return tuple(self._content)

    def has(self, key: str) -> bool:
        """True if the object has an optional key."""
        return key in self._content

    def nested(self, content: Any, what: str) -> "JsonObject":
        """An object inside this one, with the same class of error."""
        return JsonObject(content, what, self._error)

    def error(self, message: str) -> HydraulisError:
        """An error of this object's class that begins with its name, to be raised."""
        return self._error(f"{self.what}: {message}")

    def check_version(self, *supported: int) -> None:
        """Raise if there is a ``version`` other than the supported ones, the last the newest."""
        if self.has("version") and self.integer("version") not in supported:
            raise self.error(
                f"version {' or '.join(map(str, supported))} can be read but this one is of "
                f"version {self.integer('version')}; write it in version {supported[-1]}"
            )

    def value(self, key: str) -> Any:
        """The value of a key, whatever its type."""
        if key not in self._content:
            raise self.error(f"needs {key!r} but lacks it; add {key!r}")
        self._read.add(key)
        return self._content[key]

    def integer(self, key: str, *, default: int | None = None) -> int:
        """default: if the key is absent; None if it must not be, here and below."""
        if default is not None and not self.has(key):
            return default
        return self._integer(key, "a whole number", self.value(key))

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(self._integer(key, "whole numbers", value) for value in self.array(key))

    def number(self, key: str, *, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        if isinstance(value, int) and abs(value) > _MOST:
            raise self._wrong(key, "a number of usual size", value)
        return float(value)

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def array(self, key: str) -> list[Any]:
        value = self.value(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def check_all_read(self) -> None:
        """Raise if the object has keys that were not read."""
        unknown = sorted(set(self._content) - self._read)
        if unknown:
            raise self.error(f"has the unknown keys {', '.join(map(repr, unknown))}; remove them")

    def _integer(self, key: str, expected: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, expected, value)
        if abs(value) > _MOST:
            raise self._wrong(key, f"{expected} of usual size", value)
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> HydraulisError:
        return self.error(f"{key} must be {expected} but is {_shown(value)}; correct it")


def _shown(value: Any) -> str:
    """A value in an error, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def read_text(path: str | Path, what: str, error: type[HydraulisError]) -> str:
    """The text of a UTF-8 file; raises the given error, which calls the file what."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise error(
                f"{what} {path}: a file to read has at most {MAX_FILE_BYTES} bytes but this one "
                f"has more; give another file"
            )
        return raw.decode("utf-8-sig")
    except OSError as problem:
        raise error(
            f"{what} {path}: must be a file that can be read but: {problem.strerror}; "
            f"correct the path"
        ) from problem
    except UnicodeDecodeError as problem:
        raise error(
            f"{what} {path}: must be text in UTF-8 but byte {problem.start} is none; "
            f"give another file"
        ) from problem


def read_json(path: str | Path, what: str, error: type[HydraulisError]) -> Any:
    """The content of a JSON file; raises as read_text and parse_json."""
    return parse_json(read_text(path, what, error), f"{what} {path}", error)


def parse_json(text: str, what: str, error: type[HydraulisError]) -> Any:
    """The content of a JSON text; the given error for invalid JSON and for repeated keys."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise error(f"{what}: an object has a key once but {twice!r} twice; remove one")
        return content

    try:
        content = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as problem:
        raise error(
            f"{what}: must be JSON but line {problem.lineno}, column {problem.colno} is not: "
            f"{problem.msg}; correct it there"
        ) from problem
    except (RecursionError, ValueError) as problem:
        # Nested too deep, or a number of thousands of digits.
        raise error(f"{what}: must be JSON of usual size but: {problem}; correct it") from problem
    if _is_deeper(content, MAX_DEPTH):
        raise error(
            f"{what}: objects and lists are nested at most {MAX_DEPTH} deep but these are deeper; "
            f"correct it"
        )
    return content


def _is_deeper(content: Any, depth: int) -> bool:
    if isinstance(content, dict):
        content = content.values()
    elif not isinstance(content, list):
        return False
    return depth == 0 or any(_is_deeper(value, depth - 1) for value in content)


def write_json(path: str | Path, content: Any) -> None:
    """Replace a file atomically, or write to a special file such as /dev/stdout.

    Raises OSError.
    """
    replace_text(Path(path), json.dumps(content, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """`write_json` for text."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def write_output(path: str | Path, content: Any, option: str = "--out") -> None:
    """`write_json` for a file in what an option names; raises ConfigurationError."""
    try:
        write_json(path, content)
    except OSError as error:
        fix = "make room or give another path" if error.errno in FULL_DISK else "give another path"
        raise ConfigurationError(
            f"{option} must be a path that can be written but writing {path} fails: "
            f"{why_not_written(error, path)}; {fix}"
        ) from error
