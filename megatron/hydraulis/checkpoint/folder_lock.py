"""One job at a time writes to a folder.

The lock is a file, because flock fails on some mounts of Lustre and of NFS and holds only within a
node on others. The file names its job, and rank 0 of that job changes it every `HEARTBEAT_S`. A job
that wants the folder watches whether it changes, so clocks of nodes need not agree.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.hydraulis.errors import CheckpointError, ConfigurationError

LOCK_FILE_NAME = ".writer.json"
HEARTBEAT_S = 15.0
STALE_S = 180.0
"""A lock that did not change for so long is stale. An NFS client may show a file as it was 60 s
ago, and several heartbeats may be late."""
_POLL_S = 1.0


@dataclass(frozen=True)
class Writer:
    """A process that writes to a folder: rank 0 of a job."""

    job: str
    """Name in messages; a requeued job keeps it."""
    host: str
    process: int
    process_namespace: str
    """Namespace of the process id: two containers, or two machines of one name, may have the
    same."""
    token: str
    """Token that is different for every start."""
    num_requeues: int = 0
    """Number of times that Slurm requeued the job; it ends all its steps before it does."""

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Writer:
        """The job as Slurm or torchrun name it, else the process that started this one."""
        host, token = socket.gethostname(), uuid.uuid4().hex
        job, num_requeues = f"process {os.getppid()} on {host}", "0"
        if environment.get("TORCHELASTIC_RUN_ID", "none") != "none":
            job = f"torchrun's run {environment['TORCHELASTIC_RUN_ID']}"
        if "SLURM_JOB_ID" in environment:
            job = f"Slurm's job {environment['SLURM_JOB_ID']}"
            num_requeues = environment.get("SLURM_RESTART_COUNT", "0")
        count = int(num_requeues) if num_requeues.isdecimal() else 0
        return cls(job, host, os.getpid(), _process_namespace(), token, count)

    def gives_way_to(self, other: Writer) -> bool:
        """True if this writer has surely ended if the other one starts.

        Names prove nothing else: two jobs may have one --rdzv-id, two containers one host name.
        """
        if self.job == other.job and other.num_requeues > self.num_requeues:
            return True
        if (self.host, self.process_namespace) != (socket.gethostname(), _process_namespace()):
            return False
        try:
            os.kill(self.process, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False

    def __str__(self) -> str:
        process = f"process {self.process} on {self.host}"
        # The parent's number says nothing.
        return process if self.job.startswith("process ") else f"{self.job} ({process})"


class FolderLocks:
    """The locks of a job's folders, held by rank 0 from `acquire` to `release`.

    Args:
        folders: existing folders by the option that names them.
    """

    def __init__(
        self, folders: Mapping[str, Path], writer: Writer, *, log: Callable[[str], None]
    ) -> None:
        # Of two options with one folder the last.
        self._options = {
            folder.resolve() / LOCK_FILE_NAME: option for option, folder in folders.items()
        }
        self._writer = writer
        self._log = log
        self._held: list[Path] = []
        self._num_heartbeats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hydraulis-locks", daemon=True)

    def acquire(self, *, take_over: bool = False) -> None:
        """Take all locks, or none; from another job only after watching it for `STALE_S`.

        A job that Slurm has requeued and a process of this host that has ended give way at once.

        Args:
            take_over: take them from any job, and log from which.

        Raises:
            ConfigurationError: another job writes to one of the folders.
            OSError: a folder cannot be written.
        """
        self._thread.start()
        try:
            found = {path: self._read(path) for path in self._options if not self._create(path)}
            in_use = {path: text for path, text in found.items() if not self._is_free(text)}
            if in_use and not take_over:
                self._watch(in_use)
            elif in_use:
                self._log(f"warning: {self._named(in_use)}: taken over (--take-over-save)")
            for path in found:
                self._write(path)
                self._held.append(path)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise CheckpointError if another job has taken a folder over."""
        for path in tuple(self._held):
            self._check(path)

    def release(self) -> None:
        """Give the locks back that are still this process's; never raises."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._held:
            path = self._held.pop()
            with contextlib.suppress(OSError, CheckpointError):
                self._check(path)
                path.unlink()

    def _check(self, path: Path) -> None:
        holder = _writer_in(self._read(path))
        if holder is None or holder.token != self._writer.token:
            raise CheckpointError(
                f"{self._options[path]} {path.parent} was taken over by "
                f"{holder or 'an unnamed job'} while this job wrote to it; end one of the two, or "
                f"name another {self._options[path]}"
            )

    def _is_free(self, text: str | None) -> bool:
        holder = _writer_in(text)
        return holder is not None and holder.gives_way_to(self._writer)

    def _named(self, in_use: Mapping[Path, str | None]) -> str:
        """The folders of these locks with their writers."""
        return "; ".join(
            f"{self._options[path]} {path.parent} is in use by "
            f"{_writer_in(text) or 'an unnamed job'}"
            for path, text in in_use.items()
        )

    def _watch(self, in_use: Mapping[Path, str | None]) -> None:
        """Return when each of the locks has not changed for `STALE_S`, or is gone."""
        self._log(
            f"{self._named(in_use)}: waiting for a sign of life for {STALE_S:g} s "
            "(--take-over-save skips this)"
        )
        before, deadline_s = in_use, time.monotonic() + STALE_S
        while before and time.monotonic() < deadline_s:
            time.sleep(min(_POLL_S, HEARTBEAT_S))
            now = {path: text for path in before if (text := self._read(path)) is not None}
            # The text now names a job that was about to write its name before.
            running = {path: text for path, text in now.items() if before[path] not in (None, text)}
            if running:
                options = " and ".join(self._options[path] for path in running)
                raise ConfigurationError(
                    f"{self._named(running)}, which is running; end it, name another {options}, or "
                    "add --take-over-save if nothing of it can write any more"
                )
            before = now
        if before:
            self._log(
                f"warning: {self._named(before)}, which gave no sign of life for {STALE_S:g} s: "
                "taken over"
            )

    def _beat(self) -> None:
        lost = set[Path]()
        while not self._ended.wait(HEARTBEAT_S):
            for path in set(self._held) - lost:
                # A file system that is away for a while must not end training.
                with contextlib.suppress(OSError):
                    try:
                        self._check(path)
                        self._write(path)
                    except CheckpointError as error:  # which the next save raises
                        self._log(f"warning: {error}")
                        lost.add(path)

    def _content(self) -> str:
        self._num_heartbeats += 1
        return json.dumps(asdict(self._writer) | {"num_heartbeats": self._num_heartbeats})

    def _create(self, path: Path) -> bool:
        """Create the file unless it exists: atomic on NFS, from version 3 on, and on Lustre."""
        try:
            with path.open("x") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        self._held.append(path)
        return True

    def _write(self, path: Path) -> None:
        unfinished = path.with_name(f"{LOCK_FILE_NAME}.{self._writer.token}")
        unfinished.write_text(self._content())
        unfinished.replace(path)

    def _read(self, path: Path) -> str | None:
        """Content of the file; opening it makes NFS fetch it. None if there is none."""
        try:
            return path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # replaced on another node between look-up and reading
                return ""
            raise


def _writer_in(text: str | None) -> Writer | None:
    """The writer that a lock names; None if it is half written or none of ours."""
    try:
        values = json.loads(text or "")
        del values["num_heartbeats"]
        return Writer(**values)
    except (ValueError, TypeError, KeyError):
        return None


def _process_namespace() -> str:
    """Name that differs between containers and between machines, also with equal host names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:
        return ""
