"""Saving: plan, write on every rank, describe, and only then let it be a checkpoint."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron.hydraulis.checkpoint.background import BackgroundWrite
from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.manifest import FileRecord, Manifest, files_of, sha256_of
from megatron.hydraulis.checkpoint.names import (
    StoredParameter,
    sharding_metadata,
    stored_objects,
)
from megatron.hydraulis.checkpoint.tensors import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MODEL,
    on_host,
    sharded_tensors,
)
from megatron.hydraulis.checkpoint.together import failure_of, on_all_ranks, raise_first
from megatron.hydraulis.checkpoint.writer import ShardWriter, StreamingSaveStrategy, Written
from megatron.hydraulis.runtime.engine import Engine

__all__ = ["CheckpointSaver", "SavedState"]

_BYTES_PER_MB = 1e6
_FAILED, _BUSY, _DONE = -1, 0, 1
"""The least of all ranks' counts."""


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds beside parameters and moments."""

    iteration: int
    model: Mapping[str, Any]
    """See `Manifest.model`; plain values, as are the next two."""
    state: Mapping[str, Any]
    configuration: Mapping[str, Any]
    upstream: Mapping[str, Any]
    """Entries of upstream's state dict, for upstream to load: args, scheduler, RNG and so on."""


@dataclass
class _Save:
    """One that has begun: first every rank writes, then rank 0 describes what was written."""

    saved: SavedState
    writer: ShardWriter
    planned: Metadata | None
    background: BackgroundWrite | None
    start_s: float
    stall_s: float = 0.0
    written: bool = False
    describing: Future[None] | None = None
    """On rank 0, once all have written."""
    vote: tuple[torch.Tensor, Any] | None = None
    """Whether all ranks are done with the step at hand, on its way."""

    @property
    def ballot(self) -> int:
        """Of this rank about the step at hand: `_DONE`, `_BUSY` or `_FAILED`."""
        if not self.written:
            return _DONE if self.background is None or self.background.is_done else _BUSY
        if self.describing is None:
            return _DONE
        if not self.describing.done():
            return _BUSY
        return _DONE if self.describing.exception() is None else _FAILED


class CheckpointSaver:
    """Saves an engine's shards; one save at a time. All methods are collective over the job.

    Args:
        folder: where to.
        engine: whose shards and moments.
        stored: from `stored_parameters`.
        asynchronous: write beside training.
        keep_last: checkpoints kept; all where None.
        log: where news go, on rank 0.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        engine: Engine,
        stored: Mapping[str, StoredParameter],
        *,
        asynchronous: bool = False,
        keep_last: int | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._stored = stored
        self._objects = stored_objects(engine.definition)
        self._asynchronous = asynchronous
        self._keep_last = keep_last
        self._log = log if dist.get_rank() == 0 else _say_nothing
        self._strategy = StreamingSaveStrategy(engine.dtype)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hydraulis-checkpoint")
        self._current: _Save | None = None
        self._deletions: threading.Thread | None = None

    def save(self, saved: SavedState) -> None:
        """Save now; with ``asynchronous`` the rest happens until `poll` or `finish` sees its end.

        Raises:
            CheckpointError: what the checkpoint needs cannot be written; the same on every rank.
        """
        if self._current is not None:
            self._log("the checkpoint before is still being written: training waits for it")
            self.finish()
        start_s = time.perf_counter()
        what = self._what(saved.iteration)
        path = self._folder.path_while_saving(saved.iteration)

        moments = self._moments()
        background: BackgroundWrite | None = None
        if self._asynchronous and self._strategy.is_planned:
            # All that is left to do needs nobody else: the fork does it.
            background = BackgroundWrite(partial(self._plan_and_write, saved, path, moments))
            writer, planned = ShardWriter(path), self._strategy.planned
        else:

            def prepare() -> None:
                if dist.get_rank() == 0:
                    self._folder.begin_saving(saved.iteration)

            on_all_ranks(prepare, what)
            writer, planned = self._plan(saved, path, moments)
            if self._asynchronous:
                background = BackgroundWrite(writer.write)
        self._current = _Save(saved, writer, planned, background, start_s)
        if self._asynchronous:
            self._vote(self._current)
            self._current.stall_s = time.perf_counter() - start_s
        else:
            self._complete(self._current)

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not complete; alike on every rank."""
        return self._current is not None

    def poll(self) -> None:
        """Go on with a save beside training; to be called once an iteration. Raises as `save`.

        Whether all ranks are done is asked in one call and known in the next, when the answer has
        long been there.
        """
        current = self._current
        if current is None:
            return
        start_s = time.perf_counter()
        outcome = self._outcome(current)
        if outcome == _DONE and current.written:
            self._end(current)
        elif outcome != _BUSY:
            self._advance(current)
        if self._current is not None:
            self._vote(current)
            current.stall_s += time.perf_counter() - start_s

    def finish(self) -> None:
        """Complete what was begun, waiting for it. Raises as `save`."""
        if self._current is not None:
            if self._current.vote is not None:
                self._outcome(self._current)
            self._complete(self._current)
        if self._deletions is not None:
            self._deletions.join()

    def abandon(self) -> None:
        """End a write that nobody waits for any more; not collective."""
        if self._current is not None and self._current.background is not None:
            self._current.background.abandon()
        self._current = None

    def _vote(self, current: _Save) -> None:
        ballot = torch.tensor([current.ballot], device=self._engine.device)
        current.vote = (ballot, dist.all_reduce(ballot, op=dist.ReduceOp.MIN, async_op=True))

    def _outcome(self, current: _Save) -> int:
        assert current.vote is not None
        ballot, work = current.vote
        work.wait()
        current.vote = None
        return int(ballot.item())

    def _complete(self, current: _Save) -> None:
        while self._current is not None:
            self._advance(current)

    def _advance(self, current: _Save) -> None:
        """Take the next step, waiting for what it needs; the same on every rank."""
        what = self._what(current.saved.iteration)
        try:
            if not current.written:
                self._collect(current, what)
                return
            describing = current.describing
            on_all_ranks(lambda: None if describing is None else describing.result(), what)
        except Exception:
            self._current = None
            if dist.get_rank() == 0:
                path = self._folder.path_while_saving(current.saved.iteration)
                shutil.rmtree(path, ignore_errors=True)
            raise
        self._end(current)

    def _end(self, current: _Save) -> None:
        self._current = None
        save_s = time.perf_counter() - current.start_s
        self._tell(current, save_s)
        if self._keep_last is not None and dist.get_rank() == 0:
            self._delete_surplus(self._keep_last)

    def _collect(self, current: _Save, what: str) -> None:
        """Rank 0 learns what every rank has written, or why not, and begins to describe it."""
        background = current.background
        written: Written | bytes | None = None
        failure = None
        try:
            written = current.writer.write() if background is None else background.result()
        except Exception as error:
            failure = failure_of(error, what)
        rank = dist.get_rank()
        everyone: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object((failure, written), everyone)
        current.written = True
        if everyone is not None:
            failures, results = zip(*everyone, strict=True)
            current.describing = self._thread.submit(
                self._describe, current, failures, results, what
            )

    def _describe(
        self,
        current: _Save,
        failures: Sequence[Any],
        answers: Sequence[Written | bytes],
        what: str,
    ) -> None:
        """On rank 0, in a thread: where everything lies; then the folder gets its name."""
        raise_first(failures, what)
        everyone: list[Written] = [
            pickle.loads(each) if isinstance(each, bytes) else each for each in answers
        ]
        saved = current.saved
        path = self._folder.path_while_saving(saved.iteration)
        assert current.planned is not None
        current.writer.finish(current.planned, [list(each.results) for each in everyone])
        config = CheckpointingConfig(self._strategy.backend, self._strategy.version)
        save_config(config, str(path))
        files = {name: record for each in everyone for name, record in each.files.items()}
        for name in files_of(path):
            if name not in files:
                files[name] = FileRecord((path / name).stat().st_size, sha256_of(path / name))
        Manifest(
            iteration=saved.iteration,
            num_ranks=len(everyone),
            model=saved.model,
            state=saved.state,
            configuration=saved.configuration,
            files=files,
        ).write(path)
        self._folder.publish(saved.iteration)

    def _plan(
        self, saved: SavedState, path: Path, moments: Mapping[str, Tensor]
    ) -> tuple[ShardWriter, Metadata | None]:
        """Collective the first time."""
        dist_checkpointing.save(
            self._state_dict(saved, moments),
            str(path),
            self._strategy,
            validate_access_integrity=False,  # by torch, whose check knows uneven shards
            async_sharded_save=True,
            content_metadata=sharding_metadata(),
            async_strategy="mcore",
        )
        return self._strategy.take(), self._strategy.planned

    def _plan_and_write(
        self,
        saved: SavedState,
        path: Path,
        moments: Mapping[str, Tensor],
        goes_on: Callable[[], bool],
    ) -> Written:
        """In a fork, once there is a plan. Raises OSError."""
        path.mkdir(parents=True, exist_ok=True)  # whichever rank comes first
        writer, _ = self._plan(saved, path, moments)
        return writer.write(goes_on)

    def _moments(self) -> dict[str, Tensor]:
        """State of the shards by the prefix of its keys; where a fork, if any, can read it."""
        engine = self._engine
        moments = {
            MASTER: engine.shards.parameters,
            EXP_AVG: engine.optimizer.exp_avg,
            EXP_AVG_SQ: engine.optimizer.exp_avg_sq,
        }
        if self._asynchronous:
            moments = {prefix: on_host(flat) for prefix, flat in moments.items()}
        return moments

    def _state_dict(self, saved: SavedState, moments: Mapping[str, Tensor]) -> dict[str, Any]:
        """Upstream's form of state dict, whose tensors are views of the shards."""
        engine = self._engine
        state: dict[str, Any] = dict(saved.upstream)
        state["model"] = sharded_tensors(engine.shards, moments[MASTER], self._stored, MODEL)
        # Alike on all ranks; rank 0 writes them.
        state["model_objects"] = {
            each.unique_key: dataclasses.replace(each, replica_id=dist.get_rank())
            for each in self._objects
        }
        state["optimizer"] = dict(saved.upstream["optimizer"]) | {
            "param_state": {
                prefix: sharded_tensors(engine.shards, flat, self._stored, prefix)
                for prefix, flat in moments.items()
            }
        }
        return state

    def _what(self, iteration: int) -> str:
        return f"iteration {iteration} cannot be saved to {self._folder.root}"

    def _tell(self, current: _Save, save_s: float) -> None:
        if dist.get_rank() == 0:
            path = self._folder.path_of(current.saved.iteration)
            num_bytes = Manifest.read(path).num_bytes
            stall_s = save_s if current.background is None else current.stall_s
            self._log(
                f"saved checkpoint {path}: {num_bytes / _BYTES_PER_MB:.1f} MB in {save_s:.2f} s, "
                f"for {stall_s:.2f} s of which training stood still"
            )

    def _delete_surplus(self, num_kept: int) -> None:
        """In a thread: deleting large files takes its time."""
        if self._deletions is not None:
            self._deletions.join()

        def delete() -> None:
            for iteration in self._folder.surplus(num_kept):
                try:
                    self._folder.delete(iteration)
                except OSError as error:
                    self._log(f"warning: checkpoint {iteration} cannot be deleted: {error}")

        self._deletions = threading.Thread(target=delete, name="hydraulis-delete-checkpoints")
        self._deletions.start()


def _say_nothing(message: str) -> None:
    """The log of ranks other than 0."""
