"""Replacements in upstream's loop: train step, evaluation, data and log lines."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import (
    MoEMetricsTracker,
    set_moe_metrics_tracker,
)
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.dataset import weights_path
from megatron.hydraulis.data.sampler import GlobalBatch
from megatron.hydraulis.errors import HydraulisError, NonFiniteLossError, listed
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.samples import counts_iterations, num_iterations, sample_tokens
from megatron.hydraulis.loop.checkpoints import LoopCounters, RunCheckpoints
from megatron.hydraulis.loop.drift import RunDrift
from megatron.hydraulis.loop.faults import HangGuard
from megatron.hydraulis.loop.memory_safety import MemorySafety
from megatron.hydraulis.loop.model_container import ModelContainer
from megatron.hydraulis.loop.planned_data import PlannedData, RankBatch
from megatron.hydraulis.loop.tracing import RunTrace
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.observability.console import EtaEstimator, compact_line, iteration_suffix
from megatron.hydraulis.observability.records import IterationRecord, MetricsWriter
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.planner.plan import is_marked, plan_status
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.memory import allocator_peaks
from megatron.hydraulis.runtime.outcome import StepOutcome
from megatron.hydraulis.runtime.process_groups import of_all_ranks

LossDict = dict[str, torch.Tensor]
Iterators = tuple[PlannedData | None, PlannedData | None, PlannedData | None]

TIMER_OF_PHASE = {
    "gather": "params-all-gather",
    "forward-backward": "forward-backward",
    "scatter": "all-grads-sync",
    "optimizer": "optimizer",
}
"""Upstream's log prints timers of a fixed list of names: these fit best."""

AVERAGED = ("imbalance", "iteration_time_s", "plan_time_s", "plan_wait_s", "predicted_time_s")
"""Fields of the record of which a log line shows the mean over its iterations."""

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "expert_load")
"""Fields of which it shows the largest value."""

MAX_SEQUENCES_NAMED = 16
"""Sequences that an error names before it only counts the rest."""

UNTRAINED_UNTIL_WARNING = 10
"""Iterations in a row without a trained token, after each of which there is a warning."""

_NO_THROUGHPUT = " throughput per GPU (TFLOP/s/GPU): 0.0 |"
"""Upstream's unit is too large for CPU ranks and tiny models, whose throughput is left out."""


@dataclass(frozen=True)
class RunParts:
    """Parts of a run besides engine and data."""

    metrics: MetricsWriter | None
    """Writer that exists on the last rank, which logs."""
    trace: RunTrace | None
    memory: MemorySafety
    drift: RunDrift | None
    checkpoints: RunCheckpoints
    guard: HangGuard


class TrainingLoop:
    """The functions of upstream's loop that are replaced, as methods of one object.

    Args:
        make_iterators: builds training, validation and test data once the loop asks for them.
    """

    def __init__(
        self, resolved: Resolved, parts: RunParts, make_iterators: Callable[[], Iterators]
    ) -> None:
        hydraulis = resolved.hydraulis
        self._sizes = resolved.sizes
        self._guard = parts.guard
        self._memory = parts.memory
        self._checkpoints = parts.checkpoints
        self._max_skipped_in_a_row = (
            hydraulis.max_skipped_in_a_row if hydraulis.skip_nan_iterations else 0
        )
        self._drift = parts.drift
        self._trace = parts.trace
        self._make_iterators = make_iterators
        self._metrics = parts.metrics
        self._eta = EtaEstimator()
        self._shape, self._frozen = resolved.shape, resolved.frozen
        self._is_compact = hydraulis.console == "compact"
        self._interval = LogInterval(resolved.shape.window)
        self._num_sequences = 0
        """Size of the last global batch."""
        self._num_consumed: int | None = None
        """Sequences in the plans of all iterations so far."""
        self._is_logging = False

    # --- replaced: get_megatron_optimizer ---------------------------------------------------

    def get_megatron_optimizer(
        self,
        config: Any,
        model_chunks: list[ModelContainer],
        config_overrides: Any = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
        dump_param_to_param_group_map: str | None = None,
    ) -> ShardedAdamW:
        """The optimizer on the shards exists already: it is the engine's."""
        return model_chunks[0].engine.optimizer

    # --- replaced: build_train_valid_test_data_iterators ------------------------------------

    def build_train_valid_test_data_iterators(
        self, build_train_valid_test_datasets_provider: Any
    ) -> Iterators:
        """Our iterators; upstream's dataset provider is not asked."""
        args = get_args()
        train, valid, test = self._make_iterators()
        if train is not None:
            self._set_end(args, train)
        args.do_train = train is not None and args.train_iters > 0
        args.do_valid = valid is not None and args.eval_iters > 0
        args.do_test = test is not None and args.eval_iters > 0
        return train, valid, test

    # --- replaced: train_step ---------------------------------------------------------------

    def train_step(
        self,
        forward_step_func: Any,
        data_iterator: PlannedData,
        model: list[ModelContainer],
        optimizer: ShardedAdamW,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        iteration: int | None = None,
        pg_collection: Any = None,
        p2p_communicator: Any = None,
    ) -> tuple[LossDict, int, bool, bool, int, float | None, None, None]:
        """One planned iteration; returns upstream's eight values."""
        args = get_args()
        engine = model[0].engine
        number = (iteration or 0) + 1
        self._guard.enter("planning", number, "")
        # The wait for the loss, for one, is no block of its own.
        with self._guard.noting():
            self._checkpoints.poll()
            self._check_consumed(args)
            start_s = time.perf_counter()
            planned, outcome = self._run(number, engine, data_iterator, forward_step_func)
            count_skipped(
                number,
                planned,
                outcome,
                data_iterator.corpus,
                self._checkpoints.counters,
                num_allowed=self._max_skipped_in_a_row,
            )
            if outcome.updated:
                opt_param_scheduler.step(increment=self._schedule_steps(args, planned.batch))
            self._num_consumed = args.consumed_train_samples + planned.batch.num_sequences
            # Upstream is about to count a full nominal batch.
            args.consumed_train_samples += planned.batch.num_sequences - args.global_batch_size
            iteration_time_s = time.perf_counter() - start_s
            self._record(args, number, planned, outcome, optimizer, iteration_time_s)
            if self._drift is not None:
                self._drift.end(number, planned.plan, len(planned.share.micro_batches))
        losses = {
            name: torch.tensor([loss], dtype=torch.float32) for name, loss in _losses(outcome)
        }
        skipped = 0 if outcome.updated else 1
        return losses, skipped, False, False, 0, outcome.gradient_norm, None, None

    def _run(
        self, number: int, engine: RuntimeEngine, data: PlannedData, forward_step: Any
    ) -> tuple[RankBatch, StepOutcome]:
        """The next batch, run; once more with lower limits if memory runs out."""
        planned = self._next(number, data)
        self._set_end(get_args(), data)
        if self._drift is not None:
            self._drift.begin()
        phase, trace = self._guard.around(_upstreams_timer), self._trace
        while True:
            traced = nullcontext() if trace is None else trace.iteration(number, planned.plan)
            with traced, self._memory.explained():
                engine.forward_backward(
                    planned.plan.strategy, planned.share.micro_batches, forward_step, phase=phase
                )
                # Only now, as the planner has been working during the backward passes.
                is_last = number >= get_args().train_iters
                next_strategy = None if is_last else data.publish_ready()
                outcome = engine.optim_step(next_strategy=next_strategy, phase=phase)
            if not outcome.num_ranks_without_memory:
                return planned, outcome
            self._memory.lower_after(number, outcome)
            if self._drift is not None:
                self._drift.spans.take()
            planned = self._next(number, data)

    # --- replaced: save_checkpoint, load_checkpoint -----------------------------------------

    @property
    def save_checkpoint(self) -> Callable[..., None]:
        """Ours, with upstream's parameters."""
        return self._guard.phase("save")(self._checkpoints.save_checkpoint)

    @property
    def load_checkpoint(self) -> Callable[..., tuple[int, float]]:
        """Ours, with upstream's parameters."""
        return self._guard.phase("load")(self._checkpoints.load_checkpoint)

    # --- replaced: update_train_iters -------------------------------------------------------

    def update_train_iters(self, args: Namespace) -> None:
        """The iterations of training by samples, until the data say where they continue."""
        args.train_iters = args.train_iters or num_iterations(args, self._sizes)

    # --- replaced: consume_seqlen_stats_in_iteration ----------------------------------------

    def consume_seqlen_stats_in_iteration(self) -> tuple[float | None, float | None]:
        """(Σ s, Σ s²) of the iteration's sequences, from the plan: equal on every rank."""
        return self._interval.last_sums

    # --- replaced: evaluate -----------------------------------------------------------------

    def evaluate(
        self,
        forward_step_func: Any,
        data_iterator: PlannedData,
        model: list[ModelContainer],
        process_non_loss_data_func: Any,
        config: Any,
        verbose: bool = False,
        non_loss_data_func: Any = None,
        eval_iters: int | None = None,
        pg_collection: Any = None,
        p2p_communicator: Any = None,
    ) -> tuple[LossDict, None, bool]:
        """Loss per unit of weight over ``eval_iters`` global batches, each time the same ones."""
        args = get_args()
        timers = get_timers()
        timers("evaluate", log_level=0).start(barrier=True)
        engine = model[0].engine
        model[0].eval()
        data_iterator.batches.sampler.reset()  # type: ignore[union-attr]
        loss_sum = weight_sum = 0.0
        with nullcontext() if self._trace is None else self._trace.evaluation():
            for _ in range(args.eval_iters if eval_iters is None else eval_iters):
                # For every batch, because the timeout applies to a single wait.
                self._guard.enter("evaluation", plan="")
                planned = data_iterator.next_batch()
                self._guard.enter("evaluation", plan=_named(planned))
                loss = engine.evaluate(
                    planned.plan.strategy, planned.share.micro_batches, forward_step_func
                )
                loss_sum += loss.loss_sum
                weight_sum += loss.weight_sum
                args.consumed_valid_samples += planned.batch.num_sequences
        model[0].train()
        timers("evaluate").stop()
        timers.log(["evaluate"])
        mean = loss_sum / weight_sum if weight_sum else math.nan
        return {"lm loss": torch.tensor(mean)}, None, False

    # --- replaced: training_log, print_rank_last --------------------------------------------

    def around_training_log(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """Upstream's log of one iteration, corrected for a token budget and packing."""
        set_moe_metrics_tracker(_NoMoEMetrics())

        def log(*positional: Any, is_first_iteration: bool = False, **named: Any) -> Any:
            args = get_args()
            iteration = positional[3]
            ends_interval = iteration % args.log_interval == 0
            # Upstream keeps the first loss in its running mean, so that a second line after a
            # start would show the mean of two; with a full interval there is nothing to keep.
            is_first_iteration = is_first_iteration and not ends_interval
            # Upstream divides one iteration's operations by the mean time since the last line.
            tokens, squares = self._interval.mean_sums
            losses, totals = positional[:2]
            was_skipped = bool(positional[6])
            for name, loss in () if was_skipped else losses.items():
                # Upstream's sums would be on the device, for which the host waits at each line.
                if name not in totals or totals[name].device != loss.device:
                    totals[name] = torch.zeros_like(loss)
            named |= {
                "total_real_tokens_in_batch": tokens,
                "seqlen_squared_sum_in_batch": squares,
            }
            nominal = args.data_parallel_size
            if self._num_sequences and self._sizes.number_varies:
                # batch size = micro batch (1) x this x micro-batches of the nominal batch (1)
                args.data_parallel_size = self._num_sequences
            self._is_logging = True
            try:
                with self._guard.noting():
                    return training_log(*positional, is_first_iteration=is_first_iteration, **named)
            finally:
                self._is_logging = False
                args.data_parallel_size = nominal
                if ends_interval:
                    self._interval.clear()

        return log

    def around_print_rank_last(self, print_rank_last: Callable[[str], None]) -> Callable[..., None]:
        """Prints upstream's line with our fields behind it, or ours instead (--console compact).

        Like upstream's loss and time, they are means since the last line that ended an interval.
        """

        def print_line(message: str) -> None:
            is_line = self._is_logging and " elapsed time per iteration (ms):" in message
            record = self._interval.mean_record if is_line else None
            if record is not None:
                num_iters = get_args().train_iters
                eta_s = self._eta.remaining_s(num_iters - record.iteration)
                if self._is_compact:
                    message = compact_line(record, num_iters, eta_s)
                else:
                    message = message.replace(_NO_THROUGHPUT, "") + iteration_suffix(record, eta_s)
            print_rank_last(message)

        return print_line

    def _schedule_steps(self, args: Namespace, batch: GlobalBatch) -> float:
        """The iteration, or the samples, by which a batch advances the learning-rate schedule."""
        by_samples = args.train_samples is not None
        if counts_iterations(number_varies=self._sizes.number_varies, by_samples=by_samples):
            return 1
        return self._sizes.num_consumed(batch) / sample_tokens(args, self._sizes)

    def _set_end(self, args: Namespace, data: PlannedData) -> None:
        """Tell upstream's loop the last iteration of training by samples.

        It follows from what was consumed, perhaps in batches of another size before a restart.
        Under a token budget it is the earliest possible one, which rises as batches are not full.
        """
        if args.train_samples is None:
            return
        batches = data.batches
        num_consumed = batches.state[f"num_{self._sizes.unit}"]
        args.train_iters = batches.iteration + num_iterations(args, self._sizes, num_consumed)

    def _check_consumed(self, args: Namespace) -> None:
        """Raise HydraulisError unless upstream has counted as many samples as the plans hold."""
        if self._num_consumed is not None and args.consumed_train_samples != self._num_consumed:
            raise HydraulisError(
                f"upstream's loop has counted {args.consumed_train_samples} consumed samples but "
                f"the plans hold {self._num_consumed}; the learning rate and a restart would be "
                "off: report this together with the flags of the run"
            )

    def _next(self, number: int, data: PlannedData) -> RankBatch:
        with self._guard.phase("planning"):
            if self._trace is None:
                planned = data.next_batch()
            else:
                self._trace.expect(number)
                handle = self._trace.spans.begin("planning wait")
                planned = data.next_batch()
                self._trace.spans.end(handle)
        self._guard.enter("gather", plan=_named(planned))
        return planned

    def _record(
        self,
        args: Namespace,
        number: int,
        planned: RankBatch,
        outcome: StepOutcome,
        optimizer: ShardedAdamW,
        iteration_time_s: float,
    ) -> None:
        plan = planned.plan
        status = plan_status(plan)
        counters = self._checkpoints.counters
        counters.num_marked_plans += is_marked(status)
        record = IterationRecord(
            iteration=number,
            lm_loss=outcome.loss.mean if outcome.loss.weight_sum else None,
            grad_norm=outcome.gradient_norm,
            learning_rate=optimizer.param_groups[0]["lr"],
            num_sequences=planned.batch.num_sequences,
            num_tokens=planned.batch.num_tokens,
            trained_tokens=outcome.loss.trained_tokens,
            strategy=plan.strategy,
            iteration_time_s=iteration_time_s,
            predicted_time_s=plan.predicted_time_s,
            padding_fraction=planned.padding_fraction,
            imbalance=plan.imbalance,
            # Upstream adds the nominal batch right after the step.
            consumed_samples=args.consumed_train_samples + args.global_batch_size,
            plan_time_s=plan.plan_time_s,
            plan_wait_s=planned.plan_wait_s,
            plan_fetch_s=planned.plan_fetch_s,
            replica_times_s=plan.replica_times_s,
            plan_status=status,
            plan_gap=None if plan.dispatch is None else plan.dispatch.gap,
            num_marked_plans=counters.num_marked_plans,
            regroup_bytes=outcome.regroup_bytes,
            skipped_bytes=outcome.skipped_bytes,
            gather_wait_s=outcome.gather_wait_s,
            scatter_wait_s=outcome.scatter_wait_s,
            column_bytes=outcome.column_bytes,
            column_wait_s=outcome.column_wait_s,
            model_flops=(
                None
                if args.hybrid_layer_pattern
                else self._frozen.causal_flops(self._shape, planned.batch.lengths)
            ),
            strategy_times_s={
                one.name: {"bound_s": one.bound_s, "found_s": one.found_s}
                for one in plan.strategy_times_s
            },
            mtp_losses=outcome.prediction_losses if outcome.updated else (),
            **(_routing_fields(outcome) | allocator_peaks()),
        )
        self._num_sequences = record.num_sequences
        self._interval.add(record, planned.batch.lengths)
        self._eta.observe(iteration_time_s)
        if self._metrics is not None:
            self._metrics.write(record)
        writer = get_tensorboard_writer()
        if writer is not None and number % args.tensorboard_log_interval == 0:
            writer.add_scalar("tokens", record.num_tokens, number)
            writer.add_scalar("trained-tokens", record.trained_tokens, number)
            writer.add_scalar("padding-fraction", record.padding_fraction, number)
            writer.add_scalar("imbalance", record.imbalance, number)
            if record.expert_load is not None:
                writer.add_scalar("expert-load", record.expert_load, number)


class _NoMoEMetrics(MoEMetricsTracker):
    """Reports nothing: upstream's routers would fill it, ours leave zeros; see `_losses`."""

    def report(self, *arguments: Any, **named: Any) -> str:
        """Adds nothing to upstream's line."""
        return ""


def _losses(outcome: StepOutcome) -> Iterator[tuple[str, float]]:
    """Losses of upstream's log line and TensorBoard, by upstream's names."""
    if outcome.loss.weight_sum:
        yield "lm loss", outcome.loss.mean
        for number, loss in enumerate(outcome.prediction_losses, 1):
            yield f"mtp_{number} loss", loss
    routing = outcome.routing
    if routing is not None and routing.balancing_loss is not None:
        yield "load_balancing_loss", routing.balancing_loss
    if routing is not None and routing.z_loss is not None:
        yield "z_loss", routing.z_loss


def _routing_fields(outcome: StepOutcome) -> dict[str, Any]:
    """Fields of a record."""
    routing = outcome.routing
    if routing is None:
        return {}
    return {
        "expert_load": routing.worst_load,
        "balancing_loss": routing.balancing_loss,
        "router_z_loss": routing.z_loss,
        "router_bias_range": routing.bias_range,
    }


def _named(planned: RankBatch) -> str:
    """The plan's name in errors and for the hang guard."""
    return f"strategy '{planned.plan.strategy}', plan {planned.digest[:12]}"


@contextmanager
def _upstreams_timer(phase: str) -> Iterator[None]:
    """An engine's `Phase`: adds its time to the timer that upstream's log names."""
    timer = get_timers()(TIMER_OF_PHASE[phase], log_level=1)
    timer.start(barrier=get_args().barrier_with_L1_time)
    yield
    timer.stop()


class LogInterval:
    """The iterations between two lines of the log: with ``--log-interval`` n, n iterations."""

    def __init__(self, window: AttentionWindow | None = None) -> None:
        self._window = window
        self._records: list[IterationRecord] = []
        self._sums: list[tuple[float, float]] = []

    def add(self, record: IterationRecord, lengths: tuple[int, ...]) -> None:
        """Add an iteration and the lengths of its sequences, in tokens."""
        self._records.append(record)
        window = self._window
        squares = sum(n * n if window is None else window.squared(n) for n in lengths)
        self._sums.append((float(sum(lengths)), float(squares)))

    def clear(self) -> None:
        self._records.clear()
        self._sums.clear()

    @property
    def last_sums(self) -> tuple[float, float] | tuple[None, None]:
        """(Σ s, Σ s²) of the last iteration."""
        return self._sums[-1] if self._sums else (None, None)

    @property
    def mean_sums(self) -> tuple[float, float] | tuple[None, None]:
        """Means of (Σ s, Σ s²): upstream divides by the mean time of an iteration."""
        if not self._sums:
            return None, None
        tokens, squares = zip(*self._sums, strict=True)
        return statistics.fmean(tokens), statistics.fmean(squares)

    @property
    def mean_record(self) -> IterationRecord | None:
        """The last iteration's record with means for what a line shows of a batch and its plan."""
        if not self._records:
            return None
        num_tokens = sum(record.num_tokens for record in self._records)
        num_padding = sum(record.num_padding for record in self._records)
        num_all = num_tokens + num_padding
        losses = [record.lm_loss for record in self._records if record.lm_loss is not None]
        means = {
            name: statistics.fmean(getattr(record, name) for record in self._records)
            for name in AVERAGED
        }
        peaks = {
            name: max(found, default=None)
            for name in PEAKS
            if (found := [n for r in self._records if (n := getattr(r, name)) is not None])
        }
        return dataclasses.replace(
            self._records[-1],
            strategy=self._strategies,
            num_tokens=round(num_tokens / len(self._records)),
            trained_tokens=round(statistics.fmean(r.trained_tokens for r in self._records)),
            lm_loss=statistics.fmean(losses) if losses else None,
            padding_fraction=num_padding / num_all if num_all else 0.0,
            **means,  # type: ignore[arg-type]
            **peaks,  # type: ignore[arg-type]
        )

    @property
    def _strategies(self) -> str:
        """The strategy, or each with the iterations that it ran."""
        counts = Counter(record.strategy for record in self._records)
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{name} ({count})" for name, count in counts.most_common())


def count_skipped(
    iteration: int,
    planned: RankBatch,
    outcome: StepOutcome,
    corpus: Corpus,
    counters: LoopCounters,
    *,
    num_allowed: int,
) -> None:
    """Count an iteration that updated nothing, as the engine has then done on no rank: parameters,
    moments and learning rate are those of the iteration before.

    Either it had no token with a weight, of which many in a row are a warning, or its loss or
    gradient norm is not finite. Collective in the latter case.

    Args:
        num_allowed: iterations in a row that may be skipped; 0 stops at the first.

    Raises:
        NonFiniteLossError: it is one more in a row than allowed; names the sequences.
    """
    if not outcome.loss.weight_sum:
        counters.num_untrained_in_a_row += 1
        if counters.num_untrained_in_a_row % UNTRAINED_UNTIL_WARNING == 0 and dist.get_rank() == 0:
            print(
                f"warning: iterations {iteration + 1 - counters.num_untrained_in_a_row} to "
                f"{iteration} trained no token, as the weights of all their tokens are 0; look at "
                f"{listed([weights_path(prefix) for prefix in corpus.prefixes])}",
                flush=True,
            )
        return
    counters.num_untrained_in_a_row = 0
    if outcome.updated:
        counters.num_skipped_in_a_row = 0
        return
    counters.num_skipped += 1
    counters.num_skipped_in_a_row += 1
    in_a_row = counters.num_skipped_in_a_row
    what, sequences = _cause(planned, outcome, corpus)
    if in_a_row > num_allowed:
        before = (
            f"; it is iteration {in_a_row} in a row and --max-skipped-in-a-row is {num_allowed}"
            if num_allowed
            else ""
        )
        fix = "" if num_allowed else "; --skip-nan-iterations skips such updates"
        raise NonFiniteLossError(
            f"iteration {iteration}: {what}, {sequences}{before}; lower --lr or look at these "
            f"sequences{fix}"
        )
    if dist.get_rank() == 0:
        print(
            f"warning: iteration {iteration} is skipped: {what}, {sequences} "
            f"({in_a_row} in a row, of at most {num_allowed}; {counters.num_skipped} in all)",
            flush=True,
        )


def _cause(planned: RankBatch, outcome: StepOutcome, corpus: Corpus) -> tuple[str, str]:
    """Collective: what is not finite, and in which sequences of any rank."""
    own = [
        planned.batch.sequence_ids[place]
        for index in outcome.bad_micro_batches
        for place in planned.share.places[index]
    ]
    bad = sorted({sequence_id for ids in of_all_ranks(own) for sequence_id in ids})
    if outcome.loss.is_finite:
        what = f"the gradient norm is {outcome.gradient_norm}"
        bad = sorted(planned.batch.sequence_ids)
        where = "the loss is finite, so any sequence of the batch may be the cause: "
    else:
        what = f"the loss is {outcome.loss.loss_sum}"
        where = "in micro-batches with sequences "
    named = listed(
        bad,
        most=MAX_SEQUENCES_NAMED,
        text=lambda sequence_id: f"{sequence_id} ({corpus.describe(sequence_id)})",
    )
    return what, f"{where}{named}"
