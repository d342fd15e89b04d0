"""The largest micro-batches of a strategy, run once before training.

Communicators, workspaces and the allocator's blocks then exist before the first iteration, and
limits that exceed the memory are reduced before a plan relies on them. Training is unaffected:
gradients are thrown away, parameters are not touched, random generators are restored. A micro-batch
far below the limit runs first, and the line through it gives the size of the second, so that memory
normally does not run out in the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron.hydraulis.cost_model.limits import MemoryTrial, after_failure, allowed_tokens
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import OutOfMemoryError
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.runtime.memory import (
    MemoryMeter,
    SharedOutOfMemoryError,
    release_cached_memory,
)
from megatron.hydraulis.runtime.process_groups import of_all_ranks
from megatron.hydraulis.strategy import Scheme, Strategy

FIRST_SHARE = 1 / 8
"""Size of the first micro-batch of a trial, as a share of the limit."""
MAX_ATTEMPTS = 4
"""Micro-batches of a scheme that a trial runs, each smaller than the one that ran out of memory."""

_BYTES_PER_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of the trial for one scheme of a strategy; equal on every rank."""

    strategy: str
    scheme: Scheme
    """It has no ``~``: a scheme that splits its cp ranks has a result for each size of group."""
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


def _trial_lengths(num_tokens: int, longest_tokens: int, scheme: Scheme) -> tuple[int, ...]:
    """Lengths of as few sequences as fill a row of so many tokens, up to less than a quantum."""
    quantum = scheme.token_quantum
    each = max(quantum, min(longest_tokens, num_tokens) // quantum * quantum)
    num_whole, rest = divmod(num_tokens // quantum * quantum, each)
    return (each,) * num_whole + ((rest,) if rest else ())


_Measured = Sequence[tuple[Scheme, MemoryTrial]]
"""Trials of every rank that had work, in groups of each size that its replica may have."""


@dataclass(frozen=True, kw_only=True)
class StrategyTrial:
    """Runs the largest micro-batches of a strategy of the engine's pool."""

    engine: RuntimeEngine
    """Its parameters, optimizer and random generators stay as they are."""
    strategy: Strategy
    forward_step: ForwardStep
    meter: MemoryMeter
    longest_tokens: int
    vocab_size: int
    """Random tokens are below it."""

    def results(self, limits: Callable[[Scheme], int]) -> tuple[TrialResult, ...]:
        """Collective over all ranks.

        Args:
            limits: tokens of a micro-batch, by scheme without ``~``; equal on every rank. A scheme
                with a limit below 1 is skipped, because no micro-batch runs as it.

        Returns:
            One result for each scheme that micro-batches may run as, in the strategy's order, wide
            groups of a scheme first.

        Raises:
            OutOfMemoryError: memory ran out on one rank of several of a replica, or in every
                attempt.
        """
        schemes = self.strategy.schemes
        groups = dict.fromkeys(group for scheme in schemes for group in scheme.group_schemes)
        promised = {group: limit for group in groups if (limit := limits(group)) >= 1}
        with _random_generators_kept(self.engine.device):
            return self._results(promised)

    def _results(self, promised: dict[Scheme, int]) -> tuple[TrialResult, ...]:
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
        lengths = _trial_lengths(num_tokens, self.longest_tokens, group)
        rng = np.random.default_rng((num_tokens, group.num_ranks))  # equal on a replica's ranks
        packed = pack(
            [rng.integers(0, self.vocab_size, size=length + 1) for length in lengths],
            group.tp,
            context_size=group.cp,
            context_rank=position.cp % group.cp,
            num_predictions=self.engine.definition.num_predictions,
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
    return [each for each in of_all_ranks(own) if each is not None]


@contextmanager
def _random_generators_kept(device: torch.device) -> Iterator[None]:
    """Restores torch's generators, on the CPU and the device, and those of Megatron's tracker."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    tracker.set_states(states)
