"""`inspect-checkpoint` on complete, damaged, foreign and missing checkpoints."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, CheckpointFolder
from megatron.hydraulis.checkpoint.hugging_face.import_hf import import_folder
from megatron.hydraulis.checkpoint.manifest import Manifest, records_of
from tests.support.checkpoints import write_tensors
from tests.support.huggingface_folders import changed_file, flip_a_byte, make_folder

NUM_PARAMETERS = 5 * 8
STATE = {
    "consumed_train_samples": 1234,
    "planner": {"pool": {"short": "4*tp1", "long": "tp2+pp2"}},
}


def write_checkpoint(path: Path, iteration: int, *, is_ours: bool = True) -> None:
    """A checkpoint of two tensors, as this program or as plain Megatron writes it."""
    keys = ("decoder.weight", "optimizer.state.param.decoder.weight")
    args = Namespace(num_layers=2, consumed_train_samples=99)
    common = {"iteration": iteration, "args": args}
    write_tensors(path, {key: torch.ones(5, 8) for key in keys}, common)
    if is_ours:
        Manifest(iteration, 4, {"num_layers": 2}, STATE, {}, records_of(path)).write(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints of ours."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for iteration in (3, 6):
        write_checkpoint(folder.path_of(iteration), iteration)
    folder.write_latest(6)
    return folder.root


Tell = Callable[..., tuple[int, str]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Runs the command: (exit status, what it printed, on one line)."""

    def run(*words: str | Path) -> tuple[int, str]:
        status = main(["inspect-checkpoint", *map(str, words)])
        out, err = capsys.readouterr()
        return status, " ".join(out.split()) + err

    return run


def test_a_folder_of_complete_checkpoints(root: Path, inspect: Tell) -> None:
    status, printed = inspect(root)
    assert status == 0
    assert f"{root}: 2 checkpoints, latest: iter_0000006" in printed
    assert printed.count("complete, checksums right") == 2
    for fact in (
        "│ 1,234 │ 4 │ 0.0 MB │",
        "iter_0000006: written by this program",
        f"parameters {NUM_PARAMETERS} in 1 tensors, float32",
        "fp32 master and moments",
        "pool 4*tp1; tp2+pp2",
        "model num_layers 2",
    ):
        assert fact in printed


def test_one_of_them_and_its_tensors(root: Path, inspect: Tell) -> None:
    path = root / "iter_0000003"
    status, printed = inspect(path, "--quick", "--tensors")
    assert status == 0
    assert f"{path}: 1 checkpoint" in printed
    assert "latest" not in printed  # that is a matter of the folder
    assert "iter_0000003 │ complete, sizes right" in printed
    assert "decoder.weight │ 5 × 8 │ float32 │ 1" in printed


def test_json_has_everything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-checkpoint", str(root), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["complete"], printed["latest"]) == (True, "iter_0000006")
    first, last = printed["checkpoints"]
    assert first["iteration"] == 3
    assert last["state"] == STATE
    assert last["num_parameters"] == NUM_PARAMETERS
    assert last["tensors"]["decoder.weight"] == {
        "shape": [5, 8],
        "dtype": "float32",
        "num_chunks": 1,
    }
    assert first["checksums_compared"]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped byte": (
        lambda path: flip_a_byte(path / "__0_0.distcp"),
        "__0_0.distcp is damaged: its SHA-256",
    ),
    "damaged manifest": (
        lambda path: changed_file(path / "hydraulis.json", lambda d: d.replace(b"1234", b"1235")),
        "hydraulis.json: its own SHA-256",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_reported_with_file_and_status(case: str, root: Path, inspect: Tell) -> None:
    damage, words = DAMAGE[case]
    damage(root / "iter_0000006")
    status, printed = inspect(root)
    assert status == 1
    assert f"iter_0000006: {words}" in printed
    assert printed.count("DAMAGED OR INCOMPLETE") == 1
    assert "complete, checksums right" in printed  # the other one
    printed = inspect(root / "iter_0000006")[1]
    assert "iter_0000006 │ DAMAGED OR INCOMPLETE" in printed
    assert f"iter_0000006: {words}" in printed


def test_quick_compares_only_sizes(root: Path, inspect: Tell) -> None:
    flip_a_byte(root / "iter_0000006" / "__0_0.distcp")
    assert inspect(root, "--quick")[0] == 0


def test_a_running_save_is_shown_and_is_no_failure(root: Path, inspect: Tell) -> None:
    half = root / ".saving-iter_0000009"
    shutil.copytree(root / "iter_0000006", half)
    status, printed = inspect(root)
    assert status == 0
    assert ".saving-iter_0000009 │ not finished" in printed
    assert inspect(half)[0] == 1


def test_the_latest_checkpoint_must_exist(root: Path, inspect: Tell) -> None:
    (root / LATEST_FILE_NAME).write_text("9")
    status, printed = inspect(root)
    assert (status, "iter_0000009 is named the latest but is not there" in printed) == (1, True)
    (root / LATEST_FILE_NAME).write_text("nine")
    status, printed = inspect(root)
    assert (status, "must hold the number of an iteration" in printed) == (1, True)
    (root / LATEST_FILE_NAME).unlink()
    status, printed = inspect(root)
    assert (status, "no file names the latest" in printed) == (1, True)


def test_of_plain_megatron(tmp_path: Path, inspect: Tell) -> None:
    path = tmp_path / "iter_0000007"
    write_checkpoint(path, 7, is_ours=False)
    status, printed = inspect(path)
    assert status == 0
    for fact in ("complete by Megatron's own metadata", "iteration 7", "│ 99 │"):
        assert fact in printed
    changed_file(path / "__0_0.distcp", lambda data: data[:-9])
    assert "but its tensors need" in inspect(path)[1]
    (path / "__0_0.distcp").unlink()
    status, printed = inspect(path)
    assert (status, "__0_0.distcp is missing" in printed) == (1, True)
    (path / "metadata.json").unlink()
    assert "metadata.json is missing, which Megatron writes last" in inspect(path)[1]


def test_an_imported_model(tmp_path: Path, inspect: Tell) -> None:
    import_folder(make_folder(tmp_path / "hf", "llama"), tmp_path / "mega")
    status, printed = inspect(tmp_path / "mega")
    assert status == 0
    assert "1 checkpoint, latest: release" in printed
    assert "optimizer none" in printed


def test_a_folder_without_checkpoints(
    tmp_path: Path, inspect: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nothing", "there is no such folder"),
        ("file", "must be a folder but is a file"),
        ("empty", "holds no checkpoint"),
    ):
        status, printed = inspect(tmp_path / name)
        assert (status, printed.startswith("error: "), words in printed) == (2, True, True)

    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    status, printed = inspect(tmp_path / "empty")
    assert (status, "empty: cannot be read: Permission denied" in printed) == (2, True)
