"""The training engine: shards, role model and regrouping of one job, driven plan by plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings, ShardedAdamW
from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.runtime.catalogue import CataloguedParameter, catalogue
from megatron.hydraulis.runtime.executor import RoleModel, run_micro_batches
from megatron.hydraulis.runtime.forward_step import ForwardStep
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_role_model
from megatron.hydraulis.runtime.process_groups import (
    GroupRegistry,
    device_of_job,
    provide_memory_buffer,
)
from megatron.hydraulis.runtime.regroup import Regrouper
from megatron.hydraulis.runtime.shards import CanonicalShards
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder
from megatron.hydraulis.runtime.staging import Staging
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.role import Role, role_of

Phase = Callable[[str], AbstractContextManager[object]]
"""``phase(name)`` is entered around every part of an iteration, by all ranks alike, idle ones
included: 'gather' (left out where the parameters are there already), 'forward-backward', 'scatter',
'optimizer' (left out where there is nothing to update)."""


def untimed(name: str) -> AbstractContextManager[None]:
    """A `Phase` that measures nothing."""
    return nullcontext()


@dataclass(frozen=True)
class LossTotal:
    """Loss of a global batch, equal on every rank."""

    loss_sum: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """Loss per trained token; 0 where nothing was trained."""
        return self.loss_sum / self.num_tokens if self.num_tokens else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether every micro-batch's loss was finite."""
        return math.isfinite(self.loss_sum)


@dataclass(frozen=True)
class StepOutcome:
    """What one iteration did."""

    loss: LossTotal
    gradient_norm: float | None
    """After division by the tokens, before clipping; None where nothing was trained."""
    updated: bool
    bad_micro_batches: tuple[int, ...]
    """Micro-batches of this rank's replica whose loss is not finite (last stage only)."""


@dataclass
class _Setting:
    """What this rank needs to run one strategy."""

    strategy: Strategy
    role: Role | None
    model: RoleModel | None
    arena: Arena | None
    regrouper: Regrouper


class Engine:
    """Everything of a job that outlives an iteration.

    Collective over all ranks: construction and every method that runs the model. Idle ranks own
    shards and take part in regrouping.

    Args:
        definition: the model.
        pool: the strategies of the run. All groups are created here.
        settings: of the optimizer.
        seed: of the initial weights.
        groups: an existing registry to share (tests); its groups are extended to the pool's.
        timeout: of collectives in the groups created here; the backend's default where None. Groups
            take it at creation: that of the world group does not reach them.
        num_atoms: T, the atoms of a parameter; the least common multiple of the pool's tp degrees
            by default, a multiple of it where the shards must fit other pools too.
        spans: is told of the work as it is done.

    Raises:
        ConfigurationError: ``num_atoms`` is no multiple of the pool's own, or the model does not
            cut into so many atoms.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        pool: Pool,
        settings: AdamWSettings,
        *,
        seed: int,
        groups: GroupRegistry | None = None,
        timeout: timedelta | None = None,
        num_atoms: int | None = None,
        spans: SpanRecorder = NO_SPANS,
    ) -> None:
        self.definition = definition
        self.pool = pool
        self.rank = dist.get_rank()
        self._spans = spans
        self.device = device_of_job()
        self.dtype: torch.dtype = definition.transformer.params_dtype
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        for strategy in pool.strategies:
            _check_runnable(strategy)
        num_atoms = pool.tp_lcm if num_atoms is None else num_atoms
        if num_atoms < 1 or num_atoms % pool.tp_lcm:
            raise ConfigurationError(
                f"num_atoms is {num_atoms} but the tp degrees of the pool have the least common "
                f"multiple {pool.tp_lcm}; give a multiple of {pool.tp_lcm}"
            )
        provide_memory_buffer()
        if groups is None:
            groups = GroupRegistry(pool.strategies, timeout=timeout)
        else:
            for strategy in pool.strategies:
                groups.add_strategy(strategy)
        self.groups = groups
        entries: list[CataloguedParameter] = catalogue(definition, tensor_parallel=pool.tp_lcm > 1)
        self.layout = CanonicalLayout.build(
            [entry.spec for entry in entries], num_atoms=num_atoms, num_ranks=pool.num_ranks
        )
        self.shards = CanonicalShards(self.layout, self.rank, dtype=wide, device=self.device)
        self.shards.initialise({entry.spec.name: entry for entry in entries}, seed)
        self.optimizer = ShardedAdamW(self.shards, settings)
        self._staging = Staging(self.device)
        self._settings: dict[str, _Setting] = {}
        self._gathered: str | None = None
        """Name of the strategy whose parameters are in the arena and current."""

    def setting(self, strategy_name: str) -> _Setting:
        """Role model, arena and routes of a strategy on this rank, built at first use."""
        found = self._settings.get(strategy_name)
        if found is None:
            found = self._build_setting(self.pool.strategy(strategy_name))
            self._settings[strategy_name] = found
        return found

    def num_parameters_held(self, strategy_name: str) -> int:
        """Elements of the arena that this rank's role binds."""
        arena = self.setting(strategy_name).arena
        return 0 if arena is None else sum(b.values.numel() for b in arena.bound.values())

    def train_step(
        self,
        strategy_name: str,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        *,
        phase: Phase = untimed,
    ) -> StepOutcome:
        """Gather, run, scatter, update.

        Args:
            strategy_name: of the pool; the same on every rank.
            batches: micro-batches of this rank's replica, on the job's device; empty where idle.
            forward_step: upstream's signature.
            phase: measures the parts.

        Returns:
            The outcome. An iteration without trained tokens, or whose loss or gradient norm is not
            finite, updates nothing: whether the run stops there is the caller's choice.
        """
        loss, bad = self.forward_backward(strategy_name, batches, forward_step, phase=phase)
        if loss.num_tokens == 0 or not loss.is_finite:
            return StepOutcome(loss, None, False, bad)
        with phase("optimizer"):
            self.optimizer.divide_gradients(loss.num_tokens)
            norm = self.optimizer.gradient_norm()
            if not math.isfinite(norm):
                return StepOutcome(loss, norm, False, bad)
            self.optimizer.step(norm)
            self._gathered = None
        return StepOutcome(loss, norm, True, bad)

    def forward_backward(
        self,
        strategy_name: str,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        *,
        phase: Phase = untimed,
    ) -> tuple[LossTotal, tuple[int, ...]]:
        """Gradients, summed over tokens, on the canonical shards; no update.

        Returns:
            The loss, and the micro-batches of this rank whose loss is not finite.
        """
        setting = self.setting(strategy_name)
        self.gather(strategy_name, phase=phase)
        with phase("forward-backward"):
            if setting.arena is not None:
                setting.arena.zero_gradients()
            reports = self._run(setting, batches, forward_step, forward_only=False)
        with phase("scatter"):
            setting.regrouper.scatter()
        return self._total(setting, reports)

    def evaluate(
        self, strategy_name: str, batches: Sequence[PackedBatch], forward_step: ForwardStep
    ) -> LossTotal:
        """Loss of a global batch, nothing else."""
        setting = self.setting(strategy_name)
        self.gather(strategy_name)
        with torch.no_grad():
            reports = self._run(setting, batches, forward_step, forward_only=True)
        return self._total(setting, reports)[0]

    def gather(self, strategy_name: str, *, phase: Phase = untimed) -> None:
        """Bring the current parameters into the strategy's layout, if they are not there yet."""
        if self._gathered != strategy_name:
            with phase("gather"):
                self.setting(strategy_name).regrouper.gather()
            self._gathered = strategy_name

    def set_training(self, training: bool) -> None:
        """`train()` or `eval()` on every model built so far."""
        for setting in self._settings.values():
            if setting.model is not None:
                setting.model.model.train(training)

    def _run(
        self,
        setting: _Setting,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        if setting.model is None:
            if batches:
                raise StrategyError(
                    f"rank {self.rank} is idle in strategy '{setting.strategy.name}' but was given "
                    f"{len(batches)} micro-batches; a plan gives work to replicas only"
                )
            return []
        return run_micro_batches(
            setting.model, batches, forward_step, forward_only=forward_only, spans=self._spans
        )

    def _total(
        self, setting: _Setting, reports: Sequence[dict[str, Tensor]]
    ) -> tuple[LossTotal, tuple[int, ...]]:
        """Sum over micro-batches and replicas; each replica is counted once."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        bad: list[int] = []
        if setting.model is not None and setting.model.reports_loss and reports:
            losses = torch.stack([_first_report(report) for report in reports]).double()
            total += losses.sum(dim=0)
            bad = [i for i, loss in enumerate(losses[:, 0].tolist()) if not math.isfinite(loss)]
        dist.all_reduce(total)
        loss_sum, num_tokens = total.tolist()
        return LossTotal(loss_sum, round(num_tokens)), tuple(bad)

    def _build_setting(self, strategy: Strategy) -> _Setting:
        roles = [
            role_of(
                strategy,
                rank,
                num_layers=self.definition.transformer.num_layers,
                tied_embeddings=self.definition.tied_embeddings,
            )
            for rank in range(self.pool.num_ranks)
        ]
        role = roles[self.rank]
        model = arena = None
        if role is not None:
            groups = self.groups.collection(strategy)
            assert groups is not None
            module = build_role_model(self.definition, role, groups)
            wide = self.shards.parameters.dtype
            arena = Arena(self.layout, role, dtype=self.dtype, grad_dtype=wide, device=self.device)
            arena.bind(module)
            model = RoleModel(module, groups)
        regrouper = Regrouper(
            self.layout,
            roles,
            self.shards,
            arena,
            wire_dtype=self.dtype,
            staging=self._staging,
        )
        return _Setting(strategy, role, model, arena, regrouper)


def _first_report(report: dict[str, Tensor]) -> Tensor:
    """(sum of losses, tokens) of a micro-batch: the loss function's first entry."""
    return next(iter(report.values())).reshape(-1)[:2]


def _check_runnable(strategy: Strategy) -> None:
    for replica in strategy.replicas:
        if replica.scheme.cp > 1:
            raise StrategyError(
                f"strategy '{strategy.name}': replica {replica.scheme} has cp="
                f"{replica.scheme.cp}, but this version runs cp=1 only; use tp or pp instead"
            )
