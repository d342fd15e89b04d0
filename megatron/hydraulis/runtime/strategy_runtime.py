"""A rank's parts for each strategy of a pool: its role's model, arena and regrouping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils._pytree import tree_leaves

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.arena import Arena, ArenaMemory
from megatron.hydraulis.runtime.columns import ColumnExchange, ColumnMeter, ColumnShares
from megatron.hydraulis.runtime.executor import RoleModel
from megatron.hydraulis.runtime.experts import RouterState
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_role_model
from megatron.hydraulis.runtime.passes import GatherPass, ScatterPass, at_exit
from megatron.hydraulis.runtime.process_groups import GroupRegistry
from megatron.hydraulis.runtime.regroup import Regrouper
from megatron.hydraulis.runtime.track import Track
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.transfer.canonical import CanonicalLayout, Unit
from megatron.hydraulis.transfer.role import Role


@dataclass(frozen=True)
class StrategyRuntime:
    """This rank's parts for one strategy; `model` and `arena` are None where idle."""

    strategy: Strategy
    bound: BoundRole | None
    regrouper: Regrouper

    @property
    def model(self) -> RoleModel | None:
        return None if self.bound is None else self.bound.model

    @property
    def arena(self) -> Arena | None:
        return None if self.bound is None else self.bound.arena

    @property
    def num_parameters(self) -> int:
        """Elements of the arena's storage of parameters."""
        return 0 if self.bound is None else self.bound.arena.num_parameters

    @property
    def num_gradients(self) -> int:
        """Elements of the arena's storage of gradients."""
        return 0 if self.bound is None else self.bound.arena.num_gradients

    def place_of_shards(self, shards: CanonicalShards) -> int:
        """See `Arena.place_of_shards`; 0 where idle."""
        if self.bound is None:
            return 0
        return self.bound.arena.place_of_shards(shards, self.regrouper.scatter_calls)


@dataclass
class StrategyRuntimes:
    """The runtimes of all strategies of a pool on this rank, each built at first use."""

    definition: ModelDefinition
    pool: Pool
    groups: GroupRegistry
    """The groups of all strategies."""
    layout: CanonicalLayout
    shards: CanonicalShards
    memory: ArenaMemory
    """The memory that all models are bound to."""
    gradient_dtype: torch.dtype
    """Dtype in which gradients travel."""
    routers: RouterState | None
    """State that the routers of all models share; None without experts."""
    column_track: Track
    """Runs the gathers and scatters of columns that share weights."""
    num_layers_ahead: int
    """Layers that such columns gather ahead."""
    column_meter: ColumnMeter
    _built: dict[str, StrategyRuntime] = field(default_factory=dict, init=False)
    _bound_roles: dict[object, BoundRole] = field(default_factory=dict, init=False)
    _is_training: bool = field(default=True, init=False)

    def of(self, strategy_name: str) -> StrategyRuntime:
        """The runtime of a strategy; no collective."""
        if strategy_name not in self._built:
            self._built[strategy_name] = self._build(self.pool.strategy(strategy_name))
        return self._built[strategy_name]

    def set_training(self, training: bool) -> None:
        """Call `train()` or `eval()` on every model, including those built later."""
        self._is_training = training
        for bound in self._bound_roles.values():
            bound.model.model.train(training)

    def release(self) -> None:
        """Let all models be freed; they must not train afterwards."""
        for bound in self._bound_roles.values():
            bound.release()

    def _build(self, strategy: Strategy) -> StrategyRuntime:
        roles = self.definition.roles_of(strategy)
        role = roles[dist.get_rank()]
        bound = None if role is None else self._bound_role(strategy, role)
        regrouper = Regrouper(
            self.layout,
            strategy,
            roles,
            self.shards,
            None if bound is None else bound.arena,
            wire_dtype=self.definition.transformer.params_dtype,
            gradient_dtype=self.gradient_dtype,
            group=self.groups.regroup,
            ranks_per_node=self.pool.ranks_per_node,
        )
        return StrategyRuntime(strategy, bound, regrouper)

    def _bound_role(self, strategy: Strategy, role: Role) -> BoundRole:
        """The model of the role, shared by strategies that give this rank the same neighbours."""
        groups = self.groups.collection(strategy)
        assert groups is not None
        replica = strategy.replica_of(dist.get_rank())
        assert replica is not None
        scheme = replica.scheme
        is_uneven = scheme.ep > 1 and scheme.splits_cp
        columns = {} if role.column is None else self.groups.columns(strategy)
        neighbours = [groups.tp, groups.pp, groups.ep, *columns.values()]
        ranks = (tuple(dist.get_process_group_ranks(group)) for group in neighbours)
        key = (role, is_uneven, scheme.recomputes, *ranks)
        found = self._bound_roles.get(key)
        if found is None:
            definition = self.definition
            definition = definition.for_uneven_columns if is_uneven else definition
            definition = definition.recomputing if scheme.recomputes else definition
            exchange = None
            if columns:
                exchange = ColumnExchange(
                    columns,
                    self.column_track,
                    self.gradient_dtype,
                    self.num_layers_ahead,
                    self.column_meter,
                )
            found = BoundRole(definition, role, groups, self.layout, self.memory, exchange)
            found.model.model.train(self._is_training)
            if self.routers is not None:
                self.routers.attach(found.model.model)
            self._bound_roles[key] = found
        return found


class BoundRole:
    """The model of one role in its groups, bound to its arena.

    Shared by all strategies in which this rank has the same role and the same neighbours. Its hooks
    are set once; within `regrouping` forward waits for parameters and backward reports gradients.

    Args:
        groups: that the role's modules communicate in.
        exchange: of the columns that share the role's weights, if any.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        role: Role,
        groups: ProcessGroupCollection,
        layout: CanonicalLayout,
        memory: ArenaMemory,
        exchange: ColumnExchange | None,
    ) -> None:
        self.role = role
        module = build_role_model(definition, role, groups)
        num_slots = 1 if exchange is None else 1 + exchange.num_ahead
        self.arena = Arena(layout, role, memory, num_slots=num_slots)
        parameters = self.arena.bind(module)
        self.model = RoleModel(module, groups)
        held: dict[int, dict[int, None]] = {index: {} for index in parameters}
        for bucket in layout.buckets:
            for piece in bucket.pieces:
                if piece.parameter in held:
                    held[piece.parameter][bucket.index] = None
        self.buckets_of = {index: list(found) for index, found in held.items()}
        """Buckets of each parameter of the role, by index into ``layout.parameters``."""
        self.trained_buckets_of = {
            index: found
            for index, found in self.buckets_of.items()
            if parameters[index].requires_grad
        }
        self._gather: GatherPass | None = None
        self._scatter: ScatterPass | None = None
        self._held_buckets = sorted({b for buckets in self.buckets_of.values() for b in buckets})
        # Without gradients nothing but the next token is predicted.
        unused = {Unit.prediction(number) for number in range(role.num_predictions)}
        if not (role.has_embedding or role.tied_embeddings):
            unused.add(Unit.embedding())
        self._evaluated_buckets = [
            bucket
            for bucket in self._held_buckets
            if layout.buckets[bucket].unit.trained not in unused
        ]
        self._columns: ColumnShares | None = None
        if exchange is not None:
            self._columns = ColumnShares(self.arena, exchange, self.buckets_of)
        index_of = {id(parameter): index for index, parameter in parameters.items()}

        def unit_of(parameter: Any) -> Unit:
            return layout.parameters[index_of[id(parameter)]].unit.trained

        for part, members in _parts(module, lambda parameter: unit_of(parameter).order):
            buckets = sorted({b for p in members for b in self.buckets_of[index_of[id(p)]]})
            units = sorted({unit_of(p) for p in members})
            part.register_forward_pre_hook(partial(self._before_forward, tuple(buckets), units))
            if self._columns is not None:
                part.register_forward_hook(partial(self._after_forward, units))
        self._gradient_hooks = [
            parameters[index].register_post_accumulate_grad_hook(
                partial(self._after_gradient, index)
            )
            for index in self.trained_buckets_of
        ]
        built: Any = module
        if built.config.recompute_granularity and self._gradient_hooks and role.has_embedding:
            built.embedding.register_forward_hook(_requiring_gradient)

    def release(self) -> None:
        """Let the model be freed: Python's collector does not see references of gradient hooks."""
        for hook in self._gradient_hooks:
            hook.remove()

    @contextmanager
    def regrouping(self, gather: GatherPass, scatter: ScatterPass | None = None) -> Iterator[None]:
        """Within, forward waits for the gather, and the last backward posts the scatter."""
        config: Any = self.model.model.config
        self._gather, self._scatter = gather, scatter
        columns = self._columns
        if columns is not None:
            columns.begin(gather, scatter)

        def begin_last_backward() -> None:
            assert scatter is not None
            if columns is not None:
                columns.finish_backward()  # of the micro-batches before
            scatter.begin_last_backward()

        if scatter is not None:
            config.no_sync_func = partial(at_exit, begin_last_backward)
        try:
            yield
            if columns is not None:
                columns.finish()
            used = self._evaluated_buckets if scatter is None else self._held_buckets
            if gather.num_missing_of(used):
                raise HydraulisError(
                    "parameters of the model were used without the module that holds them being "
                    "called, so that nothing waited for their gather; call modules as functions, "
                    "or pass --no-regroup-overlap"
                )
        finally:
            self._gather = self._scatter = config.no_sync_func = None

    def _before_forward(
        self, buckets: Sequence[int], units: Sequence[Unit], module: Any, inputs: Any
    ) -> None:
        if self._gather is None:
            return
        if self._columns is None:
            self._gather.need(buckets)
        else:
            for unit in units:
                self._columns.before_forward(unit)

    def _after_forward(self, units: Sequence[Unit], module: Any, inputs: Any, outputs: Any) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(partial(self._before_backward, units))

    def _before_backward(self, units: Sequence[Unit], gradient: torch.Tensor) -> None:
        if self._columns is not None and self._gather is not None:
            for unit in units:
                self._columns.before_backward(unit)

    def _after_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self._scatter is None:
            return
        if self._columns is None:
            self._scatter.arrived(index)
        else:
            self._columns.arrived(index)


def _requiring_gradient(module: Any, inputs: Any, output: Any) -> None:
    """Let the output of a frozen embedding require a gradient.

    Otherwise that of a module which is recomputed in the backward would not require one either:
    autograd does not see the module's parameters in the forward. The schedule would skip the
    backward silently.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _parts(
    module: torch.nn.Module, order_of: Callable[[Any], int]
) -> Iterator[tuple[torch.nn.Module, list[Any]]]:
    """The largest called modules whose parameters all belong to one layer, the embedding or the
    output, with these parameters.

    Any other module is paired with the parameters that it holds directly, if any.

    order_of: the order of a parameter's unit.
    """
    members = list(module.parameters())
    is_called = type(module).forward is not torch.nn.Module.forward  # unlike a ModuleList
    if is_called and len({order_of(parameter) for parameter in members}) == 1:
        yield module, members
        return
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        if any(True for _ in child.parameters()):
            yield from _parts(child, order_of)
