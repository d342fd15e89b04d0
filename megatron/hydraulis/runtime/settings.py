"""What this rank needs to run each strategy of a pool, built at first use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.hydraulis.runtime.arena import Arena, ArenaMemory
from megatron.hydraulis.runtime.executor import RoleModel
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.runtime.process_groups import GroupRegistry
from megatron.hydraulis.runtime.regroup import Regrouper
from megatron.hydraulis.runtime.role_model import BoundRole
from megatron.hydraulis.runtime.shards import CanonicalShards
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.role import Role, role_of

__all__ = ["Setting", "Settings", "roles_of"]


@dataclass(frozen=True)
class Setting:
    """What this rank needs to run one strategy."""

    strategy: Strategy
    role: Role | None
    bound: BoundRole | None
    regrouper: Regrouper

    @property
    def model(self) -> RoleModel | None:
        """None where the rank is idle."""
        return None if self.bound is None else self.bound.model

    @property
    def arena(self) -> Arena | None:
        """None where the rank is idle."""
        return None if self.bound is None else self.bound.arena

    @property
    def num_elements(self) -> int:
        """Of each arena storage."""
        return 0 if self.bound is None else self.bound.arena.num_elements


class Settings:
    """Those of all strategies of a pool on this rank.

    Args:
        definition: the model.
        pool: the strategies.
        groups: has the groups of all of them.
        layout: of the canonical shards.
        shards: of this rank.
        memory: that all models are bound to.
        dtype: of parameters on their way.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        pool: Pool,
        groups: GroupRegistry,
        layout: CanonicalLayout,
        shards: CanonicalShards,
        memory: ArenaMemory,
        dtype: torch.dtype,
    ) -> None:
        self._definition = definition
        self._pool = pool
        self._groups = groups
        self._layout = layout
        self._shards = shards
        self._memory = memory
        self._dtype = dtype
        self._found: dict[str, Setting] = {}
        self._bound_roles: dict[object, BoundRole] = {}
        self._is_training = True

    def __contains__(self, strategy_name: str) -> bool:
        """Whether it is built."""
        return strategy_name in self._found

    def of(self, strategy_name: str) -> Setting:
        """The setting of a strategy; no collective."""
        found = self._found.get(strategy_name)
        if found is None:
            found = self._build(self._pool.strategy(strategy_name))
            self._found[strategy_name] = found
        return found

    def set_training(self, training: bool) -> None:
        """`train()` or `eval()` on every model built so far, and on those that will be."""
        self._is_training = training
        for bound in self._bound_roles.values():
            bound.model.model.train(training)

    def _build(self, strategy: Strategy) -> Setting:
        roles = roles_of(strategy, self._definition)
        role = roles[dist.get_rank()]
        bound = None if role is None else self._bound_role(strategy, role)
        regrouper = Regrouper(
            self._layout,
            roles,
            self._shards,
            None if bound is None else bound.arena,
            wire_dtype=self._dtype,
            group=self._groups.regroup,
            ranks_per_node=self._pool.ranks_per_node,
        )
        return Setting(strategy, role, bound, regrouper)

    def _bound_role(self, strategy: Strategy, role: Role) -> BoundRole:
        """The model of the role, shared by strategies that give this rank the same neighbours."""
        groups = self._groups.collection(strategy)
        assert groups is not None
        key = (role, *(tuple(dist.get_process_group_ranks(g)) for g in (groups.tp, groups.pp)))
        found = self._bound_roles.get(key)
        if found is None:
            found = BoundRole(self._definition, role, groups, self._layout, self._memory)
            found.model.model.train(self._is_training)
            self._bound_roles[key] = found
        return found


def roles_of(strategy: Strategy, definition: ModelDefinition) -> list[Role | None]:
    """Of every rank; None where it is idle."""
    return [
        role_of(
            strategy,
            rank,
            num_layers=definition.transformer.num_layers,
            tied_embeddings=definition.tied_embeddings,
        )
        for rank in range(strategy.num_ranks)
    ]
