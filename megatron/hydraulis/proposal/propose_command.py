"""``hydraulis propose``: which strategies a pool should hold."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.lengths.lengths_command import (
    add_lengths_arguments,
    check_seed,
    check_seq_length,
)
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.batches import BatchSize, draw_batches
from megatron.hydraulis.proposal.menu import Menu
from megatron.hydraulis.proposal.propose import OnProgress, propose
from megatron.hydraulis.proposal.result import Proposal
from megatron.hydraulis.proposal.tables import proposal_tables
from megatron.hydraulis.strategy.notation import parse_terms

__all__ = ["add_arguments", "run"]

_WIDTH = 100
"""Columns of the tables where the output is no terminal."""
_NUM_BATCHES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    corpus = parser.add_argument_group("corpus and batches")
    add_lengths_arguments(corpus)
    corpus.add_argument(
        "--global-batch-size", type=int, metavar="N", help="sequences of a global batch"
    )
    corpus.add_argument(
        "--global-batch-tokens", type=int, metavar="N", help="or its budget of tokens"
    )
    corpus.add_argument(
        "--num-batches",
        type=int,
        default=_NUM_BATCHES,
        metavar="N",
        help="batches to draw and to be good for (default: %(default)s)",
    )
    job = parser.add_argument_group("job")
    job.add_argument(
        "--cost-profile",
        required=True,
        metavar="FILE",
        help="cost profile, JSON: times of the schemes in ms, their limits in tokens per "
        "micro-batch",
    )
    job.add_argument("--num-ranks", type=int, required=True, metavar="N", help="ranks of the job")
    job.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="ranks of a node (default: all)"
    )
    job.add_argument(
        "--schemes",
        metavar="LIST",
        help="schemes to make strategies of, with '+' between them, as tp8+tp4pp2+tp4 (default: "
        "all of the profile)",
    )
    output = parser.add_argument_group("pool")
    output.add_argument(
        "--max-strategies",
        type=int,
        default=7,
        metavar="K",
        help="most strategies of the pool (default: %(default)s)",
    )
    output.add_argument("--out", metavar="FILE", help="write the pool file here, JSON")
    output.add_argument("--json", action="store_true", help="print all that was found as JSON")
    output.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the batches; same files and flags, same pool (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Propose a pool, print it, write it; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for files and flags that make no sense,
    PlanError when no scheme holds the longest sequence.
    """
    check_seq_length(namespace.seq_length)
    check_seed(namespace.seed)
    counts = read_length_counts(namespace.lengths)
    if namespace.seq_length is not None:
        counts = counts.cut(namespace.seq_length, namespace.long_sequences)
    size = BatchSize(
        num_sequences=namespace.global_batch_size, num_tokens=namespace.global_batch_tokens
    )
    batches = draw_batches(counts, size, namespace.num_batches, namespace.seed)
    cost_model = ProfileCostModel.read(namespace.cost_profile)
    menu = _menu(namespace, cost_model)
    with _progress(is_shown=not namespace.json) as on_progress, native_prints_to_stderr():
        proposal = propose(
            menu,
            cost_model,
            batches,
            max_strategies=namespace.max_strategies,
            longest=counts.longest,
            seed=namespace.seed,
            on_progress=on_progress,
        )
    if namespace.out is not None:
        _write(proposal, namespace.out)
    if namespace.json:
        json.dump(proposal.to_json(), sys.stdout, indent=1)
        print()
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in proposal_tables(proposal):
        console.print(table)
        console.print()
    console.print(
        f"{proposal.num_mixes} strategies estimated closely, {proposal.num_bounds} bounds and "
        f"{proposal.num_plans} plans in {proposal.seconds:.1f} s"
        + (f"; pool written to {namespace.out}" if namespace.out is not None else "")
    )
    return 0


def _menu(namespace: argparse.Namespace, cost_model: ProfileCostModel) -> Menu:
    num_ranks, ranks_per_node = namespace.num_ranks, namespace.ranks_per_node
    if num_ranks < 1 or (ranks_per_node is not None and ranks_per_node < 1):
        raise ConfigurationError(
            f"a job has at least 1 rank on nodes of at least 1 but --num-ranks is {num_ranks} and "
            f"--ranks-per-node {ranks_per_node}; give positive numbers"
        )
    allowed = None
    if namespace.schemes is not None:
        terms = parse_terms(namespace.schemes, label="--schemes")
        allowed = [term.scheme for term in terms if term.scheme is not None]
    return Menu.of(cost_model, num_ranks, ranks_per_node or num_ranks, allowed)


@contextmanager
def _progress(*, is_shown: bool) -> Iterator[OnProgress]:
    """A bar on the error output, where that is a terminal."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    ) as progress:
        tasks = {
            what: progress.add_task(what, total=None, visible=False)
            for what in ("search", "bounds", "plans")
        }

        def on_progress(what: str, done: int, total: int) -> None:
            progress.update(tasks[what], completed=done, total=total, visible=True)

        yield on_progress


def _write(proposal: Proposal, path: str) -> None:
    content = {"version": 1, **proposal.pool.to_json()}
    try:
        write_json(path, content)
    except OSError as error:
        raise ConfigurationError(
            f"--out {path}: must be a path that can be written but: {error.strerror}; "
            f"give another path"
        ) from error
