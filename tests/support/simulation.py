"""Small simulations with known times, and where the time of their ranks went."""

import itertools
import math
from collections.abc import Sequence

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model import Coefficients, ModelShape
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.regrouping import Hiding, RegroupCosts
from megatron.hydraulis.simulator.results import PARTS, IterationAccount, account
from megatron.hydraulis.simulator.simulation import IterationTasks, Simulator
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Strategy
from tests.support.planning import TableCostModel

ONE_MS_A_TOKEN = Coefficients(0.0, 1.0, 0.0)
SMALL_SHAPE = ModelShape(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=64,
    gated_mlp=True,
    tied_embeddings=False,
)


def work_of(
    text: str, replicas: Sequence[Sequence[int]], *, num_ranks: int, plan_time_s: float = 0.0
) -> IterationWork:
    """Micro-batches of these tokens on each replica of a strategy, nodes of 2 ranks."""
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=2 if num_ranks % 2 == 0 else None)
    shares = tuple(
        tuple(MicroBatchWork.packed([tokens]) for tokens in replica) for replica in replicas
    )
    return IterationWork(strategy, shares, plan_time_s)


def simulator(
    *,
    regroup: RegroupCosts | None = None,
    shape: ModelShape | None = None,
    times: Coefficients = ONE_MS_A_TOKEN,
    overheads: dict[str, float] | None = None,
    plan_ahead: int = 2,
) -> Simulator:
    """A simulator in which a token takes 1 ms by default."""
    cost_model = TableCostModel(times=lambda _: times, overheads=overheads or {})
    return Simulator(
        StageCosts(cost_model, shape),
        regroup=regroup,
        plan_ahead=plan_ahead,
    )


def regroup_costs(
    num_ranks: int,
    *,
    ranks_per_node: int = 2,
    inside_bytes_per_s: float = 1e9,
    across_bytes_per_s: float = 1e8,
    hiding: Hiding = Hiding.THREADS,
) -> RegroupCosts:
    """Costs of regrouping the small shape, without latencies."""
    cluster = Cluster(
        num_nodes=num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        intra_node=Link(bytes_per_s=inside_bytes_per_s, latency_s=0.0, source="test"),
        inter_node=Link(bytes_per_s=across_bytes_per_s, latency_s=0.0, source="test"),
    )
    return RegroupCosts(SMALL_SHAPE, cluster, num_atoms=4, memory_bytes_per_s=1e9, hiding=hiding)


def compute_ms(iteration: IterationTasks) -> float:
    """The time from the start of an iteration to the end of its slowest replica."""
    return max(iteration.replica_ends_ms) - iteration.begin_ms


def checked_account(iteration: IterationTasks, *, started_ms: float) -> IterationAccount:
    """`account`, after a check that no stage runs two tasks at a time.

    Work, the gaps between the tasks of every stage and the time of idle ranks must add up to time x
    ranks, as must the parts of the account.
    """
    result = account(iteration, started_ms=started_ms)
    num_idle, spent_ms = iteration.work.strategy.num_ranks, result.work_ms
    for replica in iteration.replicas:
        scheme = replica.replica.scheme
        num_idle -= scheme.num_ranks
        for operations in replica.by_stage:
            tasks = [task for operation in operations for task in operation.tasks]
            times_ms = [started_ms, *itertools.chain(*((t.start_ms, t.end_ms) for t in tasks))]
            borders_ms = [*times_ms, iteration.end_ms]
            gaps_ms = [b - a for a, b in zip(borders_ms[::2], borders_ms[1::2], strict=True)]
            assert min(gaps_ms) >= 0.0
            spent_ms += scheme.tp * scheme.cp * math.fsum(gaps_ms)
    total_ms = iteration.work.strategy.num_ranks * result.time_ms
    assert math.isclose(spent_ms + num_idle * result.time_ms, total_ms, rel_tol=1e-9, abs_tol=1e-6)
    parts_ms = math.fsum(getattr(result, f"{part}_ms") for part in PARTS)
    assert math.isclose(parts_ms, total_ms, rel_tol=1e-9, abs_tol=1e-6)
    return result
