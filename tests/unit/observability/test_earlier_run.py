"""A new run in a used folder starts with none of the earlier run's files."""

from pathlib import Path

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import set_aside_earlier_run
from megatron.hydraulis.observability.trace import set_aside_earlier_trace


def leave_a_run(run_dir: Path, text: str) -> None:
    (run_dir / "tensorboard").mkdir(parents=True, exist_ok=True)
    (run_dir / "tensorboard" / f"events.{text}").write_text(text)
    for name in ("metrics.jsonl", "summary.png", "config.json"):
        (run_dir / name).write_text(text)


def test_nothing_is_moved_in_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    assert set_aside_earlier_run(tmp_path) is None
    assert set_aside_earlier_run(tmp_path / "none") is None
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_every_run_is_kept_in_a_separate_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the user's")
    for number, text in enumerate(("first", "second"), start=1):
        leave_a_run(tmp_path, text)
        aside = set_aside_earlier_run(tmp_path)
        assert aside == tmp_path / f"earlier.{number}"
        for name in ("metrics.jsonl", "summary.png", "config.json"):
            assert (aside / name).read_text() == text
        events = [path.name for path in (aside / "tensorboard").iterdir()]
        assert events == [f"events.{text}"]
    assert {path.name for path in tmp_path.iterdir()} == {"earlier.1", "earlier.2", "notes.txt"}


def test_a_run_that_died_early_is_moved_as_well(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    aside = set_aside_earlier_run(tmp_path)
    assert aside is not None
    assert [path.name for path in aside.iterdir()] == ["config.json"]


def test_a_file_that_cannot_be_moved_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_run(tmp_path, "first")

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(HydraulisError, match="No space left on device; choose another --run-dir"):
        set_aside_earlier_run(tmp_path)


def test_an_earlier_trace_is_moved(tmp_path: Path) -> None:
    assert set_aside_earlier_trace(tmp_path) is None
    names = ["trace.json", "trace_rank_0000.json", "trace_rank_0007.json"]
    for name in [*names, "notes.txt"]:
        (tmp_path / name).write_text(name)
    for number in (1, 2):
        aside = set_aside_earlier_trace(tmp_path)
        assert aside == tmp_path / f"earlier.{number}"
        assert sorted(path.name for path in aside.iterdir()) == names
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.txt"]
        for name in names:
            (tmp_path / name).write_text(name)
