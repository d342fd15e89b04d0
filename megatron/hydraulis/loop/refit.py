"""Coefficients fitted while training runs, drift from the profile, slow ranks.

`OnlineRefit` computes them from times; `RunRefit` measures the times and plans by the result.

Every iteration gives the time of each micro-batch on each rank. The first iteration of a strategy
is ignored, because it also builds models. Every second one from then on is fitted as the points of
a profile are, close to the profile's coefficients scaled by the drift; both are shrunk towards the
profile (`fit.fit_near`, `fit.shrunk_mean`). The others are held out: a scheme keeps its profiled
times unless the fitted ones predict its held-out micro-batches better, and the run keeps the
profile unless what results predicts the held-out iterations better.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron.hydraulis.cost_model.fit import Sample, fit_near, shrunk_mean
from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledModel,
    ProfiledScheme,
    ProfiledStrategy,
)
from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.library.planning import Planning, planners
from megatron.hydraulis.loop.batch_reader import PlannedBatch
from megatron.hydraulis.loop.plan_feed import PlanFeed
from megatron.hydraulis.observability.records import REFITTED_PROFILE_FILE_NAME
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import ContextGroup, ReplicaPlan
from megatron.hydraulis.runtime.spans import (
    COMPUTE,
    HOST,
    NO_TRACKS,
    CudaClock,
    MemoryRecorder,
    RecordedSpan,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

_NUM_SLOTS = 4
"""Keys of a rank in the store, used in turn. No rank is more than an iteration ahead of another, so
nothing is overwritten that rank 0 still has to read."""
_NS_PER_MS = 1e6
_MS_PER_S = 1e3
_LEAST_MS = 1e-6
"""A clock's nanosecond: a prediction of 0 is wrong by a large factor, not by an infinite one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitSettings:
    """How fast a refit follows measured times, and what it reports."""

    drift: float = 0.1
    """Share by which the times of a scheme must differ from the profile's, or those of a rank
    exceed those of other ranks of its stage, to be reported."""
    num_iterations: int = 20
    """Iterations that are fitted or held out."""
    min_iterations: int = 3
    """Iterations of a scheme or a rank before it is reported; as many are fitted and as many held
    out before plans follow. A standard error takes 2."""
    min_standard_errors: float = 2.0
    """By how many of its standard errors the gain on held-out iterations must exceed 0, so that
    luck is no gain: 2.3 % of true profiles would be left if times were normally distributed."""
    prior_weight: float = 18.0
    """Weight of the profile, in micro-batches, see `fit.fit_near`: as many as it was fitted to,
    6 sizes in 3 packings by default (`survey.grid`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationTimes:
    """Measured times of one iteration."""

    plan: IterationPlan
    strategy: Strategy
    """Of the plan."""
    rank_times_ms: Mapping[int, Sequence[float]]
    """By rank: forward and backward of each micro-batch of its replica."""
    iteration_ms: float
    """Up to the update, without waits for the planner."""


@dataclass(frozen=True, slots=True)
class RefittedCostModel:
    """A cost model with measured times and the limits of its base."""

    base: CostModel
    times: tuple[tuple[Scheme, Coefficients], ...]
    """Of the schemes that were fitted; the others keep those of the base."""
    overheads_ms: tuple[tuple[str, float], ...]
    """By the name of a strategy."""

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The fitted ones; those of cp8~ are those of cp8."""
        found = dict(self.times).get(scheme.of_context_group(scheme.cp))
        return self.base.coefficients(scheme) if found is None else found

    def max_tokens(self, scheme: Scheme) -> int:
        return self.base.max_tokens(scheme)

    def overhead_ms(self, strategy: Strategy) -> float:
        found = dict(self.overheads_ms).get(strategy.name)
        return self.base.overhead_ms(strategy) if found is None else found

    def to_profile(
        self,
        pool: Pool,
        limits: Limits,
        *,
        model: ProfiledModel,
        device: str,
        source: str,
        date: str,
    ) -> ProfileCostModel:
        """A cost profile of a pool's schemes, with measured overheads as time of regrouping.

        A scheme that splits its cp ranks has a row for each size of group that the base knows.
        """
        schemes = dict.fromkeys(
            scheme
            for strategy in pool.strategies
            for whole in strategy.schemes
            for scheme in whole.group_schemes
            if scheme.cp == whole.cp or self._knows(scheme)
        )
        measured = self.base if isinstance(self.base, ProfileCostModel) else None
        assumed = () if measured is None else measured.assumed_schemes(pool)
        return ProfileCostModel(
            device=device,
            source=source,
            date=date,
            num_ranks=pool.num_ranks if measured is None else measured.num_ranks,
            model=model,
            schemes=tuple(
                ProfiledScheme(
                    scheme=scheme,
                    coefficients=self.coefficients(scheme),
                    max_tokens=limits.of_scheme(scheme),
                    is_assumed=scheme in assumed and scheme not in dict(self.times),
                )
                for scheme in schemes
            ),
            strategies=tuple(
                ProfiledStrategy(
                    name=strategy.name,
                    replicas=str(strategy),
                    regroup_ms=self.overhead_ms(strategy),
                )
                for strategy in pool.strategies
                if strategy.name in dict(self.overheads_ms)
                or (measured is not None and measured.measured_overhead_ms(strategy) is not None)
            ),
        )

    def _knows(self, scheme: Scheme) -> bool:
        try:
            self.coefficients(scheme)
        except StrategyError:
            return False
        return True


_Groups = tuple[tuple[Scheme, Sample], ...]
"""Context groups of a micro-batch that hold sequences."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """An iteration in the window of its strategy."""

    strategy: Strategy
    replicas: tuple[tuple[Scheme, tuple[_Groups, ...]], ...]
    """Scheme and micro-batches."""
    iteration_ms: float
    overhead_ms: float
    """What the iteration took beyond the makespan of its micro-batches."""
    is_held_out: bool

    def predicted_ms(
        self,
        coefficients: Callable[[Scheme], Coefficients],
        overhead_ms: Callable[[Strategy], float],
    ) -> float:
        """Time of the iteration by those of a cost model."""
        makespans_ms = (
            pipeline_time_ms(
                [
                    max(
                        (s.predicted_ms(coefficients(scheme)) for scheme, s in groups),
                        default=0.0,
                    )
                    for groups in micro_batches
                ],
                of_replica.pp,
                forward_share=coefficients(of_replica).forward_share,
            )
            for of_replica, micro_batches in self.replicas
        )
        return max(makespans_ms, default=0.0) + overhead_ms(self.strategy)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A refitted cost model, and how well it predicts the iterations that were held out."""

    model: RefittedCostModel
    error: float
    base_error: float
    num_iterations: int
    is_better: bool
    """By more than noise explains."""

    def __str__(self) -> str:
        choice = "plans follow the refitted times" if self.is_better else "plans keep the profile"
        return (
            f"cost profile: {choice}: on {self.num_iterations} iterations that were not fitted "
            f"refitted times are off by {self.error:.1%} and the profile by {self.base_error:.1%}"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """A stage of a scheme: all its ranks do the same work."""

    scheme: Scheme
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.scheme}" if self.scheme.pp > 1 else f"{self.scheme}"


class OnlineRefit:
    """Turns the times of iterations into coefficients and reports; reads no clock.

    The run began with ``base``.
    """

    def __init__(self, base: CostModel, settings: RefitSettings | None = None) -> None:
        self._settings = RefitSettings() if settings is None else settings
        self._base = base
        # It can take 40 ms.
        self._base_overhead_ms = functools.cache(base.overhead_ms)
        self._samples: dict[Scheme, deque[tuple[bool, list[Sample]]]] = defaultdict(self._window)
        """By scheme: whether an iteration is held out, and its micro-batches."""
        self._measured: dict[str, deque[_Measured]] = defaultdict(self._window)
        """By strategy."""
        self._ratios: dict[int, deque[tuple[_Place, float]]] = defaultdict(self._window)
        """By rank: measured over predicted time of its micro-batches in an iteration. Predictions
        are for the slowest stage, so the ratio is below 1 on others."""
        self._replica_mates: dict[tuple[_Place, int], frozenset[int]] = {}
        self._num_seen: Counter[str] = Counter()
        """Iterations by strategy."""
        self._verdict: _Verdict | None = None
        self._reported_verdict: bool | None = None
        self._reported_drift: dict[Scheme, float] = {}
        self._reported_slow: dict[int, float] = {}

    def add(self, times: IterationTimes) -> bool:
        """Add an iteration; returns whether it changes anything."""
        plan = times.plan
        self._num_seen[plan.strategy] += 1
        if self._num_seen[plan.strategy] == 1:
            return False
        # The second is fitted, the third held out, and so on.
        is_held_out = self._num_seen[plan.strategy] % 2 == 1
        by_scheme: dict[Scheme, list[Sample]] = defaultdict(list)
        makespan_ms = 0.0
        replicas = []
        for replica in plan.replicas:
            if not replica.micro_batches:
                continue
            self._note_ratios(replica, times.rank_times_ms)
            slowest_ms = []
            micro_batches = []
            for place, micro_batch in enumerate(replica.micro_batches):
                groups_ms = []
                groups = []
                for scheme, share in replica.shares(micro_batch):
                    time_ms = _slowest_stage_ms(replica, share.group, place, times.rank_times_ms)
                    groups_ms.append(time_ms)
                    if time_ms > 0.0 and share.lengths:
                        window = self._base.coefficients(scheme).window
                        sample = Sample.of(share.lengths, time_ms, share.row_tokens, window)
                        by_scheme[scheme].append(sample)
                        groups.append((scheme, sample))
                slowest_ms.append(max(groups_ms))
                micro_batches.append(tuple(groups))
            replicas.append((replica.scheme, tuple(micro_batches)))
            forward_share = self._base.coefficients(replica.scheme).forward_share
            time_ms = pipeline_time_ms(slowest_ms, replica.scheme.pp, forward_share=forward_share)
            makespan_ms = max(makespan_ms, time_ms)
        for scheme, samples in by_scheme.items():
            self._samples[scheme].append((is_held_out, samples))
        self._measured[plan.strategy].append(
            _Measured(
                strategy=times.strategy,
                replicas=tuple(replicas),
                iteration_ms=times.iteration_ms,
                overhead_ms=max(0.0, times.iteration_ms - makespan_ms),
                is_held_out=is_held_out,
            )
        )
        self._verdict = self._judged(self._candidate())
        return True

    def refitted(self) -> RefittedCostModel:
        """With the times of all schemes and strategies that ran often enough, if they predict
        iterations that were held out better than the base does; else the base."""
        if self._verdict is not None and self._verdict.is_better:
            return self._verdict.model
        return RefittedCostModel(self._base, (), ())

    @property
    def verdict(self) -> str:
        """Whether the refitted times or those of the profile are used, and why."""
        return "cost profile: nothing was refitted" if self._verdict is None else str(self._verdict)

    def news(self) -> list[str]:
        """Changes since the last call: whether plans follow the refitted times, drift that began,
        changed or ended, and ranks that became slow or are no longer slow."""
        verdict = self._verdict
        news = [*self._news_of_drift(), *self._news_of_ranks()]
        if verdict is not None and verdict.is_better != self._reported_verdict:
            self._reported_verdict = verdict.is_better
            news.insert(0, str(verdict))
        return news

    def _candidate(self) -> RefittedCostModel:
        """Fitted to the iterations that are not held out."""
        fitted = []
        for scheme, window in self._samples.items():
            seen = [samples for is_held_out, samples in window if not is_held_out]
            unseen = [samples for is_held_out, samples in window if is_held_out]
            if min(len(seen), len(unseen)) < self._settings.min_iterations:
                continue
            before = self._base.coefficients(scheme)
            ratio = _shrunk_ratio(seen, before)
            prior = replace(
                before,
                a_ms_per_token2=before.a_ms_per_token2 * ratio,
                b_ms_per_token=before.b_ms_per_token * ratio,
                c_ms=before.c_ms * ratio,
            )
            fit = fit_near(
                list(itertools.chain(*seen)), prior, prior_weight=self._settings.prior_weight
            )
            after = replace(
                fit.coefficients, window=before.window, forward_share=before.forward_share
            )
            errors, errors_before = (
                [
                    statistics.fmean(_error(s.time_ms, s.predicted_ms(times)) for s in samples)
                    for samples in unseen
                ]
                for times in (after, before)
            )
            if self._is_better(errors, errors_before):
                fitted.append((scheme, after))
        overheads_ms = []
        for name, iterations in self._judged_iterations():
            seen_ms = [one.overhead_ms for one in iterations if not one.is_held_out]
            before_ms = self._base_overhead_ms(iterations[0].strategy)
            overheads_ms.append((name, shrunk_mean(seen_ms, before_ms)))
        return RefittedCostModel(self._base, tuple(fitted), tuple(overheads_ms))

    def _judged(self, model: RefittedCostModel) -> _Verdict | None:
        """By the iterations that are held out; None if there is nothing to judge yet."""
        unseen = [one for _, each in self._judged_iterations() for one in each if one.is_held_out]
        if not unseen:
            return None
        errors, base_errors = (
            [
                _error(one.iteration_ms, one.predicted_ms(coefficients, overhead_ms))
                for one in unseen
            ]
            for coefficients, overhead_ms in (
                (functools.cache(model.coefficients), model.overhead_ms),
                (functools.cache(self._base.coefficients), self._base_overhead_ms),
            )
        )
        return _Verdict(
            model=model,
            error=math.expm1(statistics.fmean(errors)),
            base_error=math.expm1(statistics.fmean(base_errors)),
            num_iterations=len(unseen),
            is_better=self._is_better(errors, base_errors),
        )

    def _judged_iterations(self) -> Iterator[tuple[str, Sequence[_Measured]]]:
        """By strategy, those of which enough are fitted and enough held out."""
        for name, iterations in self._measured.items():
            if len(iterations) >= 2 * self._settings.min_iterations:
                yield name, iterations

    def _is_better(self, errors: Sequence[float], base_errors: Sequence[float]) -> bool:
        """Whether errors on the same iterations are lower by more than noise explains."""
        gains = [base - error for error, base in zip(errors, base_errors, strict=True)]
        standard_error = math.sqrt(statistics.variance(gains) / len(gains))
        return statistics.fmean(gains) > self._settings.min_standard_errors * standard_error

    def _window(self) -> deque:  # type: ignore[type-arg]
        return deque(maxlen=self._settings.num_iterations)

    def _note_ratios(
        self, replica: ReplicaPlan, rank_times_ms: Mapping[int, Sequence[float]]
    ) -> None:
        """Add the ratio of each rank, in waves over the groups that it belongs to."""
        for rank in replica.ranks:
            position = replica.replica.position_of(rank)
            assert position is not None
            shares = (
                (scheme, share)
                for micro_batch in replica.micro_batches
                for scheme, share in replica.shares(micro_batch)
                if position.cp in share.group.columns
            )
            predicted_ms = sum(
                self._base.coefficients(scheme).time_ms(share.lengths, share.row_tokens)
                for scheme, share in shares
            )
            place = _Place(replica.scheme, position.stage)
            self._replica_mates[place, rank] = frozenset(replica.ranks)
            if predicted_ms > 0.0:
                self._ratios[rank].append((place, sum(rank_times_ms[rank]) / predicted_ms))

    def _drifts(self) -> dict[Scheme, float]:
        """Median of measured over profiled time, for the schemes that ran often enough."""
        found = {}
        for scheme, window in self._samples.items():
            if len(window) < self._settings.min_iterations:
                continue
            coefficients = self._base.coefficients(scheme)
            ratios = [
                sample.time_ms / predicted_ms
                for _, samples in window
                for sample in samples
                if (predicted_ms := sample.predicted_ms(coefficients)) > 0.0
            ]
            if ratios:
                found[scheme] = statistics.median(ratios)
        return found

    def _news_of_drift(self) -> Iterator[str]:
        limit = self._settings.drift
        for scheme, ratio in self._drifts().items():
            reported = self._reported_drift.get(scheme, 1.0)
            if abs(ratio / reported - 1.0) <= limit:
                continue
            self._reported_drift[scheme] = ratio
            num_samples = sum(len(samples) for _, samples in self._samples[scheme])
            if abs(ratio - 1.0) > limit:
                yield (
                    f"cost profile: {scheme} takes {ratio:.2f} times the profiled time, by the "
                    f"median of {num_samples} micro-batches: a drift of {ratio - 1.0:+.0%}, more "
                    f"than {limit:.0%}"
                )
            else:
                yield (
                    f"cost profile: {scheme} is back at {ratio:.2f} times the profiled time, "
                    f"within {limit:.0%}"
                )

    def _news_of_ranks(self) -> Iterator[str]:
        limit = self._settings.drift
        for rank, (place, ratio) in sorted(self._compared().items()):
            reported = self._reported_slow.get(rank)
            if ratio > 1.0 + limit:
                if reported is not None and abs(ratio / reported - 1.0) <= limit:
                    continue
                self._reported_slow[rank] = ratio
                yield (
                    f"slow rank: rank {rank} takes {ratio:.2f} times as long as the other ranks "
                    f"that run {place}; look at its device, clock and neighbours"
                )
            elif reported is not None:
                del self._reported_slow[rank]
                yield f"slow rank: rank {rank} is as fast as the others again"

    def _compared(self) -> dict[int, tuple[_Place, float]]:
        """By rank, its time relative to that of ranks which do the same in other replicas.

        Ranks of one replica wait for each other, so one slow rank slows them all, and all are
        reported. Without another replica of the scheme there is nothing to compare with.
        """
        medians: dict[_Place, dict[int, float]] = defaultdict(dict)
        for rank, window in self._ratios.items():
            of_place: dict[_Place, list[float]] = defaultdict(list)
            for place, ratio in window:
                of_place[place].append(ratio)
            for place, ratios in of_place.items():
                if len(ratios) >= self._settings.min_iterations:
                    medians[place][rank] = statistics.median(ratios)
        found: dict[int, tuple[_Place, float]] = {}
        for place, ranks in medians.items():
            for rank, ratio in ranks.items():
                mates = self._replica_mates[place, rank]
                others = [other for mate, other in ranks.items() if mate not in mates]
                if not others or statistics.median(others) <= 0.0:
                    continue
                relative = ratio / statistics.median(others)
                if rank not in found or relative > found[rank][1]:
                    found[rank] = (place, relative)
        return found


def _shrunk_ratio(iterations: Sequence[Sequence[Sample]], before: Coefficients) -> float:
    """Measured over profiled time, shrunk towards 1.

    Micro-batches of an iteration share its noise, so that each iteration counts once.
    """
    logarithms = [
        statistics.median(ratios)
        for samples in iterations
        if (
            ratios := [
                math.log(sample.time_ms / predicted_ms)
                for sample in samples
                if (predicted_ms := sample.predicted_ms(before)) > 0.0
            ]
        )
    ]
    return math.exp(shrunk_mean(logarithms, 0.0)) if logarithms else 1.0


def _error(measured_ms: float, predicted_ms: float) -> float:
    """|ln(measured / predicted)|: twice as long and half as long are equally wrong."""
    return abs(math.log(max(measured_ms, _LEAST_MS) / max(predicted_ms, _LEAST_MS)))


def _slowest_stage_ms(
    replica: ReplicaPlan,
    group: ContextGroup,
    place: int,
    rank_times_ms: Mapping[int, Sequence[float]],
) -> float:
    """Of the stages of a context group, the longest mean over its ranks for a micro-batch."""
    scheme = replica.scheme
    return max(
        statistics.fmean(
            rank_times_ms[replica.replica.rank_at(stage, cp, tp)][place]
            for cp in group.columns
            for tp in range(scheme.tp)
        )
        for stage in range(scheme.pp)
    )


class RunRefit:
    """``--refit-cost-profile``: ranks measure micro-batches, rank 0 fits times and plans by them.

    Times travel through the job's store, one key per rank, without a collective: rank 0 reads those
    of the previous iteration, which every rank has written before it could begin this one.

    Args:
        current: what the run plans with at the time of the call.
        gradient_bytes: of a gradient on the wire.
    """

    def __init__(
        self,
        hydraulis: HydraulisConfig,
        current: Callable[[], Planning],
        store: dist.Store,
        *,
        model: ProfiledModel,
        gradient_bytes: int,
        has_cuda: bool,
    ) -> None:
        self._hydraulis = hydraulis
        self._current = current
        self._model = model
        self._gradient_bytes = gradient_bytes
        self._pool = current().pool
        """With strategies that are later dropped because they run out of memory."""
        self._store = dist.PrefixStore("hydraulis_refit", store)
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._refit = (
            OnlineRefit(current().cost_model, RefitSettings(drift=hydraulis.refit_drift))
            if self._rank == 0
            else None
        )
        self.spans = MemoryRecorder(CudaClock() if has_cuda else None)
        """Records the engine's work on this rank."""
        self.spans.tracks = NO_TRACKS
        self._before: tuple[int, IterationPlan, float] | None = None
        """Number, plan and ms of an iteration whose times have not been read yet."""

    def begin(self) -> None:
        """Measure the iteration that begins."""
        self.spans.tracks = frozenset({COMPUTE, HOST})

    def end(
        self,
        iteration: int,
        planned: PlannedBatch,
        iteration_time_s: float,
        feed: PlanFeed | None,
    ) -> None:
        """Publish the times of an iteration; on rank 0, read those of the previous one.

        Plans that rank 0's feed requests from now on use them.
        """
        self.spans.tracks = NO_TRACKS
        own_ms = micro_batch_times_ms(self.spans.take(), len(planned.share.micro_batches))
        message = json.dumps({"iteration": iteration, "times_ms": own_ms})
        self._store.set(_key(iteration, self._rank), message)
        if self._refit is None:
            return
        before = self._before
        iteration_ms = (iteration_time_s - planned.plan_wait_s) * _MS_PER_S
        self._before = iteration, planned.plan, iteration_ms
        if before is None or not self._refit.add(self._times_of(*before)):
            return
        for line in self._refit.news():
            print(f"iteration {before[0]}: {line}", flush=True)
        assert feed is not None
        planning = replace(self._current(), cost_model=self._refit.refitted())
        feed.replace_planner(*planners(planning, self._hydraulis))

    def write(self, folder: Path) -> None:
        """Rank 0: write the newest times as a cost profile, for the next run.

        Raises ConfigurationError when it cannot be written.
        """
        if self._refit is None:
            return
        planning = self._current()
        profile = self._refit.refitted().to_profile(
            self._pool,
            planning.limits,
            model=self._model,
            device=f"{self._num_ranks} ranks as trained",
            source=f"{self._refit.verdict}; before: {planning.source}",
            date=datetime.date.today().isoformat(),
        )
        profile = replace(profile, gradient_bytes=self._gradient_bytes)
        write_output(folder / REFITTED_PROFILE_FILE_NAME, profile.to_json(), "--run-dir")
        print(self._refit.verdict, flush=True)

    def _times_of(self, iteration: int, plan: IterationPlan, iteration_ms: float) -> IterationTimes:
        keys = [_key(iteration, rank) for rank in range(self._num_ranks)]
        messages = [json.loads(value) for value in self._store.multi_get(keys)]
        assert {message["iteration"] for message in messages} == {iteration}
        return IterationTimes(
            plan=plan,
            strategy=self._pool.strategy(plan.strategy),
            rank_times_ms={rank: message["times_ms"] for rank, message in enumerate(messages)},
            iteration_ms=iteration_ms,
        )


def micro_batch_times_ms(spans: Sequence[RecordedSpan], num_micro_batches: int) -> list[float]:
    """Forward and backward of each micro-batch of a rank, without waits for parameters."""
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
