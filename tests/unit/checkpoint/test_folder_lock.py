"""The locks of folders: one job writes, and locks of dead jobs are taken over."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.hydraulis.checkpoint import folder_lock
from megatron.hydraulis.checkpoint.folder_lock import (
    HEARTBEAT_S,
    LOCK_FILE_NAME,
    STALE_S,
    FolderLocks,
    Writer,
)
from megatron.hydraulis.errors import CheckpointError, ConfigurationError

OTHER = Writer("Slurm's job 7", "node3", 11, "pid:[1]", "their token")
OURS = Writer("Slurm's job 8", socket.gethostname(), os.getpid(), "pid:[2]", "our token")
BEAT_S = 0.05
STALE_IN_TEST_S = 0.5


class Locks:
    """Locks of one folder, released at the end, and their messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages: list[str] = []
        self._open: list[FolderLocks] = []

    @property
    def path(self) -> Path:
        return self.folder / LOCK_FILE_NAME

    @property
    def holder(self) -> str:
        return str(json.loads(self.path.read_text())["job"])

    def lock(self, writer: Writer, **folders: Path) -> FolderLocks:
        by_option = {
            f"--{name}": folder for name, folder in (folders or {"save": self.folder}).items()
        }
        self._open.append(FolderLocks(by_option, writer, log=self.messages.append))
        return self._open[-1]

    def leave(self, writer: Writer) -> None:
        """The lock of a writer that was killed."""
        self.path.write_text(json.dumps(dataclasses.asdict(writer) | {"num_heartbeats": 3}))

    def close(self) -> None:
        for lock in self._open:
            lock.release()


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Locks]:
    monkeypatch.setattr(folder_lock, "HEARTBEAT_S", BEAT_S)
    monkeypatch.setattr(folder_lock, "STALE_S", STALE_IN_TEST_S)
    locks = Locks(tmp_path)
    yield locks
    locks.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (folder := tmp_path / "run").mkdir()
    return folder


def test_the_lock_names_its_job_has_a_heartbeat_and_is_released(locks: Locks) -> None:
    lock = locks.lock(OURS)
    lock.acquire()
    assert locks.holder == OURS.job
    first = locks.path.read_text()
    deadline_s = time.monotonic() + 10
    while locks.path.read_text() == first:
        assert time.monotonic() < deadline_s
        time.sleep(BEAT_S)
    lock.check()
    lock.release()
    lock.release()
    assert os.listdir(locks.folder) == []
    assert locks.messages == []


def test_a_job_that_is_running_keeps_its_folder(locks: Locks) -> None:
    locks.lock(OTHER).acquire()
    with pytest.raises(ConfigurationError, match=r"Slurm's job 7 \(process 11 on node3\)"):
        locks.lock(OURS).acquire()
    assert locks.holder == OTHER.job
    assert "waiting for a sign of life for 0.5 s" in locks.messages[0]


def test_a_job_takes_the_locks_of_all_its_folders_or_of_none(locks: Locks, run_dir: Path) -> None:
    theirs = locks.lock(OTHER)
    theirs.acquire()
    ours = locks.lock(OURS, save=locks.folder, run_dir=run_dir)
    with pytest.raises(ConfigurationError, match=r"--save .* running; .* --save,"):
        ours.acquire()
    assert os.listdir(run_dir) == []
    theirs.release()
    (ours := locks.lock(OURS, save=locks.folder, run_dir=run_dir)).acquire()
    assert os.listdir(run_dir) == [LOCK_FILE_NAME]
    with pytest.raises(ConfigurationError, match=r"--run_dir .* in use by Slurm's job 8"):
        locks.lock(OTHER, run_dir=run_dir).acquire()
    ours.release()
    assert os.listdir(run_dir) == []
    assert not locks.path.exists()


def test_stale_locks_of_several_folders_are_watched_at_once(locks: Locks, run_dir: Path) -> None:
    locks.leave(OTHER)
    (run_dir / LOCK_FILE_NAME).write_text(locks.path.read_text())
    start_s = time.monotonic()
    locks.lock(OURS, save=locks.folder, run_dir=run_dir).acquire()
    assert STALE_IN_TEST_S <= time.monotonic() - start_s < 2 * STALE_IN_TEST_S
    assert locks.holder == OURS.job


def test_two_options_with_one_folder_have_one_lock(locks: Locks) -> None:
    lock = locks.lock(OURS, save=locks.folder, run_dir=locks.folder)
    lock.acquire()
    lock.check()
    assert locks.messages == []


def test_a_lock_that_does_not_change_is_stale(locks: Locks) -> None:
    locks.leave(OTHER)
    start_s = time.monotonic()
    locks.lock(OURS).acquire()
    assert time.monotonic() - start_s >= STALE_IN_TEST_S
    assert locks.holder == OURS.job
    assert "gave no sign of life for 0.5 s: taken over" in locks.messages[1]


@pytest.mark.parametrize("text", ["", "{", '{"job": "x"}', "[]", '"text"', "\x00\xff"])
def test_an_unreadable_lock_becomes_stale(locks: Locks, text: str) -> None:
    locks.path.write_text(text)
    locks.lock(OURS).acquire()
    assert locks.holder == OURS.job
    assert "an unnamed job" in locks.messages[0]


def test_a_lock_that_is_released_meanwhile_is_taken(locks: Locks) -> None:
    locks.leave(OTHER)
    threading.Timer(BEAT_S, locks.path.unlink).start()
    locks.lock(OURS).acquire()
    assert locks.holder == OURS.job


def test_a_forced_takeover_is_logged_and_ends_the_former_holder(locks: Locks) -> None:
    theirs = locks.lock(OTHER)
    theirs.acquire()
    ours = locks.lock(OURS)
    ours.acquire(take_over=True)
    assert "in use by Slurm's job 7" in locks.messages[0]
    assert "taken over (--take-over-save)" in locks.messages[0]
    with pytest.raises(CheckpointError, match="was taken over by Slurm's job 8"):
        theirs.check()
    theirs.release()
    ours.check()
    assert locks.holder == OURS.job


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"TORCHELASTIC_RUN_ID": "100"}, id="--rdzv-id was copied"),
        pytest.param({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, id="srun -N2 torchrun"),
        pytest.param({}, id="torchrun is process 1"),
    ],
)
@pytest.mark.parametrize("elsewhere", ["host", "process_namespace"])
def test_two_jobs_of_one_name_are_two_jobs(
    locks: Locks, environment: dict[str, str], elsewhere: str
) -> None:
    ours = Writer.of_this_process(environment)
    theirs = dataclasses.asdict(ours) | {"token": "their token", elsewhere: "another"}
    locks.lock(Writer(**theirs)).acquire()
    with pytest.raises(ConfigurationError, match="which is running"):
        locks.lock(ours).acquire()


def test_the_lock_of_an_ended_process_of_this_host_is_taken_at_once(locks: Locks) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    here = Writer.of_this_process({})
    locks.leave(dataclasses.replace(here, job="another", process=ended.pid))
    locks.lock(here).acquire()
    assert locks.messages == []
    elsewhere = dataclasses.replace(
        here, job="another", process=ended.pid, process_namespace="a container's"
    )
    assert not elsewhere.gives_way_to(here)  # unknown on this host


def test_two_processes_that_one_shell_started_are_two_jobs(locks: Locks) -> None:
    first, second = Writer.of_this_process({}), Writer.of_this_process({})
    assert first.job == second.job
    locks.lock(first).acquire()
    with pytest.raises(ConfigurationError, match=rf"process {os.getpid()} on .*which is running"):
        locks.lock(second).acquire()


def test_two_steps_of_a_slurm_job_are_two_writers_until_it_is_requeued(locks: Locks) -> None:
    def writer(step: str, num_requeues: str, host: str = "node3") -> Writer:
        environment = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": step}
        found = Writer.of_this_process(environment | {"SLURM_RESTART_COUNT": num_requeues})
        return dataclasses.replace(found, host=host)

    locks.lock(writer("0", "9")).acquire()
    with pytest.raises(ConfigurationError, match=r"Slurm's job 12 .* which is running"):
        locks.lock(writer("1", "9", "node4")).acquire()
    assert writer("0", "9").gives_way_to(writer("1", "10", "node4"))
    assert not writer("0", "10").gives_way_to(writer("0", "9", "node4"))


def test_a_job_that_was_about_to_write_its_name_is_named(locks: Locks) -> None:
    locks.path.write_text("")
    threading.Timer(BEAT_S, locks.leave, [OTHER]).start()
    with pytest.raises(ConfigurationError, match=r"by Slurm's job 7 .*, which is running"):
        locks.lock(OURS).acquire()


def test_the_name_of_a_job_is_from_slurm_or_torchrun() -> None:
    assert Writer.of_this_process({}).job == f"process {os.getppid()} on {socket.gethostname()}"
    alone = {"TORCHELASTIC_RUN_ID": "none"}
    assert Writer.of_this_process(alone).job == Writer.of_this_process({}).job
    assert Writer.of_this_process({"TORCHELASTIC_RUN_ID": "a1"}).job == "torchrun's run a1"
    both = {"TORCHELASTIC_RUN_ID": "12-1", "SLURM_JOB_ID": "12"}
    assert Writer.of_this_process(both).job == "Slurm's job 12"


def test_a_stale_lock_has_missed_several_heartbeats_as_an_nfs_client_sees_them() -> None:
    cached_for_s = 60.0
    assert cached_for_s + 3 * HEARTBEAT_S <= STALE_S
