"""Parts that a run plans with: cost model, strategies that fit the devices, and planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import DeviceConstants, Precision
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import CUDA_ROW_QUANTUM, Limits
from megatron.hydraulis.cost_model.model_arguments import (
    gradient_bytes,
    groups_experts,
    layer_settings,
    recompute_of,
    training_precision,
)
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledModel,
    experts_setting,
    frozen_settings,
    proposed_profile_path,
)
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.checks import check_schedule
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.flags.describe import describe
from megatron.hydraulis.planner.ahead import LookAheadPlanner
from megatron.hydraulis.planner.plan import Planner
from megatron.hydraulis.planner.planners import (
    CertifiedPlanner,
    GreedyPlanner,
    RecordedPlans,
    ScheduledPlanner,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.pool import balance_pool


def profiled_model(resolved: Resolved, core_attention: str | None = None) -> ProfiledModel:
    """The model that this run's cost profile must be for; without core_attention on any kernel."""
    args = resolved.args
    return ProfiledModel(
        shape=resolved.shape,
        dtype=training_precision(args),
        recompute=str(recompute_of(args)),
        core_attention=core_attention,
        experts=experts_setting(resolved.shape, groups_experts=groups_experts(args)),
        **frozen_settings(resolved.frozen),
    )


def read_cost_profile(
    resolved: Resolved,
    given: ProfileCostModel | None = None,
    core_attention: str | None = None,
) -> ProfileCostModel | None:
    """The cost profile that the flags name, with every scheme of the pool in it; None without.

    given: takes the place of a file; core_attention: the chosen one, if it is known.

    Raises ConfigurationError for a file that cannot be read, for one that was made for another
    model or for more ranks, and naming the schemes that it lacks.
    """
    path = resolved.hydraulis.cost_profile
    if given is None and path is not None:
        given = ProfileCostModel.read(path)
    if given is None:
        return None
    profile, where = given, path or given.source
    profile.check_model(
        profiled_model(resolved, core_attention), where, speaks=resolved.args.rank == 0
    )
    pool, is_elastic = resolved.pool, resolved.hydraulis.elastic
    has_limit = resolved.hydraulis.max_tokens_per_micro_batch is not None
    if not has_limit and (resolved.args.rank == 0 or not is_elastic):
        profile.check_num_ranks(pool.num_ranks, pool.ranks_per_node, where, only_warns=is_elastic)
    missing: dict[Scheme, list[str]] = {}
    for strategy in _pool_with_layers(resolved, _limits(resolved, profile)).strategies:
        for scheme in strategy.schemes:
            try:
                profile.coefficients(scheme)
            except StrategyError:
                missing.setdefault(scheme, []).append(repr(strategy.name))
    if missing:
        named = "; ".join(f"{scheme} of {', '.join(names)}" for scheme, names in missing.items())
        known = ", ".join(str(row.scheme) for row in profile.schemes)
        pool_file = resolved.hydraulis.strategy_pool or "POOL"
        raise ConfigurationError(
            f"--cost-profile {where}: training needs a row of every scheme that is used but it "
            f"lacks {named} and has {known}; measure what is missing, leave these strategies "
            f"out, or give the rows that hydraulis propose assumed for its pool, "
            f"{proposed_profile_path(pool_file)}"
        )
    return profile


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Cost model and usable strategies of a run on given devices; equal on ranks of one kind."""

    cost_model: CostModel
    limits: Limits
    pool: Pool
    """The strategies that can be run and hold the model."""
    left_out: tuple[str, ...]
    """One line for every strategy of the pool file that the run goes without."""
    source: str
    """Origin of times and limits, in a few words."""

    @classmethod
    def of(
        cls,
        resolved: Resolved,
        device: DeviceConstants,
        profile: ProfileCostModel | None,
        core_attention: str | None = None,
        *,
        has_optimizer: bool = True,
        accumulates: bool = False,
    ) -> Planning:
        """Plan with the profile if there is one, else with what is known of the device.

        core_attention is the chosen one; until then it follows from the flags. Without an optimizer
        the run needs no memory for training, and where it accumulates (`RuntimeEngine`) it needs
        more, which a profile cannot know.

        Raises ConfigurationError, StrategyError among them, when no strategy holds the model and
        when --strategy-schedule names one that does not. A dry run without GPU and profile only
        warns: its machine need not be one that trains.
        """
        cost_model: CostModel
        model = analytic_cost_model(resolved, device, core_attention)
        model = replace(model, has_optimizer=has_optimizer, accumulates=accumulates)
        regroup = model.regroup_costs(
            [resolved.pool.tp_lcm], overlaps=not resolved.hydraulis.no_regroup_overlap
        ).for_pool(resolved.pool.strategies)
        if profile is not None:
            cost_model = profile.with_regrouping(regroup, resolved.pool.strategies)
            where = resolved.hydraulis.cost_profile or profile.source
            source = f"cost profile {where}, {profile.device}"
        else:
            cost_model = replace(model, regroup=regroup)
            source = f"analytic, device '{device.name}'"
        limits = replace(
            _limits(resolved, cost_model), row_quantum=row_quantum_tokens(resolved, device)
        )
        reasons = {
            strategy: _why_it_does_not_fit(limits, strategy, source)
            for strategy in _pool_with_layers(resolved, limits).strategies
        }
        kept = [strategy for strategy, why in reasons.items() if why is None]
        left_out = tuple(
            f"strategy {strategy.name!r} is skipped: {why}"
            for strategy, why in reasons.items()
            if why is not None
        )
        if not kept:
            name, why = next((strategy.name, why) for strategy, why in reasons.items())
            others = f" (and in none of {len(reasons) - 1} others)" if len(reasons) > 1 else ""
            error = (
                f"strategy '{name}'{others}: {why}; use more tp or pp ranks, or set "
                "--max-tokens-per-micro-batch yourself"
            )
            if not resolved.hydraulis.dry_run or profile is not None or device.name != "cpu":
                raise StrategyError(error)
            kept, left_out = list(reasons), (f"training on CPUs would be refused: {error}",)
        pool = Pool.of(*kept)
        check_schedule(resolved.hydraulis, pool, left_out)
        return cls(
            cost_model=cost_model, limits=limits, pool=pool, left_out=left_out, source=source
        )

    def description_of(self, resolved: Resolved) -> dict[str, Any]:
        """The resolved configuration with these strategies: see `flags.describe`."""
        return describe(
            resolved,
            self.pool.strategies,
            self.limits,
            cost_model=self.source,
            left_out=self.left_out,
        )

    def bf16_advice(self, num_tokens: float) -> str | None:
        """Says what --grad-reduce-in-bf16 would save in the mean over the strategies; None if that
        is not worth a line.

        num_tokens: of a global batch, assumed to fill micro-batches evenly.
        """
        cost_model, strategies = self.cost_model, self.pool.strategies
        assert isinstance(cost_model, AnalyticCostModel | ProfileCostModel)
        assert cost_model.regroup is not None
        times = StageCosts(cost_model, cost_model.regroup.shape).usual_times_ms
        rates = {
            strategy: sum(
                cost_model.max_tokens(r.scheme) / max(map(sum, times(r.scheme)))
                for r in strategy.replicas
            )
            for strategy in strategies
        }
        if not all(rates.values()):  # --max-tokens-per-micro-batch overrides limits of 0
            return None
        iteration_ms = fmean(
            cost_model.overhead_ms(strategy) + num_tokens / rate for strategy, rate in rates.items()
        )
        shares = dict.fromkeys(strategies, 1.0 / len(strategies))
        return cost_model.regroup.bf16_advice(shares, times, iteration_ms)

    def check_longest(self, lengths: Mapping[str, int]) -> None:
        """Raise ConfigurationError for a longest sequence that no strategy holds.

        lengths: tokens of the longest sequence by the name of its data.
        """
        limit, strategy = max(
            (
                (max(self.limits.max_tokens(strategy, s) for s in strategy.schemes), strategy)
                for strategy in self.pool.strategies
            ),
            key=lambda pair: pair[0],
        )
        model, fix = self.cost_model, ""
        if self.limits.flag is not None:
            fix = ", raise --max-tokens-per-micro-batch"
        elif isinstance(model, AnalyticCostModel) and model.precision is Precision.FP32:
            fix = ", train with --bf16"
        for name, longest in lengths.items():
            if longest > limit:
                what = f"strategy '{strategy.name}'"
                if len(self.pool.strategies) > 1:
                    what = f"the {len(self.pool.strategies)} strategies, not even of {what},"
                raise ConfigurationError(
                    f"the longest sequence of the {name} data trains {longest} tokens but no "
                    f"replica of {what} holds more than {limit} tokens in a micro-batch; lower "
                    f"--seq-length{fix} or give a replica more ranks"
                )


def look_ahead_planner(
    planning: Planning, hydraulis: HydraulisConfig, *, timeout_s: float, is_training: bool
) -> LookAheadPlanner:
    """Makes plans ahead of training, or for evaluation when they are needed.

    Other ranks wait ``timeout_s`` for a plan. --replay-plans and --strategy-schedule apply to
    training only. Raises PlanError for a folder without recorded plans.
    """
    if is_training and hydraulis.replay_plans is not None:
        return LookAheadPlanner(RecordedPlans(hydraulis.replay_plans), in_process=False)
    planner, stand_in = planners(planning, hydraulis, is_training=is_training)
    return LookAheadPlanner(
        planner,
        in_process=is_training and hydraulis.plan_ahead > 0,
        stand_in=stand_in,
        time_limit_s=hydraulis.plan_time_limit,
        timeout_s=timeout_s,
    )


def planners(
    planning: Planning, hydraulis: HydraulisConfig, *, is_training: bool = True
) -> tuple[Planner, Planner]:
    """The planner, and the one without a native solver that stands in for it."""
    certified = partial(
        CertifiedPlanner,
        cost_model=planning.cost_model,
        limits=planning.limits,
        time_limit_s=hydraulis.plan_time_limit,
    )
    greedy = partial(GreedyPlanner, cost_model=planning.cost_model, limits=planning.limits)
    names = hydraulis.scheduled_strategies if is_training else ()
    return _planner(planning, names, certified), _planner(planning, names, greedy)


def _planner(planning: Planning, names: Sequence[str], make: Callable[[Pool], Planner]) -> Planner:
    """A planner of the whole pool, or of a cycle of its strategies if there are names."""
    if names:
        return ScheduledPlanner(planning.pool, planning.limits, names, make)
    return make(planning.pool)


def row_quantum_tokens(resolved: Resolved, device: DeviceConstants) -> int:
    """Planned rows are rounded up to a multiple of this many tokens."""
    quantum = resolved.hydraulis.row_quantum_tokens
    if quantum is None:
        return 1 if device.name == "cpu" else CUDA_ROW_QUANTUM
    return quantum


def analytic_cost_model(
    resolved: Resolved, device: DeviceConstants, core_attention: str | None = None
) -> AnalyticCostModel:
    """The cost model of the run on a device; core_attention as for `Planning.of`."""
    pool = resolved.pool
    args, hydraulis = resolved.args, resolved.hydraulis
    return AnalyticCostModel(
        shape=resolved.shape,
        device=device,
        cluster=device.cluster(pool.num_ranks, pool.ranks_per_node),
        precision=training_precision(args),
        sequence_parallel=hydraulis.sequence_parallel,
        recompute=recompute_of(args),
        cp_comm_type=args.cp_comm_type[0],
        loss_chunk_tokens=hydraulis.loss_chunk_tokens,
        fs_prefetch=hydraulis.fs_prefetch,
        gradient_bytes=gradient_bytes(args),
        pool=PoolFootprint.of(
            pool, resolved.shape, gradient_bytes=gradient_bytes(args), frozen=resolved.frozen
        ),
        **layer_settings(
            args, resolved.shape, core_attention or hydraulis.core_attention, resolved.frozen
        ),
    )


def _limits(resolved: Resolved, cost_model: CostModel) -> Limits:
    return Limits(cost_model, resolved.hydraulis.max_tokens_per_micro_batch)


def _pool_with_layers(resolved: Resolved, limits: Limits) -> Pool:
    """The pool that the flags describe, with the layers that --balance-pipeline-layers chooses."""
    if not resolved.hydraulis.balance_pipeline_layers:
        return resolved.pool
    cost_model = limits.cost_model

    def choose(scheme: Scheme, own_limit: int | None) -> Scheme:
        # The strategy's own limit must fit in memory, or else the longest sequence.
        min_tokens = resolved.args.seq_length if own_limit is None else own_limit
        by_flag = limits.by_flag(scheme)
        if isinstance(cost_model, ProfileCostModel):
            return cost_model.balanced_scheme(
                scheme,
                num_layers=resolved.shape.num_layers,
                min_tokens=min_tokens,
                limit=by_flag,
            )
        assert isinstance(cost_model, AnalyticCostModel)
        # With the flag, memory is not checked.
        return cost_model.balanced_scheme(scheme, min_tokens=min_tokens if by_flag is None else 0)

    return balance_pool(resolved.pool, choose)


def _why_it_does_not_fit(limits: Limits, strategy: Strategy, source: str) -> str | None:
    for scheme in strategy.schemes:
        limit = limits.max_tokens(strategy, scheme)
        if limit < 1:
            return (
                f"a micro-batch holds at least 1 token but on {scheme} it holds {limit} "
                f"{_memory_numbers(limits.cost_model, scheme, source)}"
            )
    return None


def _memory_numbers(model: CostModel, scheme: Scheme, source: str) -> str:
    """The numbers behind a limit."""
    if not isinstance(model, AnalyticCostModel):
        return f"by the {source}"
    device = model.device
    states = max(model.memory.state_bytes(scheme, stage) for stage in range(scheme.pp))
    whose = "rank"
    if device.name == "cpu":
        whose = (
            "CPU rank (for GPUs, give --device NAME to a dry run, or --cost-profile of hydraulis "
            "profile)"
        )
    return (
        f"in the {device.memory_bytes / 1e9:.3g} GB of a {whose}, of which "
        f"{model.memory.reserve_bytes / 1e9:.3g} GB are kept free and parameters, gradients and "
        f"optimizer state take {states / 1e9:.3g} GB"
    )
