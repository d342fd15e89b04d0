"""One job at a time writes to a folder of checkpoints.

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
    """A process that writes to the folder: rank 0 of a job."""

    job: str
    """For messages, and to compare `num_requeues`."""
    host: str
    process: int
    process_namespace: str
    """In which the process id holds: two containers, or two machines of one name, may have the
    same."""
    token: str
    """Different for every start."""
    step: str = ""
    """Of Slurm's job, which may run several steps at a time; empty without Slurm."""
    num_requeues: str = ""
    """How often Slurm has queued the job again; before that it ends all its steps."""

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Writer:
        """The job as Slurm or torchrun name it, else the process that started this one."""
        host = socket.gethostname()
        job = f"process {os.getppid()} on {host}"
        if environment.get("TORCHELASTIC_RUN_ID", "none") != "none":
            job = f"torchrun's run {environment['TORCHELASTIC_RUN_ID']}"
        step = num_requeues = ""
        if "SLURM_JOB_ID" in environment:
            job = f"Slurm's job {environment['SLURM_JOB_ID']}"
            step = environment.get("SLURM_STEP_ID", "")
            num_requeues = environment.get("SLURM_RESTART_COUNT", "0")
        return cls(
            job, host, os.getpid(), _process_namespace(), uuid.uuid4().hex, step, num_requeues
        )

    def gives_way_to(self, other: Writer) -> bool:
        """Whether this writer has surely ended if the other one starts.

        Names prove nothing else: two jobs may have one --rdzv-id, two containers one host name.
        """
        if self.job == other.job and _count(other.num_requeues) > _count(self.num_requeues):
            return True
        here = (socket.gethostname(), _process_namespace())
        return (self.host, self.process_namespace) == here and not self._is_running

    @property
    def _is_running(self) -> bool:
        """Whether a process with this number runs on this host."""
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True

    def __str__(self) -> str:
        process = f"process {self.process} on {self.host}"
        if self.job.startswith("process "):  # the parent, which says nothing
            return process
        step = f", step {self.step}" if self.step else ""
        return f"{self.job}{step} ({process})"


def writer_of(folder: Path) -> Writer | None:
    """Who has the lock of a folder, running or not; None if nobody has."""
    try:
        return _holder_in((folder / LOCK_FILE_NAME).read_text(errors="replace"))
    except OSError:
        return None


class SaveLock:
    """The lock of a folder, held by rank 0 from `acquire` to `release`.

    Args:
        folder: it exists.
        heartbeat_s, stale_s: see `HEARTBEAT_S` and `STALE_S`.
    """

    def __init__(
        self,
        folder: Path,
        writer: Writer,
        *,
        log: Callable[[str], None],
        heartbeat_s: float = HEARTBEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._folder = folder
        self._path = folder / LOCK_FILE_NAME
        self._writer = writer
        self._log = log
        self._heartbeat_s = heartbeat_s
        self._stale_s = stale_s
        self._num_heartbeats = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, take_over: bool = False) -> None:
        """Take the lock; from another job only after watching it for `STALE_S`.

        A job that Slurm has requeued and a process of this host that has ended give way at once.

        Args:
            take_over: take it from any job, and log from which.

        Raises:
            ConfigurationError: another job writes to the folder.
            OSError: the folder cannot be written.
        """
        if self._create():
            self._begin()
            return
        text = self._read()
        holder = _holder_in(text)
        if holder is None or not holder.gives_way_to(self._writer):
            if take_over:
                self._log(f"warning: {self._in_use(text)}; it is taken over (--take-over-save)")
            else:
                self._watch(text)
        self._write()
        self._begin()

    def check(self) -> None:
        """Raise CheckpointError if another job has taken the folder over."""
        text = self._read()
        holder = _holder_in(text)
        if holder is None or holder.token != self._writer.token:
            raise CheckpointError(
                f"--save {self._folder} was taken over by {holder or 'an unnamed job'} "
                "while this job wrote to it; end one of the two, or name another --save"
            )

    def release(self) -> None:
        """Give the lock back if it is still this process's; never raises."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError, CheckpointError):
            self.check()
            self._path.unlink()

    def _in_use(self, text: str | None) -> str:
        return f"--save {self._folder} is in use by {_holder_in(text) or 'an unnamed job'}"

    def _watch(self, text: str | None) -> None:
        """Return when the lock has not changed for `STALE_S`, or is gone."""
        named = self._in_use(text)
        self._log(
            f"{named}: waiting for a sign of life for {self._stale_s:g} s (--take-over-save skips "
            "this)"
        )
        deadline_s = time.monotonic() + self._stale_s
        while time.monotonic() < deadline_s:
            time.sleep(min(_POLL_S, self._heartbeat_s))
            found = self._read()
            if found is None:
                return
            if text is not None and found != text:
                # Now it names a job that was about to write its name before.
                raise ConfigurationError(
                    f"{self._in_use(found)}, which is running; end it, name another --save, or add "
                    "--take-over-save if nothing of it can write any more"
                )
        self._log(
            f"warning: {named}, which gave no sign of life for {self._stale_s:g} s: taken over"
        )

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._beat, name="hydraulis-save-lock", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            # A file system that is away for a while must not end training; the next save says why.
            with contextlib.suppress(OSError):
                try:
                    self.check()
                except CheckpointError as error:
                    self._log(f"warning: {error}")
                    return
                self._write()

    def _content(self) -> str:
        self._num_heartbeats += 1
        return json.dumps(asdict(self._writer) | {"num_heartbeats": self._num_heartbeats})

    def _create(self) -> bool:
        """Create the file unless it exists: atomic on NFS, from version 3 on, and on Lustre."""
        try:
            with self._path.open("x") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _write(self) -> None:
        unfinished = self._path.with_name(f"{LOCK_FILE_NAME}.{self._writer.token}")
        unfinished.write_text(self._content())
        unfinished.replace(self._path)

    def _read(self) -> str | None:
        """Content of the file; opening it makes NFS fetch it. None if there is none."""
        try:
            return self._path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # replaced on another node between look-up and reading
                return ""
            raise


def _holder_in(text: str | None) -> Writer | None:
    """The writer that a lock names; None if it is half written or none of ours."""
    try:
        values = json.loads(text or "")
        del values["num_heartbeats"]
        return Writer(**values)
    except (ValueError, TypeError, KeyError):
        return None


def _process_namespace() -> str:
    """Different for two containers and for two machines, whose host names may be the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:
        return ""


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0
