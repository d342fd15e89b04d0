"""What the arenas of all ranks have of the parameters, and the sizes of their memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.arena import ArenaMemory
from megatron.hydraulis.runtime.passes import GatherPass, StallTimer
from megatron.hydraulis.runtime.strategy_runtime import StrategyRuntime, StrategyRuntimes
from megatron.hydraulis.runtime.track import Track
from megatron.hydraulis.transfer.role import Role, held_buckets


class ArenaContents:
    """The strategy for which arenas have the parameters; frozen ones that they still have are not
    gathered again.

    All of it follows from the calls that all ranks make, never from what a rank has, so that it is
    the same on all of them.

    Args:
        runtimes: of the pool's strategies, whose arenas are in ``memory``.
        track: runs the gathers.
        timer: of compute's waits for them.
        overlap: see `RuntimeEngine`.
        accumulates: likewise.
    """

    def __init__(
        self,
        shards: CanonicalShards,
        memory: ArenaMemory,
        runtimes: StrategyRuntimes,
        track: Track,
        timer: StallTimer,
        *,
        overlap: bool,
        accumulates: bool,
    ) -> None:
        self._shards = shards
        self._memory = memory
        self._runtimes = runtimes
        self._track = track
        self._timer = timer
        self._overlap = overlap
        self._accumulates = accumulates
        self.current: tuple[str, GatherPass] | None = None
        """The strategy whose current parameters are in the arena or on their way there."""
        self._held_roles: Sequence[Role | None] | None = None
        """The role of every rank for which its arena has, or will have, the frozen parameters; None
        if an arena may have lost them."""
        self._gathered_before: set[str] = set()
        """Strategies that have been gathered."""

    def begin_gather(self, strategy_name: str) -> GatherPass:
        """Size the arena for the strategy; nothing is posted yet. The gather before has ended."""
        self.current = None
        memory = self._memory
        if strategy_name not in self._gathered_before:
            self._gathered_before.add(strategy_name)
            # Free the arenas, whose contents are no longer needed, while the model is built.
            memory.return_gradients(self._shards)
            self.free()
        runtime = self._runtimes.of(strategy_name)
        # Free what is no longer needed first: never hold both. Gradients of shards may be in use
        # until the next ones are computed.
        if self._accumulates:
            memory.release_gradients_unless(runtime.num_gradients)
        before, self._held_roles = self._held_roles, None  # lost if there is no memory for others
        memory.size_parameters(runtime.num_parameters)
        roles = runtime.regrouper.roles
        gather = GatherPass(
            runtime.regrouper,
            self._track,
            self._timer,
            held=held_buckets(self._shards.layout, before, roles),
            waits_at_once=not self._overlap,
        )
        self.current = (strategy_name, gather)
        self._held_roles = roles
        return gather

    def size_gradients(self, runtime: StrategyRuntime, *, adds: bool) -> None:
        """Size the gradients' memory for the strategy, with those of the shards where they have
        none of their own.

        adds: whether gradients of the strategy are added to those of the shards.
        """
        if self._accumulates or adds:
            self._memory.return_gradients(self._shards)
            self._memory.size_gradients(runtime.num_gradients)
        else:
            place = runtime.place_of_shards(self._shards)
            self._memory.lend_gradients(self._shards, place, runtime.num_gradients)

    def lose_frozen(self) -> None:
        """Say on all ranks that an arena may have lost the frozen parameters, or has old ones."""
        self._held_roles = None

    def free(self) -> None:
        """Free the arenas, with the gradients of shards that are in them."""
        self.lose_frozen()
        self._memory.size_parameters(0)
        self._memory.size_gradients(0)
