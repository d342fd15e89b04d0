"""Saving: every rank writes its shards, rank 0 describes the files, then the folder gets its name.

An asynchronous save is written by a fork of every rank, with the state at the time of the fork. It
shares memory with the rank until one of them changes it, so nothing is copied before training goes
on. It uses files and tensors of the host, never a device or a process group.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.manifest import Manifest, records_of
from megatron.hydraulis.checkpoint.names import (
    ShardState,
    StoredModel,
    bias_pieces,
    shard_pieces,
    sharding_metadata,
    training_states,
)
from megatron.hydraulis.checkpoint.torch_dist import (
    COMMON_STATE,
    MASTER,
    MODEL,
    FilePiece,
    WrittenFile,
    write_file,
    write_metadata,
)
from megatron.hydraulis.errors import failure_of, raise_first
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.process_groups import on_all_ranks
from megatron.hydraulis.strategy import Pool

_VERSION = 3.0
"""Version of upstream's state dict."""
_PLAIN = (str, int, float, bool, type(None))


def upstream_entries(
    args: Namespace,
    iteration: int,
    optimizer: ShardedAdamW,
    pool: Pool,
    *,
    num_floating_point_operations: float = 0.0,
) -> dict[str, Any]:
    """Entries that Megatron needs to read a checkpoint, in any program that saves one.

    Arguments are kept if they can be read without running code.
    """
    return {
        "args": Namespace(**{key: value for key, value in vars(args).items() if _is_plain(value)}),
        "checkpoint_version": _VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_floating_point_operations,
        "optimizer": optimizer_entry(optimizer, pool),
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def optimizer_entry(optimizer: ShardedAdamW, pool: Pool) -> dict[str | int, Any]:
    """The optimizer's state in the form of upstream's distributed optimizer.

    In runs with ep upstream has a second one for experts, and reads only this form.
    """
    num_steps = int(optimizer.num_steps.item())
    settings = optimizer.settings
    # Upstream tells groups apart by their rates, which it writes into each.
    rates = {"max_lr": settings.lr, "min_lr": settings.min_lr}

    def entry(*, is_of_experts: bool) -> dict[str | int, Any]:
        groups = [
            rates
            | {key: value for key, value in group.items() if key != "params"}
            | {"step": num_steps, "is_expert_parallel": is_of_experts, "is_decoupled_lr": False}
            for group in optimizer.param_groups
        ]
        return {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": sharding_metadata()["distrib_optim_sharding_type"],
        }

    if pool.ep_lcm == 1:
        return entry(is_of_experts=False)
    return {0: entry(is_of_experts=False), 1: entry(is_of_experts=True)}


_BYTES_PER_MB = 1e6
_NICENESS = 5
"""Niceness of forks: training goes first if there are few cores."""
_SIGNALS_OF_THE_JOB = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Forks ignore them: the rank answers them, and waits for its fork before it ends."""
_EXIT_FAILED = 3
"""Exit status of a fork whose answer is the error."""


@dataclass(frozen=True)
class SavedState:
    """State that a checkpoint holds besides parameters and moments."""

    iteration: int
    model: Mapping[str, Any]
    """See `Manifest.model`; plain values, as are the next two."""
    state: Mapping[str, Any]
    configuration: Mapping[str, Any]
    upstream: Mapping[str, Any]
    """Entries of Megatron's state dict: args, scheduler, RNG and so on."""


@dataclass
class _Save:
    """A save that has begun: first every rank writes, then rank 0 describes what was written."""

    saved: SavedState
    write: Callable[[], WrittenFile]
    background: BackgroundWrite | None
    start_s: float
    stall_s: float = 0.0
    written: bool = False
    describing: Future[int] | None = None
    """The size of the checkpoint in bytes, on rank 0 once all have written."""
    vote: tuple[Tensor, Any] | None = None
    """An all-reduce under way: whether all ranks have completed the step at hand."""

    @property
    def is_done(self) -> bool:
        """True if this rank has completed the step at hand, or has failed."""
        if not self.written:
            return self.background is None or self.background.is_done
        return self.describing is None or self.describing.done()


class CheckpointSaver:
    """Saves an engine's shards; one save at a time. All methods are collective over the job.

    Args:
        asynchronous: write in the background.
        keep_last: number of checkpoints to keep; all if None.
        check_lock: called on rank 0 before a checkpoint gets its name; may raise.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        engine: RuntimeEngine,
        *,
        asynchronous: bool = False,
        keep_last: int | None = None,
        check_lock: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = print,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._stored = StoredModel.to_save(engine)
        self._asynchronous = asynchronous
        self._keep_last = keep_last
        self._check_lock = check_lock
        self._log = log if dist.get_rank() == 0 else lambda message: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hydraulis-checkpoint")
        self._current: _Save | None = None
        self._deleting: Future[None] | None = None

    def save(self, saved: SavedState) -> None:
        """Save now; with ``asynchronous`` only begin, for `poll` or `finish` to complete.

        Raises:
            CheckpointError: the checkpoint cannot be written; the same error on every rank.
        """
        if self._current is not None:
            self._log("the previous checkpoint is still being written; training waits for it")
            self.finish()
        start_s = time.perf_counter()
        engine = self._engine
        states = training_states(engine)
        # Every rank has all biases, and rank 0 writes them.
        biases = list(bias_pieces(engine, self._stored.biases)) if engine.rank == 0 else []
        if self._asynchronous:  # a fork cannot read devices; on the host this copies nothing
            states = tuple(replace(state, flat=state.flat.cpu()) for state in states)
            biases = [replace(piece, data=piece.data.cpu()) for piece in biases]
        write = partial(self._write, saved, states, biases)
        background = BackgroundWrite(write) if self._asynchronous else None
        self._current = _Save(saved, write, background, start_s)
        if background is None:
            while self._current is not None:
                self._advance(self._current)
        else:
            self._vote(self._current)
            self._current.stall_s = time.perf_counter() - start_s

    @property
    def is_saving(self) -> bool:
        """True if a save has begun and is not complete; the same on every rank."""
        return self._current is not None

    def poll(self) -> None:
        """Continue an asynchronous save; to be called once an iteration. Raises as `save`.

        Each call asks all ranks whether they are done, and the next one reads the answer, which
        has arrived by then.
        """
        current = self._current
        if current is None:
            return
        start_s = time.perf_counter()
        if self._all_are_done(current):
            self._advance(current)
        if self._current is not None:
            self._vote(current)
            current.stall_s += time.perf_counter() - start_s

    def finish(self) -> None:
        """Wait until the save that has begun is complete. Raises as `save`."""
        if self._current is not None and self._current.vote is not None:
            self._all_are_done(self._current)
        while self._current is not None:
            self._advance(self._current)
        if self._deleting is not None:
            wait([self._deleting])

    def abandon(self) -> None:
        """Stop a write whose result nobody needs any more; not collective."""
        if self._current is not None and self._current.background is not None:
            self._current.background.abandon()
        self._current = None

    def _write(
        self,
        saved: SavedState,
        states: Sequence[ShardState],
        biases: Sequence[FilePiece],
        goes_on: Callable[[], bool] = lambda: True,
    ) -> WrittenFile:
        """Write this rank's file. No collective, since it may run in a fork. Raises OSError."""
        path = self._folder.path_while_saving(saved.iteration)
        path.mkdir(parents=True, exist_ok=True)  # by the first rank
        rank = dist.get_rank()
        objects = self._objects(saved) if rank == 0 else {}
        pieces = itertools.chain(self._pieces(states), biases)
        return write_file(path, rank, pieces, objects, goes_on)

    def _pieces(self, states: Sequence[ShardState]) -> Iterator[FilePiece]:
        shards, stored = self._engine.shards, self._stored.parameters
        for state in states:
            yield from shard_pieces(shards, state, stored)
        # Cast from the fp32 master piece by piece; in fp32 they are the same bytes.
        master = next(state for state in states if state.prefix == MASTER)
        model = replace(master, prefix=MODEL)
        yield from shard_pieces(shards, model, stored, dtype=self._engine.dtype)

    def _objects(self, saved: SavedState) -> dict[str, Any]:
        """Objects that Megatron stores besides tensors."""
        metadata = sharding_metadata(separate_layers=self._stored.separate_layers)
        common = dict(saved.upstream) | {"content_metadata": metadata}
        objects: dict[str, Any] = dict.fromkeys(self._stored.objects)
        for key, value in saved.upstream.items():
            if isinstance(value, ShardedObject):
                objects[value.unique_key] = common.pop(key).data
        return objects | {COMMON_STATE: common}

    def _vote(self, current: _Save) -> None:
        vote = torch.tensor([int(current.is_done)], device=self._engine.device)
        current.vote = (vote, dist.all_reduce(vote, op=dist.ReduceOp.MIN, async_op=True))

    def _all_are_done(self, current: _Save) -> bool:
        """The answer to the last vote."""
        assert current.vote is not None
        vote, work = current.vote
        work.wait()
        current.vote = None
        return bool(vote.item())

    def _advance(self, current: _Save) -> None:
        """Take the next step, waiting for what it needs; the same on every rank."""
        what = f"iteration {current.saved.iteration} cannot be saved to {self._folder.root}"
        try:
            if not current.written:
                self._collect(current, what)
                return
            on_all_ranks(lambda: current.describing and current.describing.result(), what)
        except Exception:
            self._current = None
            if dist.get_rank() == 0:
                path = self._folder.path_while_saving(current.saved.iteration)
                shutil.rmtree(path, ignore_errors=True)
            raise
        self._end(current)

    def _collect(self, current: _Save, what: str) -> None:
        """Tell rank 0 what every rank has written, or why not; rank 0 begins to describe it."""
        written: WrittenFile | bytes | None = None
        failure = None
        try:
            background = current.background
            written = current.write() if background is None else background.result()
        except Exception as error:
            failure = failure_of(error, what)
        rank = dist.get_rank()
        everyone: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object((failure, written), everyone)
        current.written = True
        if everyone is not None:
            current.describing = self._thread.submit(self._describe, current.saved, everyone, what)

    def _describe(self, saved: SavedState, everyone: Sequence[tuple[Any, Any]], what: str) -> int:
        """Write metadata and manifest, then name the folder, in a thread of rank 0; its size."""
        raise_first([failure for failure, _ in everyone], what)
        answers = [answer for _, answer in everyone]
        files: list[WrittenFile] = [
            pickle.loads(each) if isinstance(each, bytes) else each for each in answers
        ]
        path = self._folder.path_while_saving(saved.iteration)
        records = {file.name: file.record for file in files}
        for stale in path.iterdir():  # from an earlier attempt
            if stale.name not in records:
                stale.unlink()
        write_metadata(path, files)
        manifest = Manifest(
            iteration=saved.iteration,
            num_ranks=len(files),
            model=saved.model,
            state=saved.state,
            configuration=saved.configuration,
            files=records_of(path, records),
        )
        manifest.write(path)
        self._check_lock()
        self._folder.publish(saved.iteration)
        return manifest.num_bytes

    def _end(self, current: _Save) -> None:
        self._current = None
        if current.describing is None:
            return
        save_s = time.perf_counter() - current.start_s
        stall_s = save_s if current.background is None else current.stall_s
        self._log(
            f"saved checkpoint {self._folder.path_of(current.saved.iteration)}: "
            f"{current.describing.result() / _BYTES_PER_MB:.1f} MB in {save_s:.2f} s, "
            f"of which training waited {stall_s:.2f} s"
        )
        if self._keep_last is not None:
            self._deleting = self._thread.submit(self._delete_surplus, self._keep_last)

    def _delete_surplus(self, num_kept: int) -> None:
        """A thread of rank 0 runs it, since deleting large files takes time."""
        for iteration in self._folder.surplus(num_kept):
            try:
                self._folder.delete(iteration)
            except OSError as error:
                self._log(f"warning: checkpoint {iteration} cannot be deleted: {error}")


class BackgroundWrite:
    """A rank's write in a fork.

    Args:
        write: called in the fork with a function that says whether to go on; returns what `result`
            returns. Must use the host's memory and no collective.
    """

    def __init__(self, write: Callable[[Callable[[], bool]], WrittenFile]) -> None:
        # A file, not a pipe: the fork must be able to end before anybody reads its answer.
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # What is buffered must not be written twice. multiprocessing cannot be used: ranks may be
        # its daemons, which may not have children.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._process = os.fork()
        self._status: int | None = None
        if self._process == 0:
            status = 1
            try:
                status = _write_and_answer(write, self._answer, parent)
            finally:
                os._exit(status)

    @property
    def is_done(self) -> bool:
        """True if `result` would return at once."""
        return self._wait(os.WNOHANG)

    def result(self) -> bytes:
        """The pickled `WrittenFile`, which training need not unpickle.

        Raises OSError, or RuntimeError if the fork died.
        """
        self._wait()
        self._answer.seek(0)
        raw = self._answer.read()
        self._answer.close()
        if self._status == _EXIT_FAILED and raw:
            error: Exception = pickle.loads(raw)  # written by this process's own fork
            raise error
        if self._status != 0 or not raw:
            raise RuntimeError(f"the process that writes ended with status {self._status}")
        return raw

    def abandon(self) -> None:
        if not self.is_done:
            os.kill(self._process, signal.SIGKILL)
        self._wait()
        self._answer.close()

    def _wait(self, options: int = 0) -> bool:
        if self._status is None:
            ended, status = os.waitpid(self._process, options)
            if ended:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is not None


def _write_and_answer(
    write: Callable[[Callable[[], bool]], WrittenFile], answer: IO[bytes], parent: int
) -> int:
    """Write in the fork, and return its exit status."""
    for name in _SIGNALS_OF_THE_JOB:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # the rank reports errors
    gc.disable()  # a collection would change, and so copy, every page of the rank's objects
    torch.set_num_threads(1)  # the threads of the rank are not in the fork
    os.nice(_NICENESS)
    status, content = 0, b""
    try:
        content = pickle.dumps(write(lambda: os.getppid() == parent))
    except Exception as error:
        # Only errors of Python itself are sure to survive pickling.
        if not isinstance(error, OSError) or type(error).__module__ != "builtins":
            error = RuntimeError(f"{type(error).__name__}: {error}")
        status, content = _EXIT_FAILED, pickle.dumps(error)
    answer.write(content)
    answer.flush()
    return status
