"""Records and run folders as training writes them: metrics, configuration, trace."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.hydraulis.observability.records import IterationRecord, MetricsWriter
from megatron.hydraulis.observability.report_data import Run, read_run
from megatron.hydraulis.observability.trace import Span, TraceWriter, rank_file

STRATEGY = "tp2+2*tp1"
REPLICAS = {
    STRATEGY: [("tp2", [0, 1]), ("tp1", [2]), ("tp1", [3])],
    "pairs": [("tp2", [0, 1]), ("tp2", [2, 3])],
    "long": [("tp4", [0, 1, 2, 3])],
}
"""By strategy: scheme and ranks of each replica."""


def write_run(run_dir: Path, records: Sequence[IterationRecord]) -> Path:
    with MetricsWriter(run_dir) as writer:
        for record in records:
            writer.write(record)
    return run_dir


def write_config(
    run_dir: Path, strategies: Sequence[str] = (STRATEGY,), train_iters: int = 8, **ours: Any
) -> None:
    """The parts of ``config.json`` that a report reads; `ours` are our flags."""
    config = {
        "num_ranks": 4,
        "ranks_per_node": 4,
        "cost_model": "analytic, device 'cpu'",
        "strategies": [
            {
                "name": name,
                "strategy": name if name == STRATEGY else f"notation of {name}",
                "replicas": [
                    {"scheme": scheme, "ranks": ranks, "max_tokens_per_micro_batch": 4096}
                    for scheme, ranks in REPLICAS[name]
                ],
            }
            for name in strategies
        ],
        "left_out": ["strategy 'wide' is skipped: cp is 2"],
        "model": {"num_layers": 4, "hidden_size": 128, "num_parameters": 1_115_264},
        "hydraulis": {"plan_ahead": 2, "trace": str(run_dir / "trace"), "cost_profile": None}
        | ours,
        "settings": {
            "train_iters": train_iters,
            "global_batch_size": 16,
            "seq_length": 1024,
            "bf16": True,
        },
    }
    (run_dir / "config.json").write_text(json.dumps(config))


def write_trace(
    folder: Path, records: Sequence[IterationRecord], *, slower: dict[int, float] | None = None
) -> None:
    """Every replica takes twice its predicted time, times `slower` of a rank.

    A second passes between the iterations.
    """
    num_ranks = 1 + max(rank for _, ranks in REPLICAS[records[0].strategy] for rank in ranks)
    for rank in range(num_ranks):
        with TraceWriter(rank_file(folder, rank)) as writer:
            start_us = 0.0
            for record in records:
                writer.write(_spans(record, rank, start_us, (slower or {}).get(rank, 1.0)))
                start_us += record.iteration_time_s * 1e6 + 1e6


def _spans(record: IterationRecord, rank: int, start_us: float, scale: float) -> list[Span]:
    detail: dict[str, int | str] = {"iteration": record.iteration, "strategy": record.strategy}
    end_us = start_us + record.iteration_time_s * 1e6
    whole: dict[str, Any] = {"track": "iteration", "name": "iteration", "detail": detail}
    spans = [Span(rank=rank, start_us=start_us, end_us=end_us, **whole)]
    for (_, ranks), time_s in zip(REPLICAS[record.strategy], record.replica_times_s, strict=True):
        if rank not in ranks or not time_s:
            continue
        middle_us = start_us + 0.5 * scale * time_s * 1e6
        last_us = start_us + 2.0 * scale * time_s * 1e6
        work: dict[str, Any] = {"track": "compute", "detail": {**detail, "micro_batch": 0}}
        spans += [
            Span(rank=rank, name="forward", start_us=start_us, end_us=middle_us, **work),
            Span(rank=rank, name="backward", start_us=middle_us, end_us=last_us, **work),
        ]
    return spans


def make_record(iteration: int = 1, **changes: Any) -> IterationRecord:
    """A valid record with some changes."""
    values: dict[str, Any] = {
        "iteration": iteration,
        "lm_loss": 9.0 - iteration / 8,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "num_sequences": 16,
        "num_tokens": 24_310,
        "strategy": "tp2+2*tp1",
        "iteration_time_s": 1.25,
        "predicted_time_s": 1.0,
        "padding_fraction": 0.004,
        "imbalance": 1.07,
        "consumed_samples": 16 * iteration,
        "plan_time_s": 0.0012,
        "plan_wait_s": 0.0001,
        "plan_fetch_s": 0.0004,
        "replica_times_s": (1.0, 0.75, 0.5),
        "plan_status": "certified",
        "plan_gap": 0.0005,
        "num_marked_plans": 0,
    }
    values |= changes
    return IterationRecord(**({"trained_tokens": values["num_tokens"]} | values))


def make_run(*records: IterationRecord, folder: str | Path = "run") -> Run:
    """The run of one process, without a configuration."""
    return Run(folder=Path(folder), records=records, starts=frozenset({records[0].iteration}))


def make_records(num: int = 8, **changes: Any) -> list[IterationRecord]:
    """Records of one strategy, whose iterations take 2.2 s of a predicted second, the first one 9
    s."""
    return [
        make_record(
            number,
            **(
                {
                    "iteration_time_s": 9.0 if number == 1 else 2.2,
                    "num_tokens": 22_000,
                    "regroup_bytes": 5_000_000,
                    "gather_wait_s": 0.011,
                    "scatter_wait_s": 0.022,
                    "column_bytes": 7_000_000,
                    "column_wait_s": 0.033,
                }
                | changes
            ),
        )
        for number in range(1, num + 1)
    ]


def make_pool_records(num: int = 12) -> list[IterationRecord]:
    """Two strategies in turn, of two replicas and of one."""
    return [
        make_record(
            number,
            strategy="pairs" if number % 3 else "long",
            replica_times_s=(1.0, 0.9) if number % 3 else (1.1,),
            imbalance=1.0 / 0.95 if number % 3 else 1.0,
        )
        for number in range(1, num + 1)
    ]


def run_of(
    run_dir: Path,
    records: Sequence[IterationRecord],
    strategies: Sequence[str] = (STRATEGY,),
    **ours: Any,
) -> Run:
    """Reads a run folder after it has been written."""
    write_run(run_dir, records)
    write_config(run_dir, strategies, train_iters=len(records), **ours)
    return read_run(run_dir)
