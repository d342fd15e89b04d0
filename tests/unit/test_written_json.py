"""Files that are complete at every moment."""

import errno
import json
import os
from pathlib import Path

import pytest

from megatron.hydraulis.json_object import write_json


def test_a_file_is_complete_or_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    write_json(path, {"times": [1, 2]})
    assert json.loads(path.read_text()) == {"times": [1, 2]}

    def full_disk(self: Path, text: str, **_: object) -> int:
        self.write_bytes(text.encode()[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"times": [3]})
    assert json.loads(path.read_text()) == {"times": [1, 2]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    write_json(link, [1])
    assert link.is_symlink()
    assert json.loads(target.read_text()) == [1]


def test_a_device_is_written_to_directly(tmp_path: Path) -> None:
    write_json(os.devnull, {})
    assert Path(os.devnull).is_char_device()
    reading, writing = os.pipe()
    write_json(f"/dev/fd/{writing}", [1])
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.load(pipe) == [1]
