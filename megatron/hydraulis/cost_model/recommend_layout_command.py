"""``python -m megatron.hydraulis recommend-layout``: which layout for fixed-length training."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.layout import FixedLengthJob
from megatron.hydraulis.cost_model.layout_constants import DEFAULT_KERNEL, LAYOUT_CONSTANTS
from megatron.hydraulis.cost_model.layout_search import LayoutSearch, Verdict, search_layouts
from megatron.hydraulis.cost_model.shape_arguments import add_shape_arguments, shape_of
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["add_arguments", "run"]

_WIDTH = 100
"""Columns of the tables where the output is no terminal."""
_KERNELS = ", ".join(repr(kernel.name) for kernel in LAYOUT_CONSTANTS.kernels)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    add_shape_arguments(parser)
    job = parser.add_argument_group("job")
    job.add_argument(
        "--device", required=True, metavar="NAME", help="a100-80g, a100-40g, a800-80g, h100, h200"
    )
    job.add_argument("--num-ranks", type=int, required=True, metavar="N", help="GPUs of the job")
    job.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="(default: 8)")
    job.add_argument(
        "--seq-length", type=int, required=True, metavar="N", help="tokens of every sequence"
    )
    job.add_argument(
        "--global-batch-size", type=int, required=True, metavar="N", help="sequences of a step"
    )
    job.add_argument(
        "--kernel",
        default=DEFAULT_KERNEL,
        metavar="NAME",
        help=f"one of {_KERNELS} (default: %(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top", type=int, default=10, metavar="N", help="layouts to print (default: %(default)s)"
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print all layouts as JSON: times in s, memory in bytes of the fullest rank",
    )


def run(namespace: argparse.Namespace) -> int:
    """Rank the layouts and print them; returns the exit status.

    Raises ConfigurationError for flags that make no sense, PlanError when no layout fits.
    """
    if namespace.top < 1:
        raise ConfigurationError(
            f"--top is at least 1 but is {namespace.top}; give a positive number"
        )
    num_ranks, ranks_per_node = namespace.num_ranks, namespace.ranks_per_node
    if num_ranks > ranks_per_node > 0 and num_ranks % ranks_per_node:
        raise ConfigurationError(
            f"a job fills whole nodes but --num-ranks {num_ranks} is no multiple of "
            f"--ranks-per-node {ranks_per_node}; correct either"
        )
    job = FixedLengthJob(
        shape=shape_of(namespace),
        num_ranks=namespace.num_ranks,
        ranks_per_node=namespace.ranks_per_node,
        sequence_tokens=namespace.seq_length,
        num_sequences=namespace.global_batch_size,
    )
    search = search_layouts(job, device_constants(namespace.device), namespace.kernel)
    if namespace.json:
        json.dump(_to_json(search), sys.stdout, indent=1)
        print()
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    best = search.ranked[0].prediction
    console.print(_table(f"fastest of {len(search.ranked)} that fit", search.ranked, namespace.top))
    faster = sorted(
        (v for v in search.rejected if v.prediction.time.total_s < best.time.total_s),
        key=lambda verdict: verdict.prediction.memory.total_bytes,
    )
    if faster:
        title = f"would be faster than the first, but out of memory ({len(faster)}), least first"
        console.print(_table(title, faster, namespace.top))
    console.print(
        f"{len(search.rejected)} layouts are out of memory, {len(search.refused)} cannot be run: "
        f"--json lists them"
    )
    return 0


def _table(title: str, verdicts: Sequence[Verdict], num_rows: int) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("size", "tp", "pp"):
        table.add_column(column, justify="right")
    table.add_column("SP")
    table.add_column("again")
    for column in ("step s", "MFU %", "GB"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for verdict in verdicts[:num_rows]:
        prediction, layout = verdict.prediction, verdict.prediction.layout
        table.add_row(
            str(layout.micro_batch_size),
            str(layout.tp),
            str(layout.pp),
            "yes" if layout.sequence_parallel else "no",
            "layers" if layout.recomputes_layers else "none",
            f"{prediction.time.total_s:.2f}",
            f"{100.0 * prediction.mfu:.1f}",
            f"{prediction.memory.total_bytes / 1e9:.1f}",
            verdict.why,
        )
    return table


def _to_json(search: LayoutSearch) -> dict[str, Any]:
    return {
        "ranked": [_verdict_to_json(verdict) for verdict in search.ranked],
        "rejected": [_verdict_to_json(verdict) for verdict in search.rejected],
        "refused": [dataclasses.asdict(refusal) for refusal in search.refused],
    }


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    prediction, layout = verdict.prediction, verdict.prediction.layout
    return {
        "micro_batch_size": layout.micro_batch_size,
        "tp": layout.tp,
        "pp": layout.pp,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": "full" if layout.recomputes_layers else None,
        "predicted_step_time_s": prediction.time.total_s,
        "predicted_mfu": prediction.mfu,
        "predicted_memory_bytes": prediction.memory.total_bytes,
        "usable_memory_bytes": prediction.usable_bytes,
        "predicted_fits": prediction.fits,
        "rule": verdict.rule,
        "why": verdict.why,
        "time_s": dataclasses.asdict(prediction.time),
        "memory": dataclasses.asdict(prediction.memory),
    }
