"""The largest micro-batches of every strategy, run once before training: what memory they take.

So communicators, workspaces and the allocator's blocks are there before the first iteration, and a
limit that memory does not bear out is lowered before a plan relies on it. Nothing of it reaches
training: gradients are thrown away, parameters are not touched, random generators are put back.

A micro-batch far below the limit is run first and the line through it says how large the second may
be. So memory normally does not run out here, where on one rank of several it could not be mended:
the others would be waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.forward_step import ForwardStep
from megatron.hydraulis.runtime.out_of_memory import SharedOutOfMemoryError, free_what_is_left
from megatron.hydraulis.strategy import Scheme, Strategy

__all__ = ["MemoryGauge", "TrialResult", "run_memory_trial", "trial_lengths"]

FIRST_SHARE = 1 / 8
"""Of the limit, what the micro-batch holds that is run first."""
MAX_ATTEMPTS = 4
"""Micro-batches of a scheme that are run, each smaller than the one before that found no memory."""
HEADROOM_SHARE = 0.03
"""Of a device's memory, what stays free of planned micro-batches: packs of other lengths leave
other fragments."""


class MemoryGauge(Protocol):
    """What memory this rank uses, of what there is."""

    def restart(self) -> int:
        """Forget the peak so far; bytes in use now."""
        ...

    def peak_bytes(self) -> int:
        """Most since `restart`."""
        ...

    def capacity_bytes(self) -> int:
        """What may be used."""
        ...


class CudaGauge:
    """The current device: what torch's allocator holds, fragments included, and what else lies
    there, such as communicators."""

    def restart(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self._beside_bytes() + int(torch.cuda.memory_reserved())

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return self._beside_bytes() + int(torch.cuda.max_memory_reserved())

    def capacity_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1] * (1 - HEADROOM_SHARE))

    def _beside_bytes(self) -> int:
        """Context, kernels, communicators, and other processes."""
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - int(torch.cuda.memory_reserved()))


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What came out for one scheme of a strategy; equal on every rank."""

    strategy: str
    scheme: Scheme
    """Without ``~``: of a scheme that splits its cp ranks, each size of group by itself."""
    promised_tokens: int
    """The limit before."""
    allowed_tokens: int
    """The limit after."""
    trial: MemoryTrial
    """The last one, of the rank with the least to spare."""

    @property
    def text(self) -> str:
        """A line for the log."""
        gib = 2**30
        line = (
            f"memory trial: strategy '{self.strategy}', {self.scheme}: micro-batches of "
            f"{self.trial.num_tokens:,} tokens take {self.trial.peak_bytes / gib:.2f} of "
            f"{self.trial.capacity_bytes / gib:.2f} GiB"
        )
        if self.allowed_tokens < self.promised_tokens:
            line += f"; limit {self.promised_tokens:,} -> {self.allowed_tokens:,} tokens"
        return line


def run_memory_trial(
    engine: Engine,
    strategy: Strategy,
    limits: Callable[[Scheme], int],
    forward_step: ForwardStep,
    gauge: MemoryGauge,
    *,
    longest_tokens: int,
    vocab_size: int,
) -> tuple[TrialResult, ...]:
    """Run the largest micro-batches of a strategy. Collective over all ranks.

    Args:
        engine: of the run; parameters, optimizer and random generators stay as they are.
        strategy: of the engine's pool.
        limits: tokens of a micro-batch, by scheme, of which none has a ``~``; equal on every rank.
            Below 1 for what no micro-batch runs as: it is left out.
        forward_step: upstream's signature.
        gauge: of this rank.
        longest_tokens: the longest sequence there is.
        vocab_size: random tokens lie below.

    Returns:
        One result for each scheme that micro-batches may run as, in the strategy's order, wide
        groups of a scheme first.

    Raises:
        OutOfMemoryError: memory ran out on one rank of several of a replica, or with every attempt.
    """
    with _random_generators_kept(engine.device):
        groups = dict.fromkeys(g for scheme in strategy.schemes for g in scheme.group_schemes)
        promised = {group: limit for group in groups if (limit := limits(group)) >= 1}
        return _Trial(engine, strategy, forward_step, gauge, longest_tokens, vocab_size).results(
            promised
        )


def trial_lengths(num_tokens: int, longest_tokens: int, scheme: Scheme) -> tuple[int, ...]:
    """Lengths of as few sequences as fill a row of so many tokens, but for less than a quantum."""
    quantum = scheme.token_quantum
    each = max(quantum, min(longest_tokens, num_tokens) // quantum * quantum)
    num_whole, rest = divmod(num_tokens // quantum * quantum, each)
    return (each,) * num_whole + ((rest,) if rest else ())


class _Trial:
    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        forward_step: ForwardStep,
        gauge: MemoryGauge,
        longest_tokens: int,
        vocab_size: int,
    ) -> None:
        self._engine = engine
        self._strategy = strategy
        self._forward_step = forward_step
        self._gauge = gauge
        self._longest_tokens = longest_tokens
        self._vocab_size = vocab_size

    def results(self, promised: dict[Scheme, int]) -> tuple[TrialResult, ...]:
        first = {
            scheme: max(scheme.token_quantum, _rounded(limit * FIRST_SHARE, scheme))
            for scheme, limit in promised.items()
        }
        # What does not depend on tokens is there before memory is measured: the communicators of
        # all groups, staging buffers, the gradients' memory.
        self._measure(first)
        trials = self._measure(first)
        allowed = self._allowed(promised, trials)
        for _ in range(MAX_ATTEMPTS):
            second = {
                scheme: max(scheme.token_quantum, _rounded(limit, scheme))
                for scheme, limit in allowed.items()
            }
            found, failed = self._try(second)
            if not failed:
                allowed, trials = self._allowed(allowed, found), found
                break
            allowed |= {scheme: after_failure(second[scheme], scheme) for scheme in failed}
        else:
            raise OutOfMemoryError(
                f"strategy '{self._strategy.name}': {MAX_ATTEMPTS} attempts found no memory, the "
                f"last for micro-batches of "
                + ", ".join(f"{num} tokens on {scheme}" for scheme, num in second.items())
                + "; take the strategy out of the pool, or give a replica more ranks"
            )
        return tuple(
            TrialResult(
                strategy=self._strategy.name,
                scheme=scheme,
                promised_tokens=promised[scheme],
                allowed_tokens=allowed[scheme],
                trial=max(
                    (trial for of, trial in trials if of == scheme),
                    key=lambda trial: trial.peak_bytes - trial.capacity_bytes,
                ),
            )
            for scheme in promised
        )

    def _allowed(
        self, limits: dict[Scheme, int], trials: Sequence[tuple[Scheme, MemoryTrial]]
    ) -> dict[Scheme, int]:
        return {
            scheme: allowed_tokens(limit, scheme, (trial for of, trial in trials if of == scheme))
            for scheme, limit in limits.items()
        }

    def _try(
        self, num_tokens: dict[Scheme, int]
    ) -> tuple[list[tuple[Scheme, MemoryTrial]], set[Scheme]]:
        """What was measured, or the schemes whose micro-batches found no memory."""
        try:
            return self._measure(num_tokens), set()
        except SharedOutOfMemoryError as error:
            own = None if error.own is None else error.own.group
        free_what_is_left()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return [], {scheme for scheme in everyone if scheme is not None}

    def _measure(self, num_tokens: dict[Scheme, int]) -> list[tuple[Scheme, MemoryTrial]]:
        """What every rank with work measured, in groups of each size that its replica may have."""
        found: list[tuple[Scheme, MemoryTrial]] = []
        num_rounds = max(len(scheme.group_schemes) for scheme in self._strategy.schemes)
        for number in range(num_rounds):
            found += self._measure_round(number, num_tokens)
        return found

    def _measure_round(
        self, number: int, num_tokens: dict[Scheme, int]
    ) -> list[tuple[Scheme, MemoryTrial]]:
        """Run as many micro-batches as the pipeline holds, in each replica's groups of a number.

        Replicas of fewer sizes of groups have nothing to run.
        """
        engine, strategy = self._engine, self._strategy
        mine = strategy.replica_of(engine.rank)
        groups = () if mine is None else mine.scheme.group_schemes[number : number + 1]
        group = next((group for group in groups if group in num_tokens), None)
        batches = [] if group is None else self._batches(group, num_tokens[group])
        engine.gather(strategy.name)
        engine.finish_regrouping()
        idle_bytes = self._gauge.restart()
        engine.forward_backward(strategy.name, batches, self._forward_step)
        engine.rehearse_update()
        own = None
        if group is not None:
            trial = MemoryTrial(
                num_tokens=num_tokens[group],
                idle_bytes=idle_bytes,
                peak_bytes=max(idle_bytes, self._gauge.peak_bytes()),
                capacity_bytes=self._gauge.capacity_bytes(),
            )
            own = (group, trial)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return [found for found in everyone if found is not None]

    def _batches(self, group: Scheme, num_tokens: int) -> list[PackedBatch]:
        """This rank's part of random micro-batches of a group, as many as the pipeline is deep."""
        replica = self._strategy.replica_of(self._engine.rank)
        position = None if replica is None else replica.position_of(self._engine.rank)
        assert position is not None
        lengths = trial_lengths(num_tokens, self._longest_tokens, group)
        # The same on every rank of a replica.
        rng = np.random.default_rng((num_tokens, group.num_ranks))
        sequences = [rng.integers(0, self._vocab_size, size=length + 1) for length in lengths]
        packed = pack(
            sequences,
            group.tp,
            context_size=group.cp,
            context_rank=position.cp % group.cp,
        ).to(self._engine.device)
        return [packed] * group.pp


def _rounded(num_tokens: float, scheme: Scheme) -> int:
    return int(num_tokens) // scheme.token_quantum * scheme.token_quantum


@contextmanager
def _random_generators_kept(device: torch.device) -> Iterator[None]:
    """Torch's, on the CPU and the device, and those of Megatron's tracker are put back."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    tracker.set_states(states)
