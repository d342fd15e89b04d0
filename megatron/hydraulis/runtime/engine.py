"""The training engine: shards, role model and regrouping of one job, driven plan by plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError, HydraulisError, StrategyError
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings, ShardedAdamW
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.arena import ArenaMemory
from megatron.hydraulis.runtime.catalogue import (
    CataloguedParameter,
    catalogue,
    check_frozen,
    initialise_shards,
)
from megatron.hydraulis.runtime.columns import ColumnMeter
from megatron.hydraulis.runtime.contents import ArenaContents
from megatron.hydraulis.runtime.executor import ForwardStep, run_micro_batches, scale_balancing
from megatron.hydraulis.runtime.experts import RouterState, balances
from megatron.hydraulis.runtime.memory import (
    OutOfMemory,
    SharedOutOfMemoryError,
    is_out_of_memory,
    recover_from_oom,
    release_cached_memory,
)
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.runtime.outcome import LossTotal, Phase, StepOutcome, StepVote, untimed
from megatron.hydraulis.runtime.passes import GatherPass, PostFrom, ScatterPass, StallTimer
from megatron.hydraulis.runtime.predictions import PredictingGPTModel, begin_predictions
from megatron.hydraulis.runtime.process_groups import (
    GroupRegistry,
    device_of_job,
    provide_memory_buffer,
)
from megatron.hydraulis.runtime.spans import NO_SPANS, CudaStamp, HostStamp, SpanRecorder
from megatron.hydraulis.runtime.strategy_runtime import StrategyRuntime, StrategyRuntimes
from megatron.hydraulis.runtime.track import NUM_STAGING_SLOTS, Staging, make_track
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.ranges import best_owner_orders

PARAMETERS, OPTIMIZER = "parameters", "moments"
"""What `RuntimeEngine.offload` moves."""


@dataclass(frozen=True)
class LocalGradients:
    """This rank's record of a batch whose gradients are on the shards."""

    runtime: StrategyRuntime
    reports: list[dict[str, Tensor]]
    """The loss function's report of each micro-batch; on the last stage."""
    trained_tokens: int
    """Tokens with a weight above 0 in this rank's micro-batches."""
    regroup_bytes: int = 0
    """Bytes that this rank exchanges in its scatter, and in its gather if there was one."""
    skipped_bytes: int = 0
    """Bytes that its gather did not exchange, as arenas held frozen parameters."""
    out_of_memory: OutOfMemory | None = None
    """Reason why this rank has abandoned its micro-batches."""
    is_divided: bool = False
    """Whether the loss function has divided the loss."""
    prediction_sums: Tensor | None = None
    """(layers, 2) of this rank's rows, see `PredictingGPTModel`; None where there are none."""


class RuntimeEngine:
    """The state of a job that outlives an iteration, and the steps of an iteration.

    Construction and all methods that run the model are collective over all ranks. Idle ranks own
    shards and take part in regrouping.

    Args:
        pool: the strategies of the run. All groups are created here.
        settings: of the optimizer; None for an engine that can only run forward, whose parameters
            are as frozen ones.
        groups: an existing registry to share (tests); its groups are extended to the pool's.
        timeout: of collectives in the groups created here; the backend's default where None. The
            timeout of the world group does not apply to them.
        num_atoms: T, the atoms of a parameter; the least common multiple of the pool's tp degrees
            by default, a multiple of it where the shards must fit other pools too.
        owners_for: a strategy of the pool for which owners are chosen, so that ranks own what they
            hold in it (`transfer.ranges`); rank r owns share r where None. Fixed for the run:
            it determines where optimizer state is.
        gradient_dtype: in which gradients travel; None for that in which they are added up, fp32
            or with an fp64 model fp64.
        overlap: overlap regrouping with compute; the results are the same bit by bit.
        num_slots: staging slots: calls that a thread may rearrange at the same time.
        num_layers_ahead: layers whose weights are gathered ahead where columns share them.
        accumulates: whether several calls of `forward_backward` before an update are usual. The
            shards' gradients then have memory of their own; otherwise they are where the arena's
            gradients have been sent from, and a second call copies them.
        spans: records gathers, scatters, waits, and the work of the schedules.

    Raises:
        ConfigurationError: ``num_atoms`` is not a multiple of the pool's, or the model cannot be
            cut into so many atoms.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        pool: Pool,
        settings: AdamWSettings | None,
        *,
        seed: int,
        groups: GroupRegistry | None = None,
        timeout: timedelta | None = None,
        num_atoms: int | None = None,
        owners_for: str | None = None,
        gradient_dtype: torch.dtype | None = None,
        overlap: bool = True,
        num_slots: int = NUM_STAGING_SLOTS,
        num_layers_ahead: int = 1,
        accumulates: bool = False,
        spans: SpanRecorder = NO_SPANS,
    ) -> None:
        self.definition = definition
        self.pool = pool
        self.rank = dist.get_rank()
        self.device = device_of_job()
        self.dtype: torch.dtype = definition.transformer.params_dtype
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        num_atoms = pool.tp_lcm if num_atoms is None else num_atoms
        if num_atoms < 1 or num_atoms % pool.tp_lcm:
            raise ConfigurationError(
                f"num_atoms is {num_atoms} but the tp degrees of the pool have the least common "
                f"multiple {pool.tp_lcm}; give a multiple of {pool.tp_lcm}"
            )
        provide_memory_buffer()
        self._owns_groups = groups is None
        if groups is None:
            groups = GroupRegistry(pool.strategies, timeout=timeout)
        else:
            for strategy in pool.strategies:
                groups.add_strategy(strategy)
        self.groups = groups
        entries: list[CataloguedParameter] = catalogue(
            definition, tensor_parallel=pool.tp_lcm > 1, expert_parallel=pool.ep_lcm > 1
        )
        specs = [entry.spec for entry in entries]
        if settings is None:
            specs = [replace(spec, unit=spec.unit.frozen) for spec in specs]
        check_frozen(specs, trains=settings is not None)
        self.layout = CanonicalLayout.build(specs, num_atoms=num_atoms, num_ranks=pool.num_ranks)
        if owners_for is not None:
            orders = best_owner_orders(self.layout, definition.roles_of(pool.strategy(owners_for)))
            self.layout = self.layout.with_owner_orders(orders)
        self.shards = CanonicalShards(
            self.layout,
            self.rank,
            dtype=self.dtype if settings is None else wide,
            frozen_dtype=self.dtype,
            device=self.device,
            has_gradients=settings is not None and accumulates,
        )
        initialise_shards(self.shards, entries, seed, dtype=wide)
        self._optimizer = None if settings is None else ShardedAdamW(self.shards, settings)
        self.memory = ArenaMemory(dtype=self.dtype, grad_dtype=wide, device=self.device)
        self.staging = Staging(self.device, num_slots)
        self._overlap = overlap
        self._accumulates = accumulates
        self._balances = balances(definition.transformer)
        self.routers: RouterState | None = None
        """Biases of routers; None without experts."""
        if definition.transformer.num_moe_experts is not None:
            self.routers = RouterState(definition.transformer, self.device)
        self._spans = spans
        self._track = make_track(self.device, self.staging, spans)
        self._column_track = make_track(self.device, Staging(self.device, 1), spans)
        stamp = CudaStamp if self.device.type == "cuda" else HostStamp
        self.gather_timer = StallTimer("gather wait", spans, stamp)
        self.scatter_timer = StallTimer("scatter wait", spans, stamp)
        self._column_meter = ColumnMeter(spans, stamp)
        self._runtimes = StrategyRuntimes(
            definition,
            pool,
            groups,
            self.layout,
            self.shards,
            self.memory,
            gradient_dtype or wide,
            self.routers,
            self._column_track,
            num_layers_ahead,
            self._column_meter,
        )
        self.num_changes = 0
        """Number of times that parameters have changed."""
        self._contents = ArenaContents(
            self.shards,
            self.memory,
            self._runtimes,
            self._track,
            self.gather_timer,
            overlap=overlap,
            accumulates=accumulates,
        )
        self._accumulated: list[LocalGradients] = []
        """The batches whose gradients the next update sums."""
        self._offloaded: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """By what is on the host: tensors without memory, and their contents."""

    @property
    def has_optimizer(self) -> bool:
        """True if it can train."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> ShardedAdamW:
        """See `require_optimizer`."""
        return self.require_optimizer()

    def require_optimizer(self) -> ShardedAdamW:
        """The optimizer. Raises ConfigurationError for an engine that was made without one."""
        if self._optimizer is None:
            raise ConfigurationError(
                "training and saving need an optimizer but the engine was made with optimizer=None "
                "and holds parameters alone; give AdamWSettings(lr=…)"
            )
        return self._optimizer

    def runtime_of(self, strategy_name: str) -> StrategyRuntime:
        """Role model, arena and routes of a strategy on this rank, built at first use."""
        return self._runtimes.of(strategy_name)

    def train_step(
        self,
        strategy_name: str,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        *,
        next_strategy: str | None = None,
        phase: Phase = untimed,
    ) -> StepOutcome:
        """`forward_backward`, then `optim_step`."""
        self.forward_backward(strategy_name, batches, forward_step, phase=phase)
        return self.optim_step(next_strategy=next_strategy, phase=phase)

    def forward_backward(
        self,
        strategy_name: str,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        *,
        is_divided: bool = False,
        phase: Phase = untimed,
    ) -> None:
        """Gather, run, scatter: adds the gradient of Σ weight · loss to the canonical shards.

        Each call between two calls of `optim_step` may have another strategy. Routers that balance
        experts allow one call: their losses enter by the sum of its weights over its tokens, so
        that after the division they are means over the tokens, whatever these weigh.

        Args:
            strategy_name: of the pool; the same on every rank.
            batches: micro-batches of this rank's replica, its own part of each where it has
                cp > 1, on the job's device; empty where idle.
            is_divided: whether the losses of ``forward_step`` are divided already.

        Raises:
            ConfigurationError: a second call, or divided losses, where routers balance experts.
            ConfigurationError: there is no optimizer.
            OutOfMemoryError: memory ran out on a replica of several ranks.
        """
        self.require_optimizer()
        if self._balances and (self._accumulated or is_divided):
            raise ConfigurationError(
                f"losses that balance experts are divided with those of all tokens of one call of "
                f"forward_backward but this is call {len(self._accumulated) + 1} since the last "
                f"update{', with a divisor or of batch_loss' if is_divided else ''}; give all "
                "sequences to one call, without a divisor"
            )
        if not self._accumulated:
            self.gather_timer.forget()
            self.scatter_timer.forget()
            self._column_meter.forget()
            if self.routers is not None:
                self.routers.forget()
            if self._accumulates and not self.shards.gradients.numel():  # after an offload
                self.shards.gradients = torch.empty_like(self.shards.parameters)
        self.gather(strategy_name, phase=phase)
        runtime = self.runtime_of(strategy_name)
        out_of_memory: OutOfMemory | None = None
        with self._in_phase("forward-backward", strategy_name, phase):
            self._contents.size_gradients(runtime, adds=bool(self._accumulated))
            if runtime.arena is not None:
                runtime.arena.zero_gradients()
            scatter = self._scatter_pass(runtime)
            if self._balances:
                scale_balancing(runtime.model, batches, self.device)
            if self.definition.num_predictions:
                begin_predictions(runtime.model, batches, self.definition.transformer, self.device)
            num_begun = 0

            def counted(data_iterator: Iterator[PackedBatch], model: torch.nn.Module) -> Any:
                nonlocal num_begun
                num_begun += 1
                return forward_step(data_iterator, model)

            try:
                reports = self._run(runtime, batches, counted, scatter)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reports = []
                out_of_memory = recover_from_oom(
                    error, self.rank, runtime.strategy, batches, num_begun
                )
            if out_of_memory is not None:
                release_cached_memory()  # now that the error, which held activations, is gone
        with self._in_phase("scatter", strategy_name, phase):
            scatter.finish()
            self.finish_regrouping()
        assert self._contents.current is not None
        gathered_bytes, skipped_bytes = self._contents.current[1].take_bytes()
        traffic = runtime.regrouper.traffic
        self._accumulated.append(
            LocalGradients(
                runtime,
                reports,
                _trained_tokens(batches),
                gathered_bytes + traffic.scatter_received_bytes + traffic.scatter_sent_bytes,
                skipped_bytes,
                out_of_memory,
                is_divided,
                _prediction_sums(runtime),
            )
        )

    def optim_step(
        self,
        *,
        divisor: float | None = None,
        next_strategy: str | None = None,
        phase: Phase = untimed,
    ) -> StepOutcome:
        """Update parameters by the gradients of all ranks and calls since the last update.

        Args:
            divisor: of the summed gradients; None for the sum of the weights of all calls, or 1
                where their losses are divided already.
            next_strategy: of the next iteration; None where it is not known. Each bucket is
                gathered for it as soon as it is updated. Only rank 0's counts.

        Returns:
            The outcome. An iteration whose tokens have no weight, whose loss is not finite, whose
            gradient norm is NaN or beyond the range of the gradients' dtype, or during which memory
            ran out on a replica of one rank, updates nothing: whether the run stops there is the
            caller's choice.

        Raises:
            ConfigurationError: there was no call, or what divides is unclear.
        """
        self.require_onloaded(optimizer=True)
        divides = self.check_divisor(divisor)
        calls, self._accumulated = self._accumulated, []
        vote, bad = self._vote(calls, next_strategy, updates=True)
        loss = vote.loss
        norm, updated, routing = None, False, None
        if loss.weight_sum > 0 and loss.is_finite and not vote.num_ranks_without_memory:
            divides = loss.weight_sum if divides is None else divides
            norm = math.sqrt(vote.squared_norm) / divides
            # Gradients are divided only now: no element of a norm within their range overflows.
            updated = norm <= torch.finfo(self.shards.gradients.dtype).max
            if updated:
                with self._in_phase("optimizer", calls[-1].runtime.strategy.name, phase):
                    self.optimizer.divide_gradients(divides)
                    routing = None if self.routers is None else self.routers.accept(vote.routing)
                    self._update_shards(norm, vote.next_strategy)
        return StepOutcome(
            loss,
            norm,
            updated,
            bad,
            regroup_bytes=sum(call.regroup_bytes for call in calls),
            skipped_bytes=sum(call.skipped_bytes for call in calls),
            gather_wait_s=self.gather_timer.take_s(),
            scatter_wait_s=self.scatter_timer.take_s(),
            column_bytes=self._column_meter.num_bytes,
            column_wait_s=self._column_meter.take_s(),
            num_ranks_without_memory=vote.num_ranks_without_memory,
            out_of_memory=_out_of_memory(calls),
            routing=routing,
            prediction_losses=tuple(
                total / weight if weight else 0.0 for total, weight in vote.predictions.tolist()
            ),
        )

    def discard_gradients(self) -> None:
        """Forget all calls of `forward_backward` since the last update, if any. Collective.

        Raises:
            SharedOutOfMemoryError: on every rank, where memory ran out on replicas of one rank.
        """
        calls, self._accumulated = self._accumulated, []
        if not calls:
            return
        vote, _ = self._vote(calls)
        if vote.num_ranks_without_memory:
            raise SharedOutOfMemoryError(_out_of_memory(calls), vote.num_ranks_without_memory)

    def loss_of_last(self, num_calls: int) -> LossTotal:
        """Collective: loss of the last calls of `forward_backward`, before any division."""
        return self._vote(self._accumulated[-num_calls:])[0].loss

    def abandon_gradients(self) -> None:
        """`discard_gradients` after an error: not collective, as other ranks may have failed."""
        self._accumulated.clear()

    def rehearse_update(self) -> None:
        """An update without its last step, which works in place. Raises as `discard_gradients`."""
        self.discard_gradients()
        self.optimizer.divide_gradients(1)
        self.optimizer.squared_norm()

    def evaluate(
        self, strategy_name: str, batches: Sequence[PackedBatch], forward_step: ForwardStep
    ) -> LossTotal:
        """Loss of a global batch, without gradients."""
        reports = self.forward(strategy_name, batches, forward_step)
        runtime = self.runtime_of(strategy_name)
        call = LocalGradients(runtime, reports, _trained_tokens(batches))
        return self._vote([call])[0].loss

    def forward(
        self, strategy_name: str, batches: Sequence[PackedBatch], forward_step: ForwardStep
    ) -> list[dict[str, Tensor]]:
        """Returns ``forward_step``'s reports by micro-batch, on the last stage; no gradients."""
        self.gather(strategy_name)
        runtime = self.runtime_of(strategy_name)
        with self._in_phase("evaluation", strategy_name, untimed), torch.no_grad():
            reports = self._run(runtime, batches, forward_step, None)
            self.finish_regrouping()
        return reports

    def gather(self, strategy_name: str, *, phase: Phase = untimed) -> None:
        """Gather the current parameters for the strategy, unless this has been done.

        With overlap this returns at once, and the model's modules wait for their parameters.
        """
        self.require_onloaded()
        self._column_track.finish()  # micro-batches that failed may have left jobs
        current = self._contents.current
        if current is None or current[0] != strategy_name:
            with self._in_phase("gather", strategy_name, phase):
                self._begin_gather(strategy_name).post_rest()

    def parameters_changed(self) -> None:
        """Call on every rank after writing to the shards' parameters, such as from a checkpoint.

        Call `finish_regrouping` before writing, so that no gather reads them.
        """
        self.finish_regrouping()
        self._contents.current = None
        self._contents.lose_frozen()
        self.num_changes += 1

    def finish_regrouping(self) -> None:
        """Wait until nothing is on its way. Collective."""
        self._column_track.finish()
        if self._contents.current is not None:
            self._contents.current[1].finish()

    @property
    def offloaded(self) -> frozenset[str]:
        """What is on the host: "parameters", "moments"."""
        return frozenset(self._offloaded)

    def offload(self, *, parameters: bool = True, optimizer: bool = True) -> None:
        """Move to the host, until `onload`, what is not there.

        Args:
            parameters: the shards; arenas and gradients are freed.
            optimizer: its moments.

        Raises HydraulisError while there are gradients that no update has used, which an offload
        of parameters would lose.
        """
        if parameters and PARAMETERS not in self._offloaded:
            self.require_no_gradients("an offload")
            self.finish_regrouping()
            self._contents.current = None
            self._contents.free()
            self.shards.gradients = self.shards.gradients.new_empty(0)
            self._move_to_host(PARAMETERS, self.shards.parameters, self.shards.frozen)
        if optimizer and OPTIMIZER not in self._offloaded:
            moments = self._optimizer
            flats = () if moments is None else (moments.exp_avg, moments.exp_avg_sq)
            self._move_to_host(OPTIMIZER, *flats)
        release_cached_memory()  # for other programs on the device

    def _move_to_host(self, what: str, *flats: Tensor) -> None:
        kept = self._offloaded.setdefault(what, [])
        for flat in flats:
            kept.append((flat, flat.to("cpu", copy=True)))
            flat.untyped_storage().resize_(0)

    def onload(self, *, parameters: bool = True, optimizer: bool = True) -> None:
        """Move back what `offload` moved; all views are valid again."""
        for what, is_wanted in ((PARAMETERS, parameters), (OPTIMIZER, optimizer)):
            for flat, kept in self._offloaded.pop(what, []) if is_wanted else []:
                flat.untyped_storage().resize_(flat.numel() * flat.element_size())
                flat.copy_(kept)

    def require_onloaded(self, *, optimizer: bool = False) -> None:
        """Raise HydraulisError if parameters are on the host, or with ``optimizer`` its state."""
        needed = (PARAMETERS, OPTIMIZER) if optimizer else (PARAMETERS,)
        missing = [what for what in needed if what in self._offloaded]
        if missing:
            raise HydraulisError(
                f"{' and '.join(needed)} are used on the device but {' and '.join(missing)} are on "
                f"the host after offload; call onload first"
            )

    def require_no_gradients(self, loses: str) -> None:
        """Raise HydraulisError while there are gradients that no update has used.

        Args:
            loses: what would lose them, for the message.
        """
        if self._accumulated:
            raise HydraulisError(
                f"gradients of {len(self._accumulated)} calls of forward_backward wait for an "
                f"update, which {loses} would lose; call optim_step or discard_gradients first"
            )

    def close(self) -> None:
        """End regrouping, and destroy the process groups unless they are shared.

        Call it before the default process group is destroyed, and nothing afterwards.
        """
        self.finish_regrouping()
        self._track.close()
        self._column_track.close()
        self._runtimes.release()
        if self._owns_groups:
            self.groups.destroy()

    def set_training(self, training: bool) -> None:
        """Call `train()` or `eval()` on every model, including those built later."""
        self._runtimes.set_training(training)

    def _run(
        self,
        runtime: StrategyRuntime,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        scatter: ScatterPass | None,
    ) -> list[dict[str, Tensor]]:
        """Forward, and where there is a scatter backward, of all micro-batches of this rank."""
        if runtime.bound is None:
            if batches:
                raise StrategyError(
                    f"rank {self.rank} is idle in strategy '{runtime.strategy.name}' but was given "
                    f"{len(batches)} micro-batches; a plan gives work to replicas only"
                )
            return []
        if not batches:
            return []
        assert self._contents.current is not None
        grouped = [
            batch.in_group(
                self.groups.context_group(runtime.strategy, batch.context_size, batch.context_rank)
            )
            for batch in batches
        ]
        with runtime.bound.regrouping(self._contents.current[1], scatter):
            return run_micro_batches(
                runtime.bound.model,
                grouped,
                forward_step,
                forward_only=scatter is None,
                spans=self._spans,
            )

    def _update_shards(self, gradient_norm: float, next_strategy: int | None) -> None:
        """Update the shards, in the order in which the next strategy gathers them, if it is known,
        and gather its calls once their buckets are updated."""
        self.num_changes += 1
        upcoming = None
        if next_strategy is not None and self._overlap:
            upcoming = self._begin_gather(self.pool.strategies[next_strategy].name)
        else:
            self._contents.current = None
        span = self._spans.begin("optimizer")
        order = None if upcoming is None else upcoming.buckets
        for bucket in self.optimizer.step_by_bucket(gradient_norm, order):
            if upcoming is not None:
                upcoming.updated(bucket)
        self._spans.end(span)

    def _begin_gather(self, strategy_name: str) -> GatherPass:
        self.finish_regrouping()
        return self._contents.begin_gather(strategy_name)

    def _scatter_pass(self, runtime: StrategyRuntime) -> ScatterPass:
        bound = runtime.bound
        if bound is None or not self._overlap:
            post_from = PostFrom.FINISH
        elif not self._track.may_delay_compute:
            post_from = PostFrom.LAST_BACKWARD
        elif bound.role.has_embedding:
            post_from = PostFrom.FIRST_GRADIENT
        else:
            post_from = PostFrom.FINISH  # the last backward ends with a message
        return ScatterPass(
            runtime.regrouper,
            self._track,
            self.scatter_timer,
            buckets_of={} if bound is None else bound.trained_buckets_of,
            post_from=post_from,
            adds=bool(self._accumulated),
        )

    @contextmanager
    def _in_phase(self, name: str, strategy_name: str, phase: Phase) -> Iterator[None]:
        """A part of an iteration; adds it to the errors raised in it unless `phase` has."""
        try:
            with phase(name):
                yield
        except Exception as error:
            if not any("phase '" in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"rank {self.rank}, phase '{name}', strategy '{strategy_name}'")
            raise

    def check_divisor(self, divisor: float | None) -> float | None:
        """Returns the divisor of the next update; None for the sum of the weights.

        Raises ConfigurationError as `optim_step`.
        """
        num_calls = len(self._accumulated)
        num_divided = sum(call.is_divided for call in self._accumulated)
        if not num_calls:
            raise ConfigurationError(
                "an update needs the gradients of at least 1 call of forward_backward but there "
                "were 0 since the last update; call forward_backward first"
            )
        if num_divided not in (0, num_calls):
            raise ConfigurationError(
                f"all calls of forward_backward have a divisor or none, but {num_divided} of "
                f"{num_calls} have one; give it to all of them, or to optim_step alone"
            )
        if num_divided and divisor is not None:
            raise ConfigurationError(
                f"gradients are divided once, but optim_step has divisor {divisor:g} and "
                f"{num_divided} calls of forward_backward have one each; leave one of them out"
            )
        if self._balances and divisor is not None:
            raise ConfigurationError(
                f"losses that balance experts are divided by the sum of the weights but optim_step "
                f"has divisor {divisor:g}; leave it out"
            )
        if divisor is not None and not 0 < divisor < math.inf:
            raise ConfigurationError(
                f"the divisor must be positive and finite but is {divisor}; give another one"
            )
        return 1.0 if num_divided else divisor

    def _vote(
        self,
        calls: Sequence[LocalGradients],
        next_strategy: str | None = None,
        *,
        updates: bool = False,
    ) -> tuple[StepVote, tuple[int, ...]]:
        """Collective: the ranks' votes, added up, and this rank's micro-batches of bad loss.

        All that the host reads of an iteration comes in one sum and one copy, for which it waits
        once.
        """
        index = None
        if self.rank == 0 and next_strategy is not None:
            index = self.pool.strategies.index(self.pool.strategy(next_strategy))
        reporting = [
            call
            for call in calls
            if call.runtime.model is not None and call.runtime.model.reports_loss
        ]
        reports = [_first_report(report) for call in reporting for report in call.reports]
        losses = torch.stack(reports).double() if reports else None
        num_predictions = self.definition.num_predictions
        predictions = torch.zeros(num_predictions, 2, dtype=torch.float64, device=self.device)
        for call in reporting:
            if call.prediction_sums is not None:
                predictions += call.prediction_sums
        total = StepVote.to_tensor(
            losses,
            self.optimizer.squared_norm() if updates else None,
            trained_tokens=sum(call.trained_tokens for call in reporting),
            next_strategy=index,
            ran_out_of_memory=_out_of_memory(calls) is not None,
            predictions=predictions,
            device=self.device,
        )
        routers = self.routers if updates else None
        num_votes = len(total)
        if routers is not None:
            total = torch.cat([total, routers.sums])
        with self._in_phase("loss", calls[-1].runtime.strategy.name, untimed):
            dist.all_reduce(total)
            if routers is not None:
                total = torch.cat([total, routers.propose(total[num_votes:])])
            vote = StepVote.from_host(total.cpu(), num_predictions)
        if vote.num_ranks_without_memory:
            self._contents.lose_frozen()
        bad: list[int] = []
        if losses is not None and not vote.loss.is_finite:
            bad = [i for i, loss in enumerate(losses[:, 0].tolist()) if not math.isfinite(loss)]
        return vote, tuple(bad)


def _trained_tokens(batches: Sequence[PackedBatch]) -> int:
    return sum(batch.trained_tokens for batch in batches)


def _prediction_sums(runtime: StrategyRuntime) -> Tensor | None:
    model = None if runtime.model is None else runtime.model.model
    return model.prediction_sums if isinstance(model, PredictingGPTModel) else None


def _out_of_memory(calls: Sequence[LocalGradients]) -> OutOfMemory | None:
    """Returns where this rank first ran out of memory; None if it did not."""
    return next((call.out_of_memory for call in calls if call.out_of_memory is not None), None)


def _first_report(report: dict[str, Tensor]) -> Tensor:
    """(Σ weight · loss, Σ weight) of a micro-batch: the loss function's first entry."""
    return next(iter(report.values())).reshape(-1)[:2]
