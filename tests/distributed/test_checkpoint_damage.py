"""Damaged, incomplete and foreign checkpoints: an error, or a fallback to the previous one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hydraulis.checkpoint import saving
from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, CheckpointFolder
from megatron.hydraulis.checkpoint.inspect import inspect_folder
from megatron.hydraulis.checkpoint.loading import find_checkpoints, load_first_whole
from megatron.hydraulis.checkpoint.manifest import MANIFEST_NAME
from megatron.hydraulis.checkpoint.torch_dist import WrittenFile, write_file
from megatron.hydraulis.errors import CheckpointError, HydraulisError
from tests.support.checkpoints import fill_moments, make_engine, save_engine, whole_tensors
from tests.support.full_disk import largest_file
from tests.support.gloo_pool import pool_of
from tests.support.models import SmallModel

pytestmark = [pytest.mark.distributed, pytest.mark.fault]

NUM_RANKS = 2
MODEL = SmallModel(num_layers=2, dtype=torch.float32)
FIRST, LAST = 3, 5


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "checkpoints"
    pool_of(NUM_RANKS).run(save_two, str(root))
    return root


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    shutil.copytree(sound, root)
    return root


def save_two(root: str) -> None:
    engine = make_engine(MODEL.definition(), ("tp2",))
    fill_moments(engine)
    for iteration in (FIRST, LAST):
        save_engine(engine, Path(root), iteration)


def try_load(root: str, fallback: bool, model: SmallModel = MODEL) -> str:
    """On every rank: the name of what was loaded, or the class and text of the error."""
    engine = make_engine(model.definition(), ("tp2",), seed=5)
    try:
        paths = find_checkpoints(CheckpointFolder(Path(root)), with_earlier=fallback)
        loaded = load_first_whole(paths, engine, {"vocab_size": model.vocab_size})
    except HydraulisError as error:
        return f"{type(error).__name__}: {error}"
    return loaded.path.name


def flip_byte(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rename_file(path: Path) -> None:
    """Let the manifest name a file outside the folder."""
    content = json.loads(path.read_text())
    content["files"]["../x"] = content["files"].pop("metadata.json")
    path.write_text(json.dumps(content))


def keep_one_shard(path: Path) -> None:
    """The state after an interrupted copy."""
    for file in path.iterdir():
        if file.name != "__0_0.distcp":
            file.unlink()


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing shard": ("__1_0.distcp", Path.unlink, "__1_0.distcp is missing"),
    "flipped byte": ("__0_0.distcp", flip_byte, "__0_0.distcp is damaged"),
    "cut shard": ("__0_0.distcp", cut, "bytes instead of"),
    "flipped metadata": (".metadata", flip_byte, ".metadata is damaged"),
    "flipped manifest": (MANIFEST_NAME, flip_byte, MANIFEST_NAME),
    "changed manifest": (MANIFEST_NAME, rename_file, "SHA-256"),
    "missing manifest": (MANIFEST_NAME, Path.unlink, f"{MANIFEST_NAME} is missing"),
    "missing metadata": (".metadata", Path.unlink, ".metadata is missing"),
    "half-written folder": ("", keep_one_shard, "metadata.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error_or_causes_a_fallback_to_the_previous_checkpoint(
    name: str, damaged: Path
) -> None:
    file_name, damage, message = DAMAGE[name]
    damage(damaged / f"iter_{LAST:07d}" / file_name)
    for answer in pool_of(NUM_RANKS).run(try_load, str(damaged), False):
        assert answer.startswith("CheckpointError: ")
        assert message in answer
    before, last = inspect_folder(damaged).checkpoints
    assert (before.complete, last.complete) == (True, False)
    assert not before.problems
    assert message in " ".join(last.problems)
    answers = pool_of(NUM_RANKS).run(try_load, str(damaged), True)
    assert answers == [f"iter_{FIRST:07d}"] * NUM_RANKS


def test_without_a_complete_checkpoint_fallback_is_an_error(damaged: Path) -> None:
    for iteration in (FIRST, LAST):
        flip_byte(damaged / f"iter_{iteration:07d}" / "__0_0.distcp")
    (answer, _) = pool_of(NUM_RANKS).run(try_load, str(damaged), True)
    assert answer.startswith("CheckpointError: none of 2 checkpoints")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SmallModel(num_layers=3, dtype=torch.float32), "decoder.layers"),
        (SmallModel(num_layers=2, dtype=torch.float32, tied=True), "output_layer.weight"),
        (SmallModel(num_layers=2, dtype=torch.float32, vocab_size=59), "vocab_size is 61 there"),
    ],
)
def test_another_model_is_an_error_even_with_fallback(
    model: SmallModel, message: str, sound: Path
) -> None:
    (answer, _) = pool_of(NUM_RANKS).run(try_load, str(sound), True, model)
    assert answer.startswith("ConfigurationError: ")
    assert message in answer


def test_another_padding_of_the_same_vocabulary_is_the_same_model(
    sound: Path, tmp_path: Path
) -> None:
    wider = SmallModel(num_layers=2, dtype=torch.float32, padded_vocab_size=72)
    pool_of(NUM_RANKS).run(load_and_save_wider, str(sound), str(tmp_path), wider)
    before = whole_tensors(sound / f"iter_{LAST:07d}")
    after = whole_tensors(tmp_path / f"iter_{LAST:07d}")
    for key in ("output_layer.weight", "optimizer.state.exp_avg.embedding.word_embeddings.weight"):
        assert torch.equal(after[key][:64], before[key])
        assert not after[key][64:].any()


def load_and_save_wider(source: str, root: str, model: SmallModel) -> None:
    engine = make_engine(model.definition(), ("tp2",), seed=5)
    paths = find_checkpoints(CheckpointFolder(Path(source)))
    load_first_whole(paths, engine, {"vocab_size": model.vocab_size})
    save_engine(engine, Path(root), LAST)


def test_an_invalid_file_of_the_latest_checkpoint_is_an_error(damaged: Path) -> None:
    for text, message in (("five", "must hold the number"), ("7", "no checkpoint of iteration 7")):
        (damaged / LATEST_FILE_NAME).write_text(text)
        (answer, _) = pool_of(NUM_RANKS).run(try_load, str(damaged), False)
        assert answer.startswith("CheckpointError: ")
        assert message in answer
        assert pool_of(NUM_RANKS).run(try_load, str(damaged), True)[0] == f"iter_{LAST:07d}"
    (damaged / LATEST_FILE_NAME).unlink()
    (answer, _) = pool_of(NUM_RANKS).run(try_load, str(damaged), False)
    assert "no file that names the latest" in answer
    for path in damaged.iterdir():
        path.rename(damaged / "release") if path.name.endswith(str(LAST)) else shutil.rmtree(path)
    for fallback in (False, True):  # otherwise it would start from scratch
        (answer, _) = pool_of(NUM_RANKS).run(try_load, str(damaged), fallback)
        assert f"write release into {LATEST_FILE_NAME}" in answer


@pytest.mark.parametrize(
    ("removed", "iteration", "message"),
    [
        ((FIRST, LAST), None, "no checkpoint of iteration 5; there are none: copy it back"),
        ((), FIRST - 1, "no checkpoint of iteration 2; there are 3, 5: give --ckpt-step"),
    ],
    ids=["none is left", "none is as early"],
)
def test_fallback_never_starts_from_scratch(
    removed: tuple[int, ...], iteration: int | None, message: str, damaged: Path
) -> None:
    for each in removed:
        shutil.rmtree(damaged / f"iter_{each:07d}")
    for answer in pool_of(NUM_RANKS).run(try_find, str(damaged), iteration):
        assert message in answer
        assert "--load-fallback" not in answer
    if removed:
        (damaged / LATEST_FILE_NAME).write_text("five")
        (answer, _) = pool_of(NUM_RANKS).run(try_find, str(damaged), None)
        assert "must hold the number" in answer


def try_find(root: str, iteration: int | None) -> str:
    folder = CheckpointFolder(Path(root))
    try:
        return f"found {find_checkpoints(folder, iteration=iteration, with_earlier=True)}"
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_an_error_and_leaves_the_previous_checkpoint(
    asynchronous: bool, damaged: Path
) -> None:
    answers = pool_of(NUM_RANKS).run(save_on_full_disk, str(damaged), asynchronous)
    for answer in answers:
        assert "iteration 9 cannot be saved" in answer
        assert "File too large" in answer
        assert answer.count("(rank ") == answer.count("(rank 1)") == 1
    folder = CheckpointFolder(damaged)
    assert (folder.latest(), folder.iterations) == (LAST, (FIRST, LAST))
    assert not folder.path_while_saving(9).exists()
    assert pool_of(NUM_RANKS).run(try_load, str(damaged), False)[0] == f"iter_{LAST:07d}"


def test_a_writer_that_dies_leaves_the_previous_checkpoint(damaged: Path) -> None:
    answers = pool_of(NUM_RANKS).run(save_while_writer_dies, str(damaged))
    for answer in answers:
        assert "iteration 9 cannot be saved" in answer
        assert "ended with status -9 (rank 1)" in answer
    folder = CheckpointFolder(damaged)
    assert (folder.latest(), folder.iterations) == (LAST, (FIRST, LAST))
    assert not folder.path_while_saving(9).exists()


def save_while_writer_dies(root: str) -> str:
    """On every rank: save asynchronously; rank 1's fork is killed before it has written."""
    engine = make_engine(MODEL.definition(), ("tp2",))
    with writers_that_wait():
        saver = save_engine(engine, Path(root), 9, asynchronous=True)
    assert saver.is_saving
    assert CheckpointFolder(Path(root)).latest() == LAST
    os.kill(stopped_fork(), signal.SIGKILL if engine.rank == 1 else signal.SIGCONT)
    try:
        while saver.is_saving:
            saver.poll()
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_die_leave_an_incomplete_save_that_the_next_start_removes(damaged: Path) -> None:
    pool_of(NUM_RANKS).run(save_and_die, str(damaged))
    folder = CheckpointFolder(damaged)
    assert (folder.latest(), folder.iterations) == (LAST, (FIRST, LAST))
    assert folder.path_while_saving(9).exists()
    folder.remove_leftovers()
    assert not folder.path_while_saving(9).exists()
    assert pool_of(NUM_RANKS).run(try_load, str(damaged), False)[0] == f"iter_{LAST:07d}"


def save_and_die(root: str) -> None:
    """On every rank: as if the job were killed while its forks write."""
    engine = make_engine(MODEL.definition(), ("tp2",))
    with writers_that_wait():
        saver = save_engine(engine, Path(root), 9, asynchronous=True)
    stopped_fork()
    saver.abandon()


@contextmanager
def writers_that_wait() -> Iterator[None]:
    """Forks that start inside stop themselves before they write; SIGCONT resumes them."""

    def wait_and_write(*args: Any) -> WrittenFile:
        os.kill(os.getpid(), signal.SIGSTOP)
        return write_file(*args)

    saving.write_file = wait_and_write  # type: ignore[assignment]
    try:
        yield
    finally:
        saving.write_file = write_file


def stopped_fork() -> int:
    """The process that writes, once it has stopped itself."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    (fork,) = map(int, children.split())
    while Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    return fork


def save_on_full_disk(root: str, asynchronous: bool) -> str:
    engine = make_engine(MODEL.definition(), ("tp2",))
    # Rank 1's disk is full, that of rank 0 is not.
    limit = 50_000 if engine.rank == 1 else 1 << 30
    with largest_file(limit):
        try:
            save_engine(engine, Path(root), 9, asynchronous=asynchronous).finish()
        except CheckpointError as error:
            return str(error)
    return "saved"
