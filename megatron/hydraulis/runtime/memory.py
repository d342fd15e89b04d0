"""Memory of a rank: measured, tried out before training, and run out of.

`run_memory_trial` runs the largest micro-batches of a strategy once before training. Communicators,
workspaces and the allocator's blocks then exist before the first iteration, and limits that exceed
the memory are reduced before a plan relies on them. Training is unaffected: gradients are thrown
away, parameters are not touched, random generators are restored. A micro-batch far below the limit
runs first, and the line through it gives the size of the second, so that memory normally does not
run out in the trial.

Where memory does run out, a replica of one rank can recover: it communicates with nobody while it
computes, except for regrouping. It throws its micro-batches away and takes part in the rest of the
iteration; the others learn of it with the loss, and nobody updates. In a replica of several ranks
the others wait in a collective that this rank will never enter; with NCCL only the end of the
process ends that, and the launcher ends the job.
"""

from __future__ import annotations

import gc
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron.hydraulis.cost_model.limits import (
    MemoryTrial,
    after_failure,
    allowed_tokens,
)
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import OutOfMemoryError
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.strategy import Scheme, Strategy

if TYPE_CHECKING:
    from megatron.hydraulis.runtime.engine import Engine

__all__ = [
    "CountedForwardStep",
    "CpuMemory",
    "CudaMemory",
    "LoneOutOfMemoryError",
    "MemoryMeter",
    "OutOfMemory",
    "SharedOutOfMemoryError",
    "TrialResult",
    "allocator_peaks",
    "is_out_of_memory",
    "memory_meter",
    "recover_from_oom",
    "release_cached_memory",
    "run_memory_trial",
    "trial_lengths",
]

HEADROOM_SHARE = 0.03
"""Share of a device's memory that planned micro-batches leave free, because packs of other lengths
leave other fragments."""
SHARE_OF_FREE_MEMORY = 0.9
"""Share of a machine's free memory that the ranks on its CPU may take; the rest is for other
programs."""
FIRST_SHARE = 1 / 8
"""Size of the first micro-batch of a trial, as a share of the limit."""
MAX_ATTEMPTS = 4
"""Micro-batches of a scheme that a trial runs, each smaller than the one that ran out of memory."""

_BYTES_PER_GIB = 2**30
_BYTES_PER_KIB = 1024
_RESET_PEAK = "5"
"""Written to clear_refs (Linux, proc(5)): sets the peak resident set size to the present one."""
_NO_MEMORY_ON_CPU = "can't allocate memory"
"""In the message of torch's CPU allocator."""


class MemoryMeter(Protocol):
    """Memory that this rank uses, and how much it may use."""

    def restart(self) -> int:
        """Forget the peak so far; returns the bytes in use now."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes in use since `restart`."""
        ...

    def capacity_bytes(self) -> int:
        """Most bytes that may be in use."""
        ...


class CudaMemory:
    """The current device: what torch's allocator holds, fragments included, and everything else on
    it, such as communicators and other processes."""

    def restart(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self._other_bytes() + int(torch.cuda.memory_reserved())

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return self._other_bytes() + int(torch.cuda.max_memory_reserved())

    def capacity_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1] * (1 - HEADROOM_SHARE))

    def _other_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - int(torch.cuda.memory_reserved()))


class CpuMemory:
    """Resident memory of this process, interpreter included.

    Where the system does not allow a reset (not Linux), the peak is that of the process so far;
    where it does not report its free memory, there is no limit.
    """

    def __init__(self, num_ranks_of_node: int) -> None:
        free_bytes = _kib_entry_bytes(Path("/proc/meminfo"), "MemAvailable")
        self._capacity_bytes = sys.maxsize
        if free_bytes is not None:
            share_bytes = int(SHARE_OF_FREE_MEMORY * free_bytes / num_ranks_of_node)
            self._capacity_bytes = self.restart() + share_bytes

    def restart(self) -> int:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        return self.peak_bytes()

    def peak_bytes(self) -> int:
        return _peak_resident_bytes()

    def capacity_bytes(self) -> int:
        return self._capacity_bytes


def memory_meter(num_ranks_of_node: int) -> MemoryMeter:
    """The meter of this rank's device, which is the CPU where there is no other."""
    return CudaMemory() if torch.cuda.is_available() else CpuMemory(num_ranks_of_node)


def allocator_peaks() -> dict[str, int]:
    """Peaks of torch's allocator since the last call, by field of a record; none without CUDA."""
    if not torch.cuda.is_available():
        return {}
    peaks = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks


def release_cached_memory() -> None:
    """Give memory that an abandoned micro-batch held back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _peak_resident_bytes() -> int:
    peak_bytes = _kib_entry_bytes(Path("/proc/self/status"), "VmHWM")
    if peak_bytes is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB
    return peak_bytes


def _kib_entry_bytes(path: Path, name: str) -> int | None:
    """An entry of a file of Linux's /proc; None where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found.group(1)) * _BYTES_PER_KIB


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of the trial for one scheme of a strategy; equal on every rank."""

    strategy: str
    scheme: Scheme
    """Without ``~``: a scheme that splits its cp ranks has a result for each size of group."""
    promised_tokens: int
    """The limit before."""
    allowed_tokens: int
    """The limit after."""
    trial: MemoryTrial
    """The last one, of the rank with the least memory to spare."""

    @property
    def text(self) -> str:
        """A line for the log."""
        line = (
            f"memory trial: strategy '{self.strategy}', {self.scheme}: micro-batches of "
            f"{self.trial.num_tokens:,} tokens take {self.trial.peak_bytes / _BYTES_PER_GIB:.2f} "
            f"of {self.trial.capacity_bytes / _BYTES_PER_GIB:.2f} GiB"
        )
        if self.allowed_tokens < self.promised_tokens:
            line += f"; limit {self.promised_tokens:,} -> {self.allowed_tokens:,} tokens"
        return line


def run_memory_trial(
    engine: Engine,
    strategy: Strategy,
    limits: Callable[[Scheme], int],
    forward_step: ForwardStep,
    meter: MemoryMeter,
    *,
    longest_tokens: int,
    vocab_size: int,
) -> tuple[TrialResult, ...]:
    """Run the largest micro-batches of a strategy. Collective over all ranks.

    Args:
        engine: of the run; parameters, optimizer and random generators stay as they are.
        strategy: of the engine's pool.
        limits: tokens of a micro-batch, by scheme without ``~``; equal on every rank. A scheme with
            a limit below 1 is skipped, because no micro-batch runs as it.
        forward_step: upstream's signature.
        meter: of this rank.
        longest_tokens: of a sequence.
        vocab_size: random tokens are below it.

    Returns:
        One result for each scheme that micro-batches may run as, in the strategy's order, wide
        groups of a scheme first.

    Raises:
        OutOfMemoryError: memory ran out on one rank of several of a replica, or in every attempt.
    """
    groups = dict.fromkeys(group for scheme in strategy.schemes for group in scheme.group_schemes)
    promised = {group: limit for group in groups if (limit := limits(group)) >= 1}
    trial = _Trial(engine, strategy, forward_step, meter, longest_tokens, vocab_size)
    with _random_generators_kept(engine.device):
        return trial.results(promised)


def trial_lengths(num_tokens: int, longest_tokens: int, scheme: Scheme) -> tuple[int, ...]:
    """Lengths of as few sequences as fill a row of so many tokens, up to less than a quantum."""
    quantum = scheme.token_quantum
    each = max(quantum, min(longest_tokens, num_tokens) // quantum * quantum)
    num_whole, rest = divmod(num_tokens // quantum * quantum, each)
    return (each,) * num_whole + ((rest,) if rest else ())


_Measured = Sequence[tuple[Scheme, MemoryTrial]]
"""Of every rank that had work, in groups of each size that its replica may have."""


@dataclass(frozen=True)
class _Trial:
    engine: Engine
    strategy: Strategy
    forward_step: ForwardStep
    meter: MemoryMeter
    longest_tokens: int
    vocab_size: int

    def results(self, promised: dict[Scheme, int]) -> tuple[TrialResult, ...]:
        first = _micro_batch_tokens(promised, FIRST_SHARE)
        # Creates what does not depend on tokens before memory is measured: the communicators of all
        # groups, staging buffers, the gradients' memory.
        self._measure(first)
        measured = self._measure(first)
        allowed = _allowed(promised, measured)
        for _ in range(MAX_ATTEMPTS):
            second = _micro_batch_tokens(allowed)
            measured, failed = self._try(second)
            if not failed:
                allowed = _allowed(allowed, measured)
                break
            allowed |= {scheme: after_failure(second[scheme], scheme) for scheme in failed}
        else:
            raise OutOfMemoryError(
                f"strategy '{self.strategy.name}': {MAX_ATTEMPTS} attempts ran out of memory, the "
                f"last with micro-batches of "
                + ", ".join(f"{num} tokens on {scheme}" for scheme, num in second.items())
                + "; remove the strategy from the pool, or give a replica more ranks"
            )
        return tuple(
            TrialResult(
                strategy=self.strategy.name,
                scheme=scheme,
                promised_tokens=promised[scheme],
                allowed_tokens=allowed[scheme],
                trial=max(
                    (trial for of, trial in measured if of == scheme),
                    key=lambda trial: trial.peak_bytes - trial.capacity_bytes,
                ),
            )
            for scheme in promised
        )

    def _try(self, num_tokens: dict[Scheme, int]) -> tuple[_Measured, set[Scheme]]:
        """The measurements, or the schemes whose micro-batches ran out of memory."""
        try:
            return self._measure(num_tokens), set()
        except SharedOutOfMemoryError as error:
            failed = None if error.own is None else error.own.group
        release_cached_memory()
        return [], set(_gathered(failed))

    def _measure(self, num_tokens: dict[Scheme, int]) -> _Measured:
        num_rounds = max(len(scheme.group_schemes) for scheme in self.strategy.schemes)
        return [
            measured
            for number in range(num_rounds)
            for measured in self._measure_round(number, num_tokens)
        ]

    def _measure_round(self, number: int, num_tokens: dict[Scheme, int]) -> _Measured:
        """Run as many micro-batches as the pipeline holds, in each replica's groups of a number.

        Replicas with fewer sizes of groups have nothing to run.
        """
        engine, name = self.engine, self.strategy.name
        mine = self.strategy.replica_of(engine.rank)
        groups = () if mine is None else mine.scheme.group_schemes[number : number + 1]
        group = next((group for group in groups if group in num_tokens), None)
        batches = [] if group is None else self._batches(group, num_tokens[group])
        engine.gather(name)
        engine.finish_regrouping()
        idle_bytes = self.meter.restart()
        engine.forward_backward(name, batches, self.forward_step)
        engine.rehearse_update()
        own = None
        if group is not None:
            trial = MemoryTrial(
                num_tokens=num_tokens[group],
                idle_bytes=idle_bytes,
                peak_bytes=max(idle_bytes, self.meter.peak_bytes()),
                capacity_bytes=self.meter.capacity_bytes(),
            )
            own = (group, trial)
        return _gathered(own)

    def _batches(self, group: Scheme, num_tokens: int) -> list[PackedBatch]:
        """This rank's part of random micro-batches of a group, as many as the pipeline is deep."""
        replica = self.strategy.replica_of(self.engine.rank)
        position = None if replica is None else replica.position_of(self.engine.rank)
        assert position is not None
        lengths = trial_lengths(num_tokens, self.longest_tokens, group)
        rng = np.random.default_rng((num_tokens, group.num_ranks))  # equal on a replica's ranks
        packed = pack(
            [rng.integers(0, self.vocab_size, size=length + 1) for length in lengths],
            group.tp,
            context_size=group.cp,
            context_rank=position.cp % group.cp,
        )
        return [packed.to(self.engine.device)] * group.pp


def _micro_batch_tokens(limits: dict[Scheme, int], share: float = 1.0) -> dict[Scheme, int]:
    """A share of each limit, as a positive multiple of the scheme's quantum."""
    return {
        scheme: max(1, int(limit * share) // scheme.token_quantum) * scheme.token_quantum
        for scheme, limit in limits.items()
    }


def _allowed(limits: dict[Scheme, int], measured: _Measured) -> dict[Scheme, int]:
    return {
        scheme: allowed_tokens(limit, scheme, (trial for of, trial in measured if of == scheme))
        for scheme, limit in limits.items()
    }


def _gathered(own: Any) -> list[Any]:
    """The values of all ranks that have one. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [each for each in everyone if each is not None]


@contextmanager
def _random_generators_kept(device: torch.device) -> Iterator[None]:
    """Restores torch's generators, on the CPU and the device, and those of Megatron's tracker."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    tracker.set_states(states)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """Where a rank ran out of memory."""

    rank: int
    strategy: str
    scheme: Scheme
    """Of the rank's replica."""
    context_size: int
    """Ranks that share the row: those of the wave's group where the scheme splits its cp ranks."""
    micro_batch: int
    """Of the rank's replica, from 0."""
    num_tokens: int
    """Of the row, over all ranks that share it, padding included."""
    held_bytes: int
    """In use on this rank when it asked for more; on a CPU the most since it was last measured."""

    @property
    def group(self) -> Scheme:
        """The scheme whose limit the row exceeded."""
        return self.scheme.of_context_group(self.context_size)

    @property
    def text(self) -> str:
        """Which rank ran out of memory with what, for an error or the log."""
        where = f"{self.scheme}"
        if self.scheme.splits_cp:
            where = f"{self.context_size} cp ranks of {where}"
        return (
            f"rank {self.rank} ran out of memory in micro-batch {self.micro_batch} of strategy "
            f"'{self.strategy}', {self.num_tokens:,} tokens on {where}, with "
            f"{self.held_bytes / _BYTES_PER_GIB:.2f} GiB in use"
        )


class SharedOutOfMemoryError(OutOfMemoryError):
    """Raised on every rank, after all have finished the collectives of the iteration."""

    def __init__(self, own: OutOfMemory | None, num_ranks_without_memory: int) -> None:
        super().__init__(
            f"number of other ranks that ran out of memory: {num_ranks_without_memory}"
            if own is None
            else own.text
        )
        self.own = own
        """What happened on this rank, if it is one of them."""


class LoneOutOfMemoryError(OutOfMemoryError):
    """Raised on one rank, while the others of its replica wait for it."""

    def __init__(self, own: OutOfMemory) -> None:
        super().__init__(
            f"{own.text}; the rest of the replica ({own.scheme}) waits for it, "
            "so this run cannot go on: start it again with a lower "
            "--max-tokens-per-micro-batch, or give the replica more ranks"
        )
        self.own = own


class CountedForwardStep:
    """A forward step that counts the micro-batches it was called for."""

    def __init__(self, forward_step: ForwardStep) -> None:
        self._forward_step = forward_step
        self.num_begun = 0

    def __call__(
        self, data_iterator: Iterator[PackedBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        self.num_begun += 1
        return self._forward_step(data_iterator, model)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY_ON_CPU in str(error)


def recover_from_oom(
    error: BaseException,
    rank: int,
    strategy: Strategy,
    batches: Sequence[PackedBatch],
    num_begun: int,
) -> OutOfMemory:
    """What a rank without memory reports to the others, if it can go on with the iteration.

    Args:
        error: of the allocator.
        rank: this one.
        strategy: of the iteration.
        batches: this rank's micro-batches.
        num_begun: number of them whose forward began.

    Raises:
        LoneOutOfMemoryError: other ranks of the replica wait for this one.
    """
    mine = strategy.replica_of(rank)
    if mine is None or not batches:
        raise error
    index = max(0, num_begun - 1)
    found = OutOfMemory(
        rank=rank,
        strategy=strategy.name,
        scheme=mine.scheme,
        context_size=batches[index].context_size,
        micro_batch=index,
        num_tokens=batches[index].tokens.size(-1) * batches[index].context_size,
        held_bytes=(
            torch.cuda.memory_reserved() if torch.cuda.is_available() else _peak_resident_bytes()
        ),
    )
    if mine.scheme.num_ranks > 1:
        raise LoneOutOfMemoryError(found) from error
    return found
