"""Rounding errors in bf16 of models with experts, where rounding also changes tokens' experts.

A token that passes another expert changes gradients more than all other rounding does, on one
process as under every strategy. So errors are compared with the experts that exact arithmetic
chooses for every token, and with free choices over many draws of weights and sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.hydraulis.data.packed_batch import part_places
from megatron.hydraulis.runtime.experts import SequenceRouter
from megatron.hydraulis.strategy import Strategy
from tests.support.bf16_error import differences
from tests.support.gloo_pool import pool_of
from tests.support.law import law_job, random_weights
from tests.support.models import Job, RankRun, SmallModel, assemble, run_job, sequences
from tests.support.reference import ReferenceRun, run_reference

Choices = dict[tuple[int, int, int], tuple[int, ...]]
"""(layer, sequence of all iterations, place in it) -> the experts that the token passes."""


@dataclass(frozen=True)
class RoundedRuns:
    """Runs of a job with many draws."""

    errors: dict[str, float]
    """Of the gradients of each kind of parameter; root mean squares over the draws."""
    share_changed: float
    """Of tokens and layers: those with other experts than in exact arithmetic."""
    losses: tuple[float, ...]

    def worst_ratio(self, alone: RoundedRuns) -> float:
        """The largest error of any kind over that of one process."""
        return max(self.errors[kind] / error for kind, error in alone.errors.items())


Run = Callable[..., list[tuple[RankRun, Choices]]]
"""Runs a function with its arguments on all ranks."""


def rounded_runs(job: Job, num_draws: int, *, is_free: bool, run: Run | None = None) -> RoundedRuns:
    """The job for each draw; with one rank for ``tp1``, else with four.

    Args:
        job: with as many sequences as `law_job`; its model in bf16, without recompute.
        num_draws: of weights and sequences.
        is_free: whether tokens choose their experts; if not, they are given the exact choices.
        run: None for a pool on the CPU.
    """
    run = run or pool_of(1 if job.strategies == ("tp1",) else 4).run
    squares: dict[str, list[float]] = {}
    changed: list[bool] = []
    losses: list[float] = []
    for seed in range(num_draws):
        reference, exact = _exact_run(job.model, seed)
        results = run(_run, _drawn(job, seed), None if is_free else exact)
        runs = [run for run, _ in results]
        made: Choices = {token: experts for _, part in results for token, experts in part.items()}
        assert made.keys() == exact.keys()
        changed += [made[token] != experts for token, experts in exact.items()]
        losses += runs[0].losses
        for i, expected in enumerate(reference.gradients):
            gradients = assemble(runs, [run.gradients[i] for run in runs])
            for kind, error in differences(gradients, expected).items():
                squares.setdefault(kind, []).append(error**2)
    errors = {kind: float(np.mean(each)) ** 0.5 for kind, each in squares.items()}
    return RoundedRuns(errors, float(np.mean(changed)), tuple(losses))


def _drawn(job: Job, seed: int) -> Job:
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(8, 60, size=len(batch)).tolist() for batch in job.batches]
    return replace(
        job,
        batches=tuple(sequences(rng, each, job.model.vocab_size) for each in lengths),
        weights=tuple(random_weights(rng, each, float(sum(each))) for each in lengths),
        seed=seed,
    )


@cache
def _exact_run(model: SmallModel, seed: int) -> tuple[ReferenceRun, Choices]:
    job = _drawn(law_job(1, "tp1", replace(model, core_attention="sdpa")), seed)
    found: tuple[ReferenceRun, Choices] = pool_of(1).run(_run_exactly, job)[0]
    return found


def _run_exactly(job: Job) -> tuple[ReferenceRun, Choices]:
    made: Choices = {}
    num_seen: Counter[int] = Counter()
    right = TopKRouter.routing

    def routing(router: Any, logits: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = right(router, logits, *others, **named)
        layer = router.layer_number - 1
        for place, experts in enumerate(_listed(chosen)):
            made[layer, num_seen[layer], place] = experts
        num_seen[layer] += 1
        return weights, chosen

    with patch.object(TopKRouter, "routing", routing):
        return run_reference(job, torch.float64), made


def _run(job: Job, given: Choices | None) -> tuple[RankRun, Choices]:
    """Every rank returns its run and the choices of its own tokens."""
    rows = _rows(job, torch.distributed.get_rank())
    made: Choices = {}
    right = SequenceRouter.routing

    def routing(router: Any, logits: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        num_local = logits.shape[:-1].numel()
        tokens = _tokens(router, num_local, next(rows[router.layer]))

        def choose(scores: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            assert given is not None
            *arguments, compute_topk = others
            _, chosen = compute_topk(scores, *arguments)
            for place, token in tokens.items():
                chosen[place] = torch.tensor(given[token])
            return scores.gather(1, chosen), chosen

        if given is not None:
            router.router_replay = SimpleNamespace(get_replay_topk=choose)
        weights, chosen = right(router, logits, *others, **named)
        experts = _listed(chosen)
        made.update({token: experts[place] for place, token in tokens.items()})
        return weights, chosen

    with patch.object(SequenceRouter, "routing", routing):
        return run_job(job), made


def _rows(job: Job, rank: int) -> dict[int, Iterator[tuple[int, ...]]]:
    """The sequences of each row that passes a layer on this rank, numbered over all iterations."""
    rows: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(job.model.num_layers)}
    begin = 0
    for which, assignment, batch in zip(job.schedule, job.assignments, job.batches, strict=True):
        strategy = Strategy.parse(job.strategies[which], torch.distributed.get_world_size())
        for index, replica in enumerate(strategy.replicas):
            position = replica.position_of(rank)
            if position is None:
                continue
            sizes = replica.scheme.layers_per_stage(job.model.num_layers)
            first = sum(sizes[: position.stage])
            for micro_batch in assignment.micro_batches(index, batch):
                share = micro_batch.share_of(position.cp, replica.scheme.cp)
                for layer in range(first, first + sizes[position.stage]):
                    rows[layer].append(tuple(begin + i for i in share.sequences))
        begin += len(batch)
    return {layer: iter(of_layer) for layer, of_layer in rows.items()}


def _tokens(
    router: SequenceRouter, num_local: int, of_row: Sequence[int]
) -> dict[int, tuple[int, int, int]]:
    """Places among the rank's tokens -> keys of `Choices`; of a row of the given sequences."""
    row = router._row
    begin = router.tp_group.rank() * num_local
    part = (1, 0) if row.cp_group is None else (row.cp_group.size(), row.cp_group.rank())
    places = part_places(row.sequence_lengths, row.segment_lengths, *part)
    return {
        int(place) - begin: (router.layer, of_row[number], int(position))
        for place, number, position in zip(*places, strict=True)
        if begin <= place < begin + num_local
    }


def _listed(chosen: Tensor) -> list[tuple[int, ...]]:
    """The experts of each token; ``chosen`` has shape (tokens, experts)."""
    return [tuple(each.nonzero().flatten().tolist()) for each in chosen]
