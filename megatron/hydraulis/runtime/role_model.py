"""A role's model and its hooks: forward waits for parameters, backward tells of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime.arena import Arena, ArenaMemory
from megatron.hydraulis.runtime.executor import RoleModel
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_role_model
from megatron.hydraulis.runtime.passes import GatherPass, ScatterPass, at_exit
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.role import Role


class BoundRole:
    """The model of one role in its groups, bound to its arena.

    Shared by all strategies in which this rank has the same role beside the same ranks. Hooks are
    set once; within `regrouping` they lead to the passes at hand.

    Args:
        definition: the model.
        role: this rank's.
        groups: that the role's modules communicate in.
        layout: the canonical layout.
        memory: of all arenas of the rank.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        role: Role,
        groups: ProcessGroupCollection,
        layout: CanonicalLayout,
        memory: ArenaMemory,
    ) -> None:
        self.role = role
        module = build_role_model(definition, role, groups)
        self.arena = Arena(layout, role, memory)
        parameters = self.arena.bind(module)
        self.model = RoleModel(module, groups)
        held = _buckets_of_parameters(layout)
        self.buckets_of = {index: held[index] for index in parameters}
        """Buckets that each parameter lies in, by index into ``layout.parameters``."""
        self._gather: GatherPass | None = None
        self._scatter: ScatterPass | None = None
        self._held_buckets = sorted({b for buckets in self.buckets_of.values() for b in buckets})
        index_of = {id(parameter): index for index, parameter in parameters.items()}
        for part, members in _parts(module, lambda p: layout.parameters[index_of[id(p)]].unit):
            buckets = sorted({b for p in members for b in held[index_of[id(p)]]})
            part.register_forward_pre_hook(partial(self._before_forward, tuple(buckets)))
        for index in self.buckets_of:
            parameters[index].register_post_accumulate_grad_hook(
                partial(self._after_gradient, index)
            )

    @contextmanager
    def regrouping(self, gather: GatherPass, scatter: ScatterPass | None = None) -> Iterator[None]:
        """Within, forward waits for the gather, and the last backward feeds the scatter."""
        config: Any = self.model.model.config
        self._gather, self._scatter = gather, scatter
        if scatter is not None:
            config.no_sync_func = partial(at_exit, scatter.begin_last_backward)
        try:
            yield
            if gather.num_missing_of(self._held_buckets):
                raise HydraulisError(
                    "parameters of the model were used without the module that holds them being "
                    "called, so that nothing waited for their gather; call modules as functions, "
                    "or pass --no-regroup-overlap"
                )
        finally:
            self._gather = self._scatter = config.no_sync_func = None

    def _before_forward(self, buckets: Sequence[int], module: Any, inputs: Any) -> None:
        if self._gather is not None:
            self._gather.need(buckets)

    def _after_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self._scatter is not None:
            self._scatter.arrived(index)


def _parts(module: torch.nn.Module, unit_of: Any) -> Iterator[tuple[torch.nn.Module, list[Any]]]:
    """The largest modules that are called and whose parameters all belong to one unit, with these.

    A module of several units comes with the parameters that it holds itself, if any.
    """
    members = list(module.parameters())
    is_called = type(module).forward is not torch.nn.Module.forward  # unlike a ModuleList
    if is_called and len({unit_of(parameter) for parameter in members}) == 1:
        yield module, members
        return
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        if any(True for _ in child.parameters()):
            yield from _parts(child, unit_of)


def _buckets_of_parameters(layout: CanonicalLayout) -> dict[int, list[int]]:
    found: dict[int, dict[int, None]] = {}
    for bucket in layout.buckets:
        for piece in bucket.pieces:
            found.setdefault(piece.parameter, {})[bucket.index] = None
    return {parameter: list(buckets) for parameter, buckets in found.items()}
