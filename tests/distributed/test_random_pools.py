"""The same update with random pools, placements, batches and schedules."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.strategy import Replica, Scheme, Strategy
from tests.support.comparison import assert_same
from tests.support.gloo_pool import pool_of
from tests.support.law import FP64_SETTINGS, FP64_TOLERANCE
from tests.support.models import Assignment, Job, RankRun, SmallModel, assemble, run_job
from tests.support.reference import ReferenceRun, run_reference

NUM_ITERATIONS = 4
NUM_ATOMS = 4
DENSE = SmallModel(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=16,
    num_heads=4,
    num_groups=4,
    vocab_size=29,
    padded_vocab_size=32,
)
NUM_EXPERTS = 4
EXPERTS = (
    ("num_moe_experts", NUM_EXPERTS),
    ("moe_ffn_hidden_size", 8),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "seq_aux_loss"),
    ("moe_aux_loss_coeff", 0.3),
    ("moe_layer_freq", 2),
)
MODELS = (
    DENSE,
    replace(DENSE, tied=True),
    replace(DENSE, variant=(*EXPERTS, ("moe_token_dispatcher_type", "allgather"))),
    replace(DENSE, tied=True, variant=(*EXPERTS, ("moe_token_dispatcher_type", "alltoall"))),
)
"""Three small layers; the model is fixed, the rest is drawn."""
NUM_BATCH_SEEDS = 3
MAX_TOKENS = 12


@cache
def batches_of_seed(seed: int) -> tuple[tuple[np.ndarray, ...], ...]:
    """Sequences of each iteration; their number and lengths differ; there may be only one."""
    rng = np.random.default_rng(seed)
    return tuple(
        tuple(
            rng.integers(0, MODELS[0].vocab_size, size=int(rng.integers(1, MAX_TOKENS + 1)) + 1)
            for _ in range(count)
        )
        for count in (6, 1, 4, 5)
    )


@cache
def weights_of_seed(seed: int) -> tuple[tuple[np.ndarray, ...], ...]:
    """Of the tokens of these sequences; a third is 0, and no batch has a sum of 0."""
    rng = np.random.default_rng(seed)
    weights = []
    for batch in batches_of_seed(seed):
        of_batch = [rng.random(len(tokens)) * (rng.random(len(tokens)) > 1 / 3) for tokens in batch]
        of_batch[-1][-1] += 0.1
        weights.append(tuple(each.astype(np.float32) for each in of_batch))
    return tuple(weights)


@st.composite
def placed_strategies(draw: st.DrawFn, num_ranks: int, num_experts: int) -> str:
    """Replicas of any scheme with uneven stages, in some order of the ranks; the rest is idle.

    Few orders of ranks, so that the process groups of many jobs are the same.
    """
    ascending = list(range(num_ranks))
    order = draw(st.sampled_from([ascending, ascending[::-1], ascending[::2] + ascending[1::2]]))
    replicas: list[Replica] = []
    free = list(order)
    while free and (not replicas or draw(st.integers(0, 3)) > 0):
        tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if tp <= len(free)]))
        cp = draw(st.sampled_from([cp for cp in (1, 2, 3, 4) if tp * cp <= len(free)]))
        pp = draw(st.integers(1, min(MODELS[0].num_layers, len(free) // (tp * cp))))
        cuts = draw(st.permutations(range(1, MODELS[0].num_layers)))
        borders = [0, *sorted(cuts[: pp - 1]), MODELS[0].num_layers]
        layers = tuple(stop - start for start, stop in itertools.pairwise(borders))
        splits = cp in (2, 4) and draw(st.booleans())
        divided = math.gcd(tp * cp, num_experts)
        ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if divided % ep == 0]))
        fs = cp if cp > 1 and pp == 1 and draw(st.booleans()) else 1
        scheme = Scheme(tp=tp, cp=cp, pp=pp, layers=layers, splits_cp=splits, ep=ep, fs=fs)
        replicas.append(Replica(scheme, tuple(free[: scheme.num_ranks])))
        del free[: scheme.num_ranks]
    return str(Strategy("drawn", tuple(replicas), num_ranks, num_ranks))


@st.composite
def assignments(draw: st.DrawFn, num_sequences: int, strategy: Strategy) -> Assignment:
    """Any dispatch, replicas without sequences included, any packing, and any waves."""
    num_replicas = len(strategy.replicas)
    homes = draw(
        st.lists(st.integers(0, num_replicas - 1), min_size=num_sequences, max_size=num_sequences)
    )
    shares: list[tuple[tuple[int, ...], ...]] = []
    groups: list[tuple[Groups, ...]] = []
    for index, replica in enumerate(strategy.replicas):
        mine = [i for i, home in enumerate(homes) if home == index]
        size = draw(st.integers(1, 3))
        share = tuple(tuple(mine[i : i + size]) for i in range(0, len(mine), size))
        shares.append(share)
        groups.append(tuple(draw(waves(replica.scheme, len(indices))) for indices in share))
    return Assignment(tuple(shares), tuple(groups))


@st.composite
def cuts(draw: st.DrawFn, offset: int, size: int) -> list[tuple[int, int]]:
    """Offsets and sizes of any aligned groups of a width that is a power of two."""
    if size == 1 or draw(st.booleans()):
        return [(offset, size)]
    half = size // 2
    return [*draw(cuts(offset, half)), *draw(cuts(offset + half, half))]


Groups = tuple[tuple[int, int, int], ...]
"""Offset, size, number of sequences of each context group."""


@st.composite
def waves(draw: st.DrawFn, scheme: Scheme, num_sequences: int) -> Groups:
    """Any aligned groups of the scheme's cp ranks, some possibly without sequences."""
    if not scheme.splits_cp or draw(st.booleans()):
        return ()
    places = draw(cuts(0, scheme.cp))
    homes = [draw(st.integers(0, len(places) - 1)) for _ in range(num_sequences)]
    return tuple((*place, homes.count(i)) for i, place in enumerate(places))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, Job]:
    """(ranks, seed of the batches, job)."""
    num_ranks = draw(st.integers(2, 6), label="ranks")
    model = draw(st.sampled_from(MODELS), label="model")
    strategies = placed_strategies(num_ranks, NUM_EXPERTS if dict(model.variant) else 1)
    pool = draw(st.lists(strategies, min_size=1, max_size=3, unique=True), label="pool")
    schedule = draw(
        st.lists(st.integers(0, len(pool) - 1), min_size=NUM_ITERATIONS, max_size=NUM_ITERATIONS),
        label="schedule",
    )
    seed = draw(st.integers(0, NUM_BATCH_SEEDS - 1), label="batches")
    batches = batches_of_seed(seed)
    parsed = [Strategy.parse(text, num_ranks) for text in pool]
    plans = [
        draw(assignments(len(batch), parsed[which]), label="plan")
        for which, batch in zip(schedule, batches, strict=True)
    ]
    nodes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    job = Job(
        model=model,
        strategies=tuple(pool),
        schedule=tuple(schedule),
        assignments=tuple(plans),
        batches=batches,
        weights=weights_of_seed(seed),
        num_atoms=NUM_ATOMS,
        settings=FP64_SETTINGS,
        ranks_per_node=draw(st.sampled_from(nodes), label="ranks of a node"),
        owners_for=draw(st.sampled_from([None, *pool]), label="owners chosen for"),
        num_slots=draw(st.integers(1, 2), label="slots"),
        knows_next=draw(st.booleans(), label="next strategy known"),
    )
    return num_ranks, seed, job


@cache
def reference_of(model: SmallModel, seed: int) -> ReferenceRun:
    """The one-process run of a seed's batches."""
    job = Job(
        model=model,
        strategies=("tp1",),
        schedule=(0,) * NUM_ITERATIONS,
        assignments=(),
        batches=batches_of_seed(seed),
        weights=weights_of_seed(seed),
        settings=FP64_SETTINGS,
    )
    reference: ReferenceRun = pool_of(1).run(run_reference, job, torch.float64)[0]
    return reference


def check_random_job(num_ranks: int, seed: int, job: Job, *, timeout_s: float) -> None:
    """Every gradient and parameter of every iteration equals the one-process run's."""
    reference = reference_of(job.model, seed)
    runs: list[RankRun] = pool_of(num_ranks).run(run_job, job, timeout_s=timeout_s)
    for i in range(NUM_ITERATIONS):
        gradients = assemble(runs, [run.gradients[i] for run in runs])
        parameters = assemble(runs, [run.parameters[i] for run in runs])
        assert_same(gradients, reference.gradients[i], FP64_TOLERANCE, f"iteration {i}: gradient")
        assert_same(parameters, reference.parameters[i], FP64_TOLERANCE, f"iteration {i}")
        for run in runs:
            np.testing.assert_allclose(run.losses[i], reference.losses[i], rtol=1e-12)


NUM_DRAWS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 15
HANG_S = 60.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(40 * NUM_DRAWS)]


@settings(max_examples=NUM_DRAWS)
@given(drawn=jobs())
def test_every_pool_and_schedule_gives_the_same_update(drawn: tuple[int, int, Job]) -> None:
    num_ranks, seed, job = drawn
    check_random_job(num_ranks, seed, job, timeout_s=HANG_S)
