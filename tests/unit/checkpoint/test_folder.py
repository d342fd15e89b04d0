"""Names, order and publication of checkpoint folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, RELEASE, CheckpointFolder
from megatron.hydraulis.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def begin(folder: CheckpointFolder, iteration: int | str, text: str = "x") -> None:
    path = folder.path_while_saving(iteration)
    path.mkdir(parents=True)
    (path / "file").write_text(text)


def save(folder: CheckpointFolder, iteration: int, text: str = "x") -> None:
    begin(folder, iteration, text)
    folder.publish(iteration)


def test_a_checkpoint_has_its_name_only_when_it_is_published(folder: CheckpointFolder) -> None:
    begin(folder, 100)
    assert (folder.iterations, folder.latest()) == ((), None)
    assert folder.publish(100) == folder.root / "iter_0000100"
    assert (folder.iterations, folder.latest()) == ((100,), 100)
    assert (folder.root / LATEST_FILE_NAME).read_text() == "100"  # as upstream writes it


def test_saving_the_same_iteration_again_replaces_it(folder: CheckpointFolder) -> None:
    save(folder, 3, "old")
    save(folder, 3, "new")
    assert (folder.path_of(3) / "file").read_text() == "new"
    assert sorted(p.name for p in folder.root.iterdir()) == ["iter_0000003", LATEST_FILE_NAME]


def test_files_of_an_earlier_attempt_are_removed(folder: CheckpointFolder) -> None:
    begin(folder, 3)
    folder.remove_leftovers()
    assert list(folder.root.iterdir()) == []


def test_what_a_name_stands_for_is_on_disk_before_the_name(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power keeps the order of fsync and of renames that were synced."""
    events: list[str] = []
    rename, fsync = Path.rename, os.fsync

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(path, target)

    def noted_fsync(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    begin(folder, 7)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    folder.publish(7)
    assert events == [
        "rename to iter_0000007",
        "sync checkpoints",
        f"sync .saving-{LATEST_FILE_NAME}",
        f"rename to {LATEST_FILE_NAME}",
        "sync checkpoints",
    ]


def test_a_crash_during_a_replacement_keeps_the_old_checkpoint(folder: CheckpointFolder) -> None:
    save(folder, 3, "old")
    begin(folder, 3, "new")
    folder.path_of(3).rename(folder.root / ".replaced-iter_0000003")  # and then the process died
    folder.remove_leftovers()
    assert (folder.path_of(folder.latest() or 0) / "file").read_text() == "old"
    assert sorted(p.name for p in folder.root.iterdir()) == ["iter_0000003", LATEST_FILE_NAME]


def test_a_release_has_no_iteration(folder: CheckpointFolder) -> None:
    begin(folder, RELEASE)
    folder.publish(RELEASE)
    assert (folder.latest(), folder.iterations) == (RELEASE, ())
    save(folder, 3)
    assert [path.name for path in folder.paths] == [RELEASE, "iter_0000003"]
    assert folder.surplus(1) == ()


def test_the_newest_are_kept_and_none_newer_than_the_latest(
    folder: CheckpointFolder,
) -> None:
    for iteration in (2, 4, 6, 8, 10_000_000):
        save(folder, iteration)
    assert folder.iterations == (2, 4, 6, 8, 10_000_000)
    folder.write_latest(8)
    assert folder.surplus(2) == (2, 4)
    for iteration in folder.surplus(2):
        folder.delete(iteration)
    assert folder.iterations == (6, 8, 10_000_000)
    assert folder.surplus(2) == ()


@pytest.mark.parametrize("text", ["", "five", "-3", "1e3", "9" * 40, "\x00", "３"])
def test_an_invalid_latest_file_is_an_error(folder: CheckpointFolder, text: str) -> None:
    save(folder, 3)
    (folder.root / LATEST_FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="must hold the number of an iteration"):
        folder.latest()
