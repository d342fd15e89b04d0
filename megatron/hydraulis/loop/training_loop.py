"""The names of upstream's loop that are replaced, as methods of one object."""

from __future__ import annotations

import math
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.loop.batch_reader import PlannedBatch, PlannedData
from megatron.hydraulis.loop.checkpointing import RunCheckpoints
from megatron.hydraulis.loop.hang_guard import HangGuard
from megatron.hydraulis.loop.log_interval import LogInterval
from megatron.hydraulis.loop.memory_safety import MemorySafety
from megatron.hydraulis.loop.model_container import ModelContainer
from megatron.hydraulis.loop.non_finite import NonFiniteIterations
from megatron.hydraulis.loop.refitting import RunRefit
from megatron.hydraulis.loop.tracing import RunTrace
from megatron.hydraulis.observability.console import EtaEstimator, iteration_suffix
from megatron.hydraulis.observability.records import IterationRecord, MetricsWriter
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.planner.plan import IterationPlan, is_marked, plan_status
from megatron.hydraulis.runtime.memory import allocator_peaks
from megatron.hydraulis.runtime.outcome import StepOutcome
from megatron.hydraulis.runtime.process_groups import to_device

LossDict = dict[str, torch.Tensor]
Iterators = tuple[PlannedData | None, PlannedData | None, PlannedData | None]

TIMER_OF_PHASE = {
    "gather": "params-all-gather",
    "forward-backward": "forward-backward",
    "scatter": "all-grads-sync",
    "optimizer": "optimizer",
}
"""Upstream's log prints timers of a fixed list of names: these fit best."""

_BATCH_SIZE = re.compile(r" global batch size: +\d+ \|")


class TrainingLoop:
    """Train step, evaluation, data and log line of one run.

    Args:
        hydraulis: our flags.
        make_iterators: builds training, validation and test data once the loop asks for them.
        metrics: where records go; None on ranks that do not log.
        trace: of this rank; None where nothing is traced.
        refit: of the cost profile; None where it is not asked for.
        checkpoints: of the run.
        memory: limits of the run as memory allows them.
        guard: is told where this rank is.
    """

    def __init__(
        self,
        hydraulis: HydraulisConfig,
        make_iterators: Callable[[], Iterators],
        metrics: MetricsWriter | None,
        trace: RunTrace | None = None,
        refit: RunRefit | None = None,
        *,
        checkpoints: RunCheckpoints,
        memory: MemorySafety,
        guard: HangGuard,
    ) -> None:
        self._guard = guard
        self._memory = memory
        self._checkpoints = checkpoints
        self._non_finite = NonFiniteIterations(
            hydraulis.max_skipped_in_a_row if hydraulis.skip_nan_iterations else 0,
            checkpoints.counters,
        )
        self._refit = refit
        self._trace = trace
        self._hydraulis = hydraulis
        self._make_iterators = make_iterators
        self._metrics = metrics
        self._eta: EtaEstimator | None = None
        self._interval = LogInterval()
        self._num_sequences = 0
        """Of the last global batch."""
        self._num_consumed: int | None = None
        """Sequences after the last step, by the plans."""
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
        args.do_train = train is not None and args.train_iters > 0
        args.do_valid = valid is not None and args.eval_iters > 0
        args.do_test = test is not None and args.eval_iters > 0
        self._eta = EtaEstimator(args.train_iters)
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
        self._checkpoints.poll()
        self._check_consumed(args)
        start_s = time.perf_counter()
        planned = self._next(number, data_iterator)
        if self._refit is not None:
            self._refit.begin()
        phase = self._guard.around(_upstreams_timer)
        while True:
            with self._traced(number, planned), self._memory.explained():
                gradients = engine.compute_gradients(
                    planned.plan.strategy, planned.micro_batches, forward_step_func, phase=phase
                )
                # By now the planner has had the time of the backward passes.
                is_last = number >= args.train_iters
                next_strategy = None if is_last else data_iterator.publish_ready()
                outcome = engine.update(gradients, next_strategy=next_strategy, phase=phase)
            if not outcome.num_ranks_without_memory:
                break
            self._memory.lower_after(number, outcome)
            if self._refit is not None:
                self._refit.spans.take()
            planned = self._next(number, data_iterator)
        self._non_finite.note(number, planned, outcome, data_iterator.reader.corpus)
        if outcome.updated:
            # Nominal under a token budget, so that the schedule counts iterations.
            opt_param_scheduler.step(increment=args.global_batch_size)
        self._num_consumed = args.consumed_train_samples + planned.batch.num_sequences
        # Upstream is about to count a full nominal batch.
        args.consumed_train_samples += planned.batch.num_sequences - args.global_batch_size
        iteration_time_s = time.perf_counter() - start_s
        self._note(args, number, planned, outcome, optimizer, iteration_time_s)
        if self._refit is not None:
            self._refit.end(number, planned, iteration_time_s, data_iterator.feed)
        loss = to_device(torch.tensor([outcome.loss.mean], dtype=torch.float32), engine.device)
        losses = {"lm loss": loss} if outcome.loss.num_tokens else {}
        skipped = 0 if outcome.updated else 1
        return losses, skipped, False, False, 0, outcome.gradient_norm, None, None

    # --- replaced: save_checkpoint, load_checkpoint -----------------------------------------

    @property
    def save_checkpoint(self) -> Callable[..., None]:
        """Ours, with upstream's parameters."""
        return self._guarded("save", self._checkpoints.save_checkpoint)

    @property
    def load_checkpoint(self) -> Callable[..., tuple[int, float]]:
        """Ours, with upstream's parameters."""
        return self._guarded("load", self._checkpoints.load_checkpoint)

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
        """Loss per token over ``eval_iters`` global batches, each time the same ones."""
        args = get_args()
        timers = get_timers()
        timers("evaluate", log_level=0).start(barrier=True)
        engine = model[0].engine
        model[0].eval()
        data_iterator.reader.batches.sampler.reset()  # type: ignore[union-attr]
        loss_sum, num_tokens = 0.0, 0
        with nullcontext() if self._trace is None else self._trace.evaluation():
            for _ in range(args.eval_iters if eval_iters is None else eval_iters):
                # Anew for every batch: the timeout is that of one wait, not of them all.
                self._guard.enter("evaluation", plan="")
                planned = data_iterator.next_batch()
                self._guard.enter("evaluation", plan=_named(planned.plan))
                loss = engine.evaluate(
                    planned.plan.strategy, planned.micro_batches, forward_step_func
                )
                loss_sum += loss.loss_sum
                num_tokens += loss.num_tokens
                args.consumed_valid_samples += planned.batch.num_sequences
        model[0].train()
        timers("evaluate").stop()
        timers.log(["evaluate"])
        mean = loss_sum / num_tokens if num_tokens else math.nan
        return {"lm loss": torch.tensor(mean, device=engine.device)}, None, False

    # --- replaced: training_log, print_rank_last --------------------------------------------

    def around_training_log(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """Upstream's log of one iteration, told what a token budget and packing change."""

        def log(*positional: Any, is_first_iteration: bool = False, **named: Any) -> Any:
            args = get_args()
            iteration = positional[3]
            ends_interval = iteration % args.log_interval == 0
            # Upstream keeps the first loss in its running mean, so that a second line after a
            # start would show the mean of two; with a full interval there is nothing to keep.
            is_first_iteration = is_first_iteration and not ends_interval
            # Upstream divides one iteration's operations by the mean time since the last line.
            tokens, squares = self._interval.mean_sums
            named |= {
                "total_real_tokens_in_batch": tokens,
                "seqlen_squared_sum_in_batch": squares,
            }
            nominal = args.data_parallel_size
            if self._num_sequences and self._hydraulis.global_batch_tokens is not None:
                # batch size = micro batch (1) x this x micro-batches of the nominal batch (1)
                args.data_parallel_size = self._num_sequences
            self._is_logging = True
            try:
                return training_log(*positional, is_first_iteration=is_first_iteration, **named)
            finally:
                self._is_logging = False
                args.data_parallel_size = nominal
                if ends_interval:
                    self._interval.clear()

        return log

    def around_print_rank_last(self, print_rank_last: Callable[[str], None]) -> Callable[..., None]:
        """Appends our fields and the time left to upstream's line.

        As upstream's loss and time, what the line tells of batches and plans is the mean since the
        last line that ended an interval.
        """

        def print_with_suffix(message: str) -> None:
            is_line = self._is_logging and " elapsed time per iteration (ms):" in message
            record = self._interval.mean_record if is_line else None
            if record is not None and self._eta is not None:
                message = _BATCH_SIZE.sub(
                    f" global batch size: {record.num_sequences:5d} |", message, count=1
                )
                message += iteration_suffix(record, self._eta.remaining_s(record.iteration))
            print_rank_last(message)

        return print_with_suffix

    def _check_consumed(self, args: Namespace) -> None:
        """Upstream's loop counts samples by a nominal batch: it must have come to ours."""
        if self._num_consumed is not None and args.consumed_train_samples != self._num_consumed:
            raise HydraulisError(
                f"upstream's loop has counted {args.consumed_train_samples} consumed samples but "
                f"the plans hold {self._num_consumed}; the learning rate and a restart would be "
                "off: report this together with the flags of the run"
            )

    def _guarded(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its signature, as a phase."""

        @wraps(function)
        def guarded(*positional: Any, **named: Any) -> Any:
            with self._guard.phase(phase):
                return function(*positional, **named)

        return guarded

    def _next(self, number: int, data: PlannedData) -> PlannedBatch:
        with self._guard.phase("planning"):
            if self._trace is None:
                planned = data.next_batch()
            else:
                self._trace.expect(number)
                handle = self._trace.spans.begin("planning wait")
                planned = data.next_batch()
                self._trace.spans.end(handle)
        self._guard.enter("gather", plan=_named(planned.plan))
        return planned

    def _traced(self, number: int, planned: PlannedBatch) -> AbstractContextManager[None]:
        return nullcontext() if self._trace is None else self._trace.iteration(number, planned.plan)

    def _note(
        self,
        args: Namespace,
        number: int,
        planned: PlannedBatch,
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
            lm_loss=outcome.loss.mean if outcome.loss.num_tokens else None,
            grad_norm=outcome.gradient_norm,
            learning_rate=optimizer.param_groups[0]["lr"],
            num_sequences=planned.batch.num_sequences,
            num_tokens=planned.batch.num_tokens,
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
            replica_times_s=tuple(replica.predicted_time_s for replica in plan.replicas),
            plan_status=status,
            plan_gap=None if plan.dispatch is None else plan.dispatch.gap,
            num_marked_plans=counters.num_marked_plans,
            regroup_bytes=outcome.regroup_bytes,
            gather_wait_s=outcome.gather_wait_s,
            scatter_wait_s=outcome.scatter_wait_s,
            **allocator_peaks(),
        )
        self._num_sequences = record.num_sequences
        self._interval.add(record, planned.batch.lengths)
        assert self._eta is not None
        self._eta.observe(iteration_time_s)
        if self._metrics is not None:
            self._metrics.write(record)
        writer = get_tensorboard_writer()
        if writer is not None and number % args.tensorboard_log_interval == 0:
            writer.add_scalar("tokens", record.num_tokens, number)
            writer.add_scalar("padding-fraction", record.padding_fraction, number)
            writer.add_scalar("imbalance", record.imbalance, number)


def _named(plan: IterationPlan) -> str:
    """As errors and the hang guard tell it."""
    return f"strategy '{plan.strategy}', plan {plan.digest[:12]}"


@contextmanager
def _upstreams_timer(phase: str) -> Iterator[None]:
    """An engine's `Phase`: adds its time to the timer that upstream's log names."""
    timer = get_timers()(TIMER_OF_PHASE[phase], log_level=1)
    timer.start(barrier=get_args().barrier_with_L1_time)
    yield
    timer.stop()
