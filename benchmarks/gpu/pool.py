"""A pool against each of its static strategies: same engine, same batches, in turn."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.rank import Place
from benchmarks.gpu.training_inputs import document_lengths
from benchmarks.paired_statistics import ratio_of_totals
from benchmarks.step_report import finish_device
from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.library.batches import RankShare, TokenSequence
from megatron.hydraulis.library.building import build_engine, choose_core_attention, definition_of
from megatron.hydraulis.library.devices import constants_of_this_rank
from megatron.hydraulis.library.planning import Planning, read_cost_profile
from megatron.hydraulis.loop.memory_safety import MemorySafety
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.profiler.command import training_defaults
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.memory import CudaMemory
from megatron.hydraulis.strategy import Pool

POOL = "pool"
SEED = 3


def run(place: Place, pool_file: str, cost_profile: str) -> None:
    """Try the memory of all strategies, then train every batch in every way.

    Args:
        place: where.
        pool_file: the pool.
        cost_profile: measured before; the cost model's own estimates if there is no such file.
    """
    flags = [*place.sizes.model.flags, "--strategy-pool", pool_file]
    if Path(cost_profile).is_file():
        flags += ["--cost-profile", cost_profile]
    resolved = parse_arguments(
        training_defaults(flags), num_ranks=place.num_ranks, rank=place.rank, needs_data=False
    )
    device = constants_of_this_rank(has_cuda=True, speaks=False)
    planning = Planning.of(resolved, device, read_cost_profile(resolved))
    engine = _engine(resolved)
    batches = _batches(place)
    say = partial(print, flush=True) if place.rank == 0 else lambda *_: None
    safety = MemorySafety(planning, resolved.hydraulis, log=say)
    safety.try_out(
        engine,
        make_forward_step(),
        CudaMemory(),
        longest_tokens=place.sizes.model.seq_length,
        most_tokens=max(map(sum, batches)),
        vocab_size=resolved.vocabulary.size,
    )
    ways = _plans(place, safety.planning, batches)
    times_s = _times_s(place, engine, batches, ways, say)
    static = {name: times for name, times in times_s.items() if name != POOL}
    best = min(static, key=lambda name: sum(static[name]))
    estimate = ratio_of_totals(static[best], times_s[POOL])
    predicted_s = {name: [p.predicted_time_s for p in plans] for name, plans in ways.items()}
    details = {
        "best_static": best,
        "interval_95": [estimate.low, estimate.high],
        "times_s": times_s,
        "predicted_s": predicted_s,
        "chosen": [plan.strategy for plan in ways[POOL]],
        "tokens": [sum(lengths) for lengths in batches],
    }
    place.measured("gain", estimate.value, **details)
    gain = sum(predicted_s[best]) / sum(predicted_s[POOL])
    place.measured("predicted gain", gain)
    errors = [
        abs(measured / predicted - 1)
        for name in ways
        for measured, predicted in zip(times_s[name], predicted_s[name], strict=True)
    ]
    place.measured("prediction", median(errors))
    engine.close()


def _engine(resolved: Resolved) -> RuntimeEngine:
    """The engine as training builds it."""
    args = resolved.args
    settings = AdamWSettings(lr=args.lr, clip_grad=args.clip_grad, eps=args.adam_eps)
    core_attention = choose_core_attention(resolved, resolved.pool).name
    definition = definition_of(resolved, core_attention)
    return build_engine(resolved, resolved.pool, definition, settings)


def _batches(place: Place) -> list[tuple[int, ...]]:
    """Lengths of the sequences of each batch: a long tail, and one as long as they may be."""
    rng = np.random.default_rng(SEED)
    batches = []
    for _ in range(place.sizes.num_pool_batches):
        lengths = [place.sizes.model.seq_length]
        while sum(lengths) < place.sizes.pool_batch_tokens_per_rank * place.num_ranks:
            lengths += document_lengths(place.sizes, rng, 1).tolist()
        batches.append(tuple(lengths))
    return batches


def _plans(
    place: Place, planning: Planning, batches: list[tuple[int, ...]]
) -> dict[str, list[IterationPlan]]:
    """The plans of the pool, and of each static strategy that holds the longest sequence; rank 0
    makes them for every rank."""
    shared: list[Any] = [None]
    if place.rank == 0:
        pools: dict[str, Pool] = {POOL: planning.pool}
        for strategy in planning.pool.strategies:
            if strategy.is_homogeneous:
                pools[strategy.name] = Pool.of(strategy)
        found: dict[str, list[IterationPlan]] = {}
        for name, pool in pools.items():
            planner = CertifiedPlanner(pool, planning.cost_model, planning.limits)
            try:
                found[name] = [planner.plan(b, iteration=i) for i, b in enumerate(batches)]
            except HydraulisError as error:
                print(f"{name} cannot run: {error}", flush=True)
        shared = [found]
    dist.broadcast_object_list(shared, src=0)
    ways: dict[str, list[IterationPlan]] = shared[0]
    return ways


def _times_s(
    place: Place,
    engine: RuntimeEngine,
    batches: list[tuple[int, ...]],
    ways: dict[str, list[IterationPlan]],
    say: Any,
) -> dict[str, list[float]]:
    """The slowest rank's time of each batch, for every way. Every way trains the first batch once
    more, before, to warm up."""
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    order = [(name, 0) for name in ways]
    for index in range(len(batches)):
        turn = index % len(ways)
        order += [(name, index) for name in (*list(ways)[turn:], *list(ways)[:turn])]
    forward_step = make_forward_step()
    for number, (name, index) in enumerate(order):
        plan = ways[name][index]
        micro_batches = _micro_batches(place, plan, batches[index])
        following = order[(number + 1) % len(order)]
        upcoming = ways[following[0]][following[1]].strategy
        finish_device()
        dist.barrier()
        start_s = time.perf_counter()
        outcome = engine.train_step(
            plan.strategy, micro_batches, forward_step, next_strategy=upcoming
        )
        finish_device()
        own = torch.tensor(time.perf_counter() - start_s, device="cuda")
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        assert outcome.updated
        say(
            f"{name}, batch {index}: {plan.strategy}, {own.item():.4f} s, predicted "
            f"{plan.predicted_time_s:.4f} s, loss {outcome.loss.mean:.4f}"
        )
        if number >= len(ways):
            times_s[name].append(own.item())
    return times_s


def _micro_batches(
    place: Place, plan: IterationPlan, lengths: tuple[int, ...]
) -> tuple[PackedBatch, ...]:
    """This rank's part of the micro-batches of its replica, of random tokens."""
    vocab_size = place.sizes.model.shape.vocab_size

    def sequence_of(index: int) -> TokenSequence:
        rng = np.random.default_rng((SEED, index))
        return TokenSequence(rng.integers(0, vocab_size, size=lengths[index] + 1))

    return RankShare.of(plan, place.rank, torch.device("cuda"), sequence_of).micro_batches
