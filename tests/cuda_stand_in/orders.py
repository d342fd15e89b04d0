"""Jobs whose order of NCCL calls is checked: what each lone rank runs, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.saving import CheckpointSaver
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.passes import PostFrom, ScatterPass
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.amounts import LayoutAmounts, StrategyAmounts
from megatron.hydraulis.transfer.calls import Calls, call_amounts
from tests.cuda_stand_in.device import mark
from tests.cuda_stand_in.lone_ranks import log_of, run_alone
from tests.cuda_stand_in.order import OrderReport, check_order, read_log
from tests.support.checkpoints import saved_state
from tests.support.models import (
    Assignment,
    Job,
    build_engine,
    most_of_every_layer,
    packs_of_rank,
    sequences,
)
from tests.support.recomputed_models import RecomputedModel

MODEL = RecomputedModel(
    hidden_size=64,
    ffn_hidden_size=64,
    num_heads=8,
    dtype=torch.bfloat16,
    core_attention="torch",
)
"""GQA, SwiGLU, RMSNorm, RoPE, untied, padded vocabulary, sequence parallel."""
PLAIN_MODEL = replace(
    MODEL,
    num_groups=8,
    sequence_parallel=False,
    qk_layernorm=True,
    bias=True,
    normalization="LayerNorm",
    swiglu=False,
    position_embedding="learned_absolute",
)
"""Many parameters whose gradients only TP rank 0 sends."""

LATENT_MODEL = replace(
    MODEL,
    num_groups=8,
    variant=(
        *(("q_lora_rank", 24), ("kv_lora_rank", 16), ("qk_head_dim", 8)),
        *(("qk_pos_emb_head_dim", 8), ("v_head_dim", 8), ("rotary_scaling_factor", 4)),
    ),
)
PREDICTING = replace(MODEL, variant=(("mtp_num_layers", 1),))
WITH_EXPERTS = replace(
    MODEL,
    variant=(
        ("num_moe_experts", 4),
        ("moe_ffn_hidden_size", 16),
        ("moe_router_load_balancing_type", "none"),
        ("moe_token_dispatcher_type", "alltoall"),
    ),
)

PARTLY_FROZEN = replace(MODEL, frozen=most_of_every_layer(MODEL.num_layers))

FULL_RECOMPUTE = replace(MODEL, granularity="full", method="uniform", num_layers_recomputed=1)

ADAPTED = replace(MODEL, lora_targets=("all-linear", "lm_head"))

LENGTHS = (9, 30, 3, 17, 12, 8, 26, 5)
"""Trained tokens of the sequences, repeated."""
MAX_MICRO_BATCHES = 5
NUM_ITERATIONS = 4

FIRST_STAGE_BEFORE_ITS_RECEIVE = (PostFrom.FIRST_GRADIENT, PostFrom.LAST_BACKWARD)
LATER_STAGE_BEFORE_ITS_SEND = (PostFrom.FINISH, PostFrom.FIRST_GRADIENT)
"""Mutations: the moment from which ranks should post, and the one from which they do."""
Mutation = tuple[PostFrom, PostFrom]


@dataclass(frozen=True)
class OrderCase:
    """A small job: an iteration in each strategy of the pool in turn, which knows the next one."""

    strategies: tuple[str, ...]
    num_ranks: int
    evaluated_in: str = ""
    """A strategy in which the model is evaluated after each iteration, if any."""
    model: RecomputedModel = MODEL
    overlap: bool = True
    knows_next: bool = True
    ranks_per_node: int | None = None
    """One node if None; with several, regrouping may take two steps."""
    gradient_dtype: torch.dtype | None = None
    """In which gradients travel; None for fp32."""

    @property
    def details(self) -> str:
        """A readable description of what it has besides its strategies."""
        parts = [
            f"evaluated in {self.evaluated_in}" if self.evaluated_in else "",
            "" if self.overlap else "no overlap",
            "" if self.knows_next else "next strategy unknown",
            f"{self.ranks_per_node} ranks a node" if self.ranks_per_node else "",
            "tied embeddings" if self.model.tied else "",
            "biases, no sequence parallelism" if self.model == PLAIN_MODEL else "",
            f"{self.model.granularity} recompute" if self.model.granularity else "",
            "fewer query groups than cp ranks" if self.model.num_groups == 2 else "",
            "latents" if self.model == LATENT_MODEL else "",
            "multi-token prediction" if self.model == PREDICTING else "",
            "adapters" if self.model.lora_targets else "",
            "partly frozen" if self.model.frozen else "",
            "gradients in bf16" if self.gradient_dtype else "",
        ]
        return "".join(f", {part}" for part in parts if part)

    @property
    def name(self) -> str:
        """A readable description."""
        return " | ".join(self.strategies) + self.details

    def job(self) -> Job:
        """Strategies, batches and plans."""
        names = (*self.strategies, *([self.evaluated_in] if self.evaluated_in else []))
        names = tuple(dict.fromkeys(names))
        schedule = tuple(names.index(self.strategies[i % len(self.strategies)]) for i in _numbers())
        rng = np.random.default_rng(3)
        assignments, batches = [], []
        for i, which in zip(_numbers(), schedule, strict=True):
            assignment = uneven_assignment(Strategy.parse(names[which], self.num_ranks), i)
            count = sum(len(share) for shares in assignment.replicas for share in shares)
            lengths = [LENGTHS[k % len(LENGTHS)] for k in range(count)]
            assignments.append(assignment)
            batches.append(sequences(rng, lengths, self.model.vocab_size))
        return Job(
            model=self.model,
            strategies=names,
            schedule=schedule,
            assignments=tuple(assignments),
            batches=tuple(batches),
            ranks_per_node=self.ranks_per_node,
            gradient_dtype=self.gradient_dtype,
            overlap=self.overlap,
            knows_next=self.knows_next,
        )


def _numbers() -> range:
    return range(NUM_ITERATIONS)


def uneven_assignment(strategy: Strategy, iteration: int) -> Assignment:
    """Unequal numbers of micro-batches, with one iteration in which a replica has none.

    Every second micro-batch has two sequences. Where a scheme splits its cp ranks, waves of one
    group, of halves, and of a half and single ranks follow one another.
    """
    replicas, groups, index = [], [], 0
    for number, replica in enumerate(strategy.replicas):
        count = 1 + (2 * number + iteration) % MAX_MICRO_BATCHES
        if iteration == 1 and number == 0 and len(strategy.replicas) > 1:
            count = 0
        shares, waves = [], []
        for k in range(count):
            wave = _wave(replica.scheme.cp, k) if replica.scheme.splits_cp else ()
            size = sum(num for _, _, num in wave) if wave else 1 + k % 2
            shares.append(tuple(range(index, index + size)))
            waves.append(wave)
            index += size
        replicas.append(tuple(shares))
        groups.append(tuple(waves))
    return Assignment(tuple(replicas), tuple(groups))


def _wave(width: int, number: int) -> tuple[tuple[int, int, int], ...]:
    """Context groups as offset, size and number of sequences."""
    half = width // 2
    if number % 3 == 0:
        return ((0, width, 2),)
    if number % 3 == 1 or half < 2:
        return ((0, half, 1), (half, width - half, 1))
    singles = tuple((half + i, 1, 1) for i in range(width - half))
    return ((0, half, 2), *singles)


def order_of(case: OrderCase, logs: Path, mutation: Mutation | None = None) -> OrderReport:
    """Run all ranks of a job without peers and check their calls."""
    run_alone(run_case, case, mutation, num_ranks=case.num_ranks, logs=logs)
    return check_order([read_log(log_of(logs, rank)) for rank in range(case.num_ranks)])


def run_case(case: OrderCase, mutation: Mutation | None = None) -> None:
    """Run the job on a lone rank."""
    job = case.job()
    engine = build_engine(job)
    names = [strategy.name for strategy in engine.pool.strategies]
    forward_step = make_forward_step()

    def batches_of(name: str, iteration: int) -> list[Any]:
        strategy = engine.pool.strategy(name)
        assignment = job.assignments[iteration]
        if name != names[job.schedule[iteration]]:
            assignment = uneven_assignment(strategy, iteration)
        packs = packs_of_rank(
            *(strategy, assignment, _endless(job.batches[iteration]), engine.rank),
            num_predictions=engine.definition.num_predictions,
        )
        return [batch.pinned().to(engine.device, non_blocking=True) for batch in packs]

    with _mutated(mutation):
        for i, which in enumerate(job.schedule):
            upcoming = names[job.schedule[(i + 1) % len(job.schedule)]]
            outcome = engine.train_step(
                names[which],
                batches_of(names[which], i),
                forward_step,
                next_strategy=upcoming if job.knows_next else None,
                phase=_marked(f"iteration {i} in {names[which]}"),
            )
            assert outcome.updated
            if case.evaluated_in:
                mark(f"evaluation after iteration {i} in {case.evaluated_in}")
                engine.evaluate(case.evaluated_in, batches_of(case.evaluated_in, i), forward_step)
        engine.close()


def elements_by_call(case: OrderCase) -> tuple[list[int], list[int], int]:
    """On a lone rank: by the transfer plans of a case of one strategy, what the busiest rank sends
    or receives in each call of a gather and of a scatter, and in all calls if each had one bucket.
    """
    engine = build_engine(case.job())
    (strategy,) = engine.pool.strategies
    roles = engine.definition.roles_of(strategy)
    amounts = StrategyAmounts(LayoutAmounts(engine.layout, strategy.ranks_per_node), roles)
    regrouper = engine.runtime_of(strategy.name).regrouper

    def busiest(calls: Calls, which: int) -> list[int]:
        found = (call_amounts(regrouper.collective, amounts, call)[which] for call in calls)
        return [int(max(of.sent.max(), of.received.max())) for of in found]

    rising = tuple((bucket.index,) for bucket in engine.layout.buckets)
    gather, scatter = (busiest(regrouper.calls, which) for which in (0, 1))
    return gather, scatter[::-1], sum(busiest(rising, 0) + busiest(rising, 1))


def train_and_save(root: str) -> None:
    """Run iterations in two strategies on a rank with peers while a checkpoint is saved."""
    case = IN_SUITE[0]
    job = case.job()
    engine = build_engine(job)
    forward_step = make_forward_step()
    saver = CheckpointSaver(CheckpointFolder(Path(root)), engine, asynchronous=True)
    for i, which in enumerate(job.schedule):
        strategy = engine.pool.strategies[which]
        packs = packs_of_rank(strategy, job.assignments[i], job.batches[i], engine.rank)
        engine.train_step(
            strategy.name,
            [batch.pinned().to(engine.device, non_blocking=True) for batch in packs],
            forward_step,
            next_strategy=engine.pool.strategies[job.schedule[(i + 1) % NUM_ITERATIONS]].name,
            phase=_marked(f"iteration {i} in {strategy.name}"),
        )
        mark(f"saving after iteration {i}")
        if i == 0:
            saver.save(saved_state(engine, i))
        else:
            saver.poll()
    saver.finish()
    engine.close()


def _endless(batch: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Enough sequences for any assignment."""
    return batch * MAX_MICRO_BATCHES * 4


def _marked(what: str) -> Callable[[str], Any]:
    @contextmanager
    def phase(name: str) -> Iterator[None]:
        mark(f"{what}, {name}")
        yield
        mark(f"{what}, after {name}")

    return phase


@contextmanager
def _mutated(mutation: Mutation | None) -> Iterator[None]:
    original = ScatterPass.__init__

    def changed(self: ScatterPass, *args: Any, post_from: PostFrom, **options: Any) -> None:
        if mutation is not None and post_from is mutation[0]:
            post_from = mutation[1]
        original(self, *args, post_from=post_from, **options)

    with patch.object(ScatterPass, "__init__", changed):
        yield


SHARED_WEIGHTS = OrderCase(("cp4~fs", "tp2cp2fs"), 4, evaluated_in="cp2fs+pp2")
ADAPTERS = OrderCase(("tp2pp2",), 4, model=ADAPTED)
IN_SUITE = (
    OrderCase(("tp2pp2", "tp2cp2"), 4),
    OrderCase(("pp3:2,1,1+idle", "2*tp1+tp2"), 4),
    OrderCase(("cp4~", "tp2+2*tp1"), 4),
    OrderCase(("pp4", "pp2+tp2"), 4, evaluated_in="2*tp2"),
    OrderCase(("cp2pp2", "2*pp2"), 4, model=FULL_RECOMPUTE),
    SHARED_WEIGHTS,
    OrderCase(("tp2pp2",), 4, model=PLAIN_MODEL),
)
"""All but the last, with a pool of one, gather for the next strategy during the update."""

NIGHTLY = (
    OrderCase(("pp2+tp2", "cp4~"), 4, model=PREDICTING),
    OrderCase(("tp2cp2", "cp4~"), 4, model=LATENT_MODEL),
    ADAPTERS,
    OrderCase(("pp2",), 2),
    OrderCase(("tp2cp2pp2", "tp4+2*tp2"), 8),
    OrderCase(("tp2pp3+pp2", "tp4pp2"), 8),
    OrderCase(("tp2pp4", "pp4+2*tp2", "8*tp1"), 8),
    OrderCase(("cp4~pp2", "2*tp2pp2"), 8, evaluated_in="tp2+2*tp2+2*idle"),
    OrderCase(("cp2~pp2", "tp2pp2"), 4),
    OrderCase(("tp2cp2~", "pp2@3,1+tp2@0,2"), 4),
    OrderCase(("pp2+2*idle", "tp4"), 4, evaluated_in="pp2+2*idle"),
    OrderCase(("pp2+tp2",), 4, model=replace(MODEL, tied=True)),
    OrderCase(("tp2pp2", "tp2cp2"), 4, knows_next=False),
    OrderCase(("tp2pp2", "cp4~"), 4, overlap=False),
    OrderCase(("4*tp1", "pp4:1,1,1,1", "pp2+2*tp1"), 4),
    OrderCase(("cp4", "cp2pp2"), 4, model=replace(MODEL, num_groups=2)),
    OrderCase(("tp2pp2", "pp2+tp2"), 4, model=replace(MODEL, granularity="selective")),
    OrderCase(("2*tp2+4*tp1", "4*pp2", "tp2pp2+4*tp1"), 8, ranks_per_node=4),
    OrderCase(("2*tp2+4*tp1", "8*tp1"), 8, ranks_per_node=4, gradient_dtype=torch.bfloat16),
    OrderCase(("cp8~fs", "tp2cp4fs"), 8),
    OrderCase(("cp4~fs+pp4", "tp2cp2fs+2*tp2"), 8, evaluated_in="cp8~fs"),
    OrderCase(("cp4~fs+tp2pp2", "2*cp2fs+cp4fs"), 8, model=FULL_RECOMPUTE),
    OrderCase(("tp2cp2~fs@3,1,2,0", "cp4"), 4, model=replace(MODEL, granularity="selective")),
    OrderCase(("cp4fs", "cp2fs+2*idle"), 4, model=replace(MODEL, tied=True), knows_next=False),
    OrderCase(("cp4~fs", "2*cp2fs"), 4, gradient_dtype=torch.bfloat16, overlap=False),
    OrderCase(("tp2cp2fs", "pp2+cp2fs"), 4, model=LATENT_MODEL),
    OrderCase(("tp2cp2fs", "cp4~fs"), 4, model=PLAIN_MODEL),
    OrderCase(("cp4fs", "cp4~fs"), 4, model=replace(MODEL, num_groups=2), ranks_per_node=2),
    OrderCase(("cp4~fs",), 4, model=PARTLY_FROZEN),
    OrderCase(("cp4~fs", "tp2cp2fs"), 4, model=PARTLY_FROZEN, evaluated_in="cp2fs+pp2"),
)


def print_table() -> None:
    """All cases and both mutations, for docs/results.md."""
    print("| job | ranks | operations | exchanges | result |\n|---|---|---|---|---|")
    cases: list[tuple[OrderCase, Mutation | None, str]] = [
        *((case, None, "") for case in (*IN_SUITE, *NIGHTLY)),
        (IN_SUITE[0], FIRST_STAGE_BEFORE_ITS_RECEIVE, "; a first stage posts before its receive"),
        (IN_SUITE[0], LATER_STAGE_BEFORE_ITS_SEND, "; a later stage posts before its send"),
    ]
    for case, mutation, what in cases:
        with TemporaryDirectory() as folder:
            report = order_of(case, Path(folder), mutation)
        result = f"a cycle of {len(report.cycle)} ranks" if report.cycle else "one order holds all"
        if report.mismatches:
            result = f"{len(report.mismatches)} calls do not match"
        name = f"`{'`, `'.join(case.strategies)}`{case.details}{what}"
        operations = sum(report.num_operations)
        print(f"| {name} | {case.num_ranks} | {operations} | {report.num_exchanges} | {result} |")


if __name__ == "__main__":
    # Imported by name, so that ranks unpickle the same class.
    from tests.cuda_stand_in import orders

    orders.print_table()
