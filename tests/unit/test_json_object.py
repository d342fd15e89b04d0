"""Limits on JSON input: size, depth, numbers; and duplicate keys are errors."""

from pathlib import Path

import pytest

from megatron.hydraulis import json_object
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.json_object import JsonObject, parse_json, read_json


def test_depth() -> None:
    most = json_object.MAX_DEPTH
    for left, right in (("[", "]"), ('{"a":', "}")):
        parse_json(left * most + "1" + right * most, "file", DataError)
        with pytest.raises(DataError, match=f"at most {most} deep"):
            parse_json(left * (most + 1) + "1" + right * (most + 1), "file", DataError)
        with pytest.raises(DataError, match="must be JSON of usual size"):
            parse_json(left * 100_000 + "1" + right * 100_000, "file", DataError)


def test_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_object, "MAX_FILE_BYTES", 10)
    path = tmp_path / "pool.json"
    path.write_text('{"a": 123}')
    assert read_json(path, "pool file", DataError) == {"a": 123}
    path.write_text('{"a": 1234}')
    with pytest.raises(DataError, match="at most 10 bytes"):
        read_json(path, "pool file", DataError)


@pytest.mark.parametrize("text", ["1" * 5000, "-1e999x", "1" * 19])
def test_numbers(text: str) -> None:
    with pytest.raises(DataError):
        JsonObject(parse_json(f'{{"a": {text}}}', "file", DataError), "file", DataError).integer(
            "a"
        )


def test_a_key_twice() -> None:
    with pytest.raises(DataError, match="'a' twice"):
        parse_json('{"a": 1, "b": {"a": 1}, "a": 2}', "file", DataError)
