"""Process groups for a pool of strategies, and steps that all ranks take together.

Groups are created once and looked up by their ranks. If one rank fails in a step, all raise its
error instead of waiting for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.hydraulis.errors import (
    Failure,
    HydraulisError,
    StrategyError,
    failure_of,
    raise_first,
)
from megatron.hydraulis.strategy import Strategy

logger = logging.getLogger(__name__)

GroupRanks = tuple[int, ...]


def group_of_self(timeout: timedelta | None, description: str) -> dist.ProcessGroup:
    """A group of this rank alone; no other rank takes part in making it."""
    return _new_group(
        [dist.get_rank()], timeout=timeout, use_local_synchronization=True, group_desc=description
    )


def _new_group(ranks: list[int] | None = None, **named: Any) -> Any:
    """A new group; ranks outside get a marker object, for which torch's type allows."""
    return dist.new_group(ranks, **named)


def _uses_nccl() -> bool:
    """True if the world has NCCL, alone or by device, as in ``cpu:gloo,cuda:nccl``."""
    return "nccl" in dist.get_backend()


def of_all_ranks[Value](own: Value) -> list[Value]:
    """The value of every rank, by rank: any object that can be pickled. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def on_all_ranks[T](action: Callable[[], T], what: str) -> T:
    """Collective: run it on every rank; if it fails on any, raise on all.

    Args:
        action: must not contain collectives.
        what: start of the error's message, such as "iteration 4 cannot be saved to DIR".

    Raises:
        HydraulisError: with the class of the first failing rank's error if it is one of ours,
            else CheckpointError. On the failing rank that error is its cause.
    """
    result: T | None = None
    failure: Failure | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure, cause = failure_of(error, what), error
    try:
        raise_first(of_all_ranks(failure), what)
    except HydraulisError as error:
        raise error from cause
    return result  # type: ignore[return-value]


def on_rank_0[T](action: Callable[[], T], what: str) -> T:
    """Collective: run it on rank 0 and return its result, or raise its error, on all ranks."""
    results: list[T | None] = [None]

    def run() -> None:
        if dist.get_rank() == 0:
            results[0] = action()

    on_all_ranks(run, what)
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def agreed_problems(problems: Sequence[str]) -> list[str]:
    """Collective: the problems found by any rank, each once."""
    return sorted({problem for found in of_all_ranks(list(problems)) for problem in found})


class GroupRegistry:
    """All process groups of a job, keyed by rank tuple.

    Creation is collective: every rank creates the same registry from the same strategies, in the
    same order. Look-up is local. Ranks keep their order in the strategy: sorting would silently
    reverse a pipeline on ranks (3, 1).
    """

    def __init__(self, strategies: Iterable[Strategy], *, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._rank = dist.get_rank()
        self._groups: dict[GroupRanks, dist.ProcessGroup] = {}
        self._columns: dict[GroupRanks, dist.ProcessGroup] = {}
        self._groups[(self._rank,)] = group_of_self(timeout, "hydraulis_self")
        self.regroup: dist.ProcessGroup = _new_group(
            timeout=timeout, group_desc="hydraulis_regroup"
        )
        """All ranks, for regrouping only: no other collectives are interleaved with it."""
        if _uses_nccl():
            # All ranks create a communicator at its first use, but in an exchange by pairs some
            # ranks have nothing to do.
            dist.all_reduce(torch.zeros(1, device=device_of_job()), group=self.regroup)
        self.num_created = 2
        for strategy in strategies:
            self.add_strategy(strategy)

    def add_strategy(self, strategy: Strategy) -> None:
        """Create the groups of ``strategy`` that do not exist yet. Collective over all ranks."""
        for ranks in strategy.rank_groups:
            if ranks in self._groups:
                continue
            self._groups[ranks] = _new_group(
                list(ranks), timeout=self._timeout, sort_ranks=False, group_desc="hydraulis"
            )
            self.num_created += 1
        for replica in strategy.replicas:
            for ranks in replica.column_groups:
                if ranks not in self._columns:
                    self._columns[ranks] = _new_group(
                        list(ranks),
                        timeout=self._timeout,
                        sort_ranks=False,
                        group_desc="hydraulis_columns",
                    )
                    self.num_created += 1
        logger.info("process groups after strategy '%s': %d", strategy, self.num_created)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of exactly these ranks in this order.

        Raises:
            StrategyError: no such group was created at start-up.
        """
        found = self._groups.get(tuple(ranks))
        if found is None:
            raise StrategyError(
                f"ranks {tuple(ranks)} have no process group; all groups are created at start-up: "
                "name every strategy of the run before it starts"
            )
        return found

    def destroy(self) -> None:
        """Release sockets, pipes and threads of all groups; every rank does so in the same order.

        Nothing may use the groups afterwards. gloo releases a group when the last reference to it
        is gone.
        """
        for groups in (self._groups, self._columns):
            for group in groups.values():
                dist.destroy_process_group(group)
            groups.clear()
        dist.destroy_process_group(self.regroup)
        del self.regroup

    @property
    def of_self(self) -> dist.ProcessGroup:
        return self._groups[(self._rank,)]

    def collection(self, strategy: Strategy) -> ProcessGroupCollection | None:
        """The groups for Megatron's modules and schedules on this rank; None where it is idle.

        The embedding group is None: gradients of tied embeddings are added on the canonical shards.
        For modules and schedules a rank is alone in its cp group (docs/architecture.md explains
        what this prevents); each micro-batch carries its own group, see `context_group`.
        """
        replica = strategy.replica_of(self._rank)
        if replica is None:
            return None
        position = replica.position_of(self._rank)
        assert position is not None
        collection = single_rank_collection(self.of_self)
        collection.tp = self.group(replica.tp_ranks(position.stage, position.cp))
        if replica.scheme.ep == 1:
            # Tensor parallelism cuts every expert as it cuts any MLP.
            collection.expt_tp = collection.tp_ep = collection.tp
        else:
            ranks = replica.ep_ranks(position.stage, position.cp, position.tp)
            collection.ep = collection.tp_ep = self.group(ranks)
        collection.pp = self.group(replica.pp_ranks(position.cp, position.tp))
        return collection

    def columns(self, strategy: Strategy) -> dict[tuple[int, int], dist.ProcessGroup]:
        """The groups that share weights with this rank, for exchanging these only: attention may
        use its own group of the same ranks at the same time.

        Returns:
            Each by the number of this rank in it, and the number of its ranks.

        Raises:
            StrategyError: there is none.
        """
        replica = strategy.replica_of(self._rank)
        found = {
            (ranks.index(self._rank), len(ranks)): self._columns[ranks]
            for ranks in (() if replica is None else replica.column_groups)
            if self._rank in ranks
        }
        if found:
            return found
        raise StrategyError(
            f"rank {self._rank} shares no weights in strategy '{strategy.name}'; only the cp ranks "
            "of a scheme with fs do"
        )

    def context_group(self, strategy: Strategy, size: int, place: int) -> dist.ProcessGroup:
        """The group of ``size`` cp ranks in which this rank is number ``place``, from 0.

        Raises:
            StrategyError: this rank is idle, or such a group is not cut from its replica.
        """
        replica = strategy.replica_of(self._rank)
        position = None if replica is None else replica.position_of(self._rank)
        if replica is None or position is None:
            raise StrategyError(
                f"rank {self._rank} is idle in strategy '{strategy.name}' and in no context group; "
                "a plan gives work to replicas only"
            )
        offset = position.cp - place
        scheme = replica.scheme
        sizes = [group.cp for group in scheme.group_schemes]
        if size not in sizes or not 0 <= place < size or offset % size:
            raise StrategyError(
                f"rank {self._rank} cannot be number {place} of a context group of {size}: it is "
                f"cp rank {position.cp} of a replica {scheme}, whose groups are "
                + ("aligned powers of two" if scheme.splits_cp else f"of all {scheme.cp} cp ranks")
                + "; pack micro-batches by the plan"
            )
        columns = replica.cp_ranks(position.stage, position.tp)
        return self.group(columns[offset : offset + size])


def single_rank_collection(of_self: dist.ProcessGroup) -> ProcessGroupCollection:
    """A collection in which this rank is alone in every model-parallel group."""
    collection = ProcessGroupCollection()
    names = "tp pp cp mp tp_cp tp_dp_cp ep expt_tp expt_dp tp_ep tp_ep_pp"
    for name in names.split():
        setattr(collection, name, of_self)
    collection.hcp = [of_self]
    for name in ("embd", "pos_embd", "gtp_remat", "expt_gtp_remat"):
        setattr(collection, name, None)
    return collection


def training_loop_collection(of_self: dist.ProcessGroup) -> ProcessGroupCollection:
    """The groups for upstream's loop: one model per rank, all ranks one data-parallel group.

    The loop takes numbers of samples from ``args.data_parallel_size``, not from this group: it is
    1, so that samples are counted once and not once per rank. The train step checks the count
    against the plans.
    """
    collection = single_rank_collection(of_self)
    world = dist.group.WORLD
    collection.embd = of_self
    collection.pos_embd = of_self
    for name in ("dp", "dp_cp", "dp_cp_gtp_remat", "expt_dp", "intra_dp_cp", "tp_dp_cp"):
        setattr(collection, name, world)
    return collection


class LocalGroup:
    """Replaces a process group for models on `meta`, which are never run."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def local_collection() -> ProcessGroupCollection:
    """A collection for building a whole model on `meta` without any process group."""
    return single_rank_collection(LocalGroup())  # type: ignore[arg-type]


def device_of_job() -> torch.device:
    """Device of the collectives' tensors: the current CUDA device, or the CPU with gloo."""
    if dist.is_initialized() and _uses_nccl():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait."""
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def provide_memory_buffer() -> None:
    """Create the buffer into which sequence-parallel linear layers gather their input: upstream
    creates it with its global groups, which stay uninitialised here."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
