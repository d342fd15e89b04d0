"""``--refit-cost-profile``: each rank measures its micro-batches, rank 0 fits and plans by them.

Times travel through the job's store, one key a rank, without a collective: rank 0 reads those of
the iteration before, which every rank has written before it could begin this one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.loop.batch_reader import PlannedBatch
from megatron.hydraulis.loop.plan_feed import PlanFeed
from megatron.hydraulis.loop.planning import Planning, planners
from megatron.hydraulis.observability.earlier_run import REFITTED_PROFILE_FILE_NAME
from megatron.hydraulis.planner.plan import IterationPlan, Planner
from megatron.hydraulis.profiler.refit import IterationTimes, OnlineRefit, RefitSettings
from megatron.hydraulis.runtime.spans import COMPUTE, HOST, CudaClock, MemoryRecorder, RecordedSpan

__all__ = ["RunRefit", "micro_batch_times_ms"]

_NUM_SLOTS = 4
"""Keys of a rank, used in turn. No rank is more than an iteration ahead of another, so that nobody
writes where rank 0 still has to read."""
_NS_PER_MS = 1e6
_MS_PER_S = 1e3
_NO_TRACKS: frozenset[str] = frozenset()

Planners = tuple[Planner, Planner]
"""What plans, and its stand-in."""


@dataclass(frozen=True)
class _Trained:
    """An iteration whose times are on their way."""

    iteration: int
    plan: IterationPlan
    iteration_ms: float


class RunRefit:
    """The refit of a run, as one rank sees it.

    Args:
        refit: on rank 0; None on the others.
        store: of the job.
        make_planners: from a cost model.
        has_cuda: whether the job computes on CUDA devices.
        log: where news go.
    """

    def __init__(
        self,
        refit: OnlineRefit | None,
        store: dist.Store,
        make_planners: Callable[[CostModel], Planners],
        *,
        limits: Limits,
        has_cuda: bool,
        log: Callable[[str], None],
    ) -> None:
        self._refit = refit
        self._limits = limits
        self._store = dist.PrefixStore("hydraulis_refit", store)
        self._make_planners = make_planners
        self._log = log
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._recorder = MemoryRecorder(CudaClock() if has_cuda else None)
        self._recorder.tracks = _NO_TRACKS
        self._before: _Trained | None = None

    @classmethod
    def of(
        cls,
        hydraulis: HydraulisConfig,
        current: Callable[[], Planning],
        store: dist.Store,
        *,
        has_cuda: bool,
    ) -> RunRefit | None:
        """The refit of --refit-cost-profile; None without the flag.

        current: the pool and limits to plan with at the time of the call.
        """
        if not hydraulis.refit_cost_profile:
            return None
        planning = current()
        refit = None
        if dist.get_rank() == 0:
            refit = OnlineRefit(planning.cost_model, RefitSettings(drift=hydraulis.refit_drift))
        return cls(
            refit,
            store,
            lambda cost_model: planners(replace(current(), cost_model=cost_model), hydraulis),
            limits=planning.limits,
            has_cuda=has_cuda,
            log=partial(print, flush=True),
        )

    @property
    def spans(self) -> MemoryRecorder:
        """What the engine tells of its work."""
        return self._recorder

    def begin(self) -> None:
        """An iteration is about to run: measure."""
        self._recorder.tracks = frozenset({COMPUTE, HOST})

    def end(
        self,
        iteration: int,
        planned: PlannedBatch,
        iteration_time_s: float,
        feed: PlanFeed | None,
    ) -> None:
        """An iteration has run. On rank 0, which has the feed, plans that are requested from now on
        use the times of the iterations before it."""
        self._recorder.tracks = _NO_TRACKS
        own_ms = micro_batch_times_ms(self._recorder.take(), len(planned.micro_batches))
        message = json.dumps({"iteration": iteration, "times_ms": own_ms})
        self._store.set(_key(iteration, self._rank), message)
        if self._refit is None:
            return
        before, self._before = (
            self._before,
            _Trained(
                iteration,
                planned.plan,
                (iteration_time_s - planned.plan_wait_s) * _MS_PER_S,
            ),
        )
        if before is None or not self._refit.add(self._times_of(before)):
            return
        for line in self._refit.news():
            self._log(f"iteration {before.iteration}: {line}")
        assert feed is not None
        feed.replace_planner(*self._make_planners(self._refit.refitted()))

    def write(self, folder: Path, planning: Planning) -> None:
        """Rank 0: the newest times as a cost profile, for the next run.

        Raises ConfigurationError when it cannot be written.
        """
        if self._refit is None:
            return
        profile = self._refit.refitted().to_profile(
            planning.pool,
            self._limits,
            device=f"{self._num_ranks} ranks as trained",
            source=f"refitted in training; before: {planning.source}",
            date=datetime.date.today().isoformat(),
        )
        path = folder / REFITTED_PROFILE_FILE_NAME
        try:
            write_json(path, profile.to_json())
        except OSError as error:
            raise ConfigurationError(
                f"cannot write {path}: {error.strerror or error}; make room or name another "
                f"--run-dir"
            ) from error

    def _times_of(self, trained: _Trained) -> IterationTimes:
        keys = [_key(trained.iteration, rank) for rank in range(self._num_ranks)]
        messages = [json.loads(value) for value in self._store.multi_get(keys)]
        return IterationTimes(
            plan=trained.plan,
            rank_times_ms=_of_iteration(messages, trained.iteration),
            iteration_ms=trained.iteration_ms,
        )


def micro_batch_times_ms(spans: Sequence[RecordedSpan], num_micro_batches: int) -> list[float]:
    """Forward and backward of each micro-batch of a rank, waits for parameters left out."""
    times_ms = [0.0] * num_micro_batches
    waits = [span for span in spans if span.name == "gather wait"]
    for span in spans:
        if span.name in ("forward", "backward"):
            waited_ns = sum(
                max(0, min(span.end_ns, wait.end_ns) - max(span.start_ns, wait.start_ns))
                for wait in waits
            )
            own_ns = span.end_ns - span.start_ns - waited_ns
            times_ms[int(span.detail["micro_batch"])] += own_ns / _NS_PER_MS
    return times_ms


def _key(iteration: int, rank: int) -> str:
    return f"{iteration % _NUM_SLOTS}/{rank}"


def _of_iteration(
    messages: Sequence[Mapping[str, object]], iteration: int
) -> dict[int, Sequence[float]]:
    """By rank, found to be of this iteration."""
    found: dict[int, Sequence[float]] = {}
    for rank, message in enumerate(messages):
        assert message["iteration"] == iteration, (rank, message["iteration"], iteration)
        times_ms = message["times_ms"]
        assert isinstance(times_ms, list)
        found[rank] = times_ms
    return found
