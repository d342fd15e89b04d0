"""``python -m megatron.hydraulis inspect-checkpoint``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.checkpoint.byte_progress import size_text

if TYPE_CHECKING:
    from megatron.hydraulis.checkpoint.inspection import FolderInspection, Inspection

__all__ = ["add_arguments", "run"]

EXIT_INCOMPLETE = 1
_WIDTH = 100
"""Columns where the output is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the subcommand."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of checkpoints, as --save names it, or of a single one (iter_…, release); of "
        "this program or of plain Megatron",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compare sizes only, not checksums, for which every byte is read",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.epilog = "The exit status is 1 where anything is damaged or incomplete."


def run(namespace: argparse.Namespace) -> int:
    """Print what is there; 1 unless every checkpoint is complete. Raises CheckpointError."""
    from megatron.hydraulis.checkpoint.inspection import inspect_folder  # so that help is quick

    found = inspect_folder(namespace.folder, checks_content=not namespace.quick)
    if namespace.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        _print(found, with_tensors=namespace.tensors)
    return 0 if found.is_complete else EXIT_INCOMPLETE


def _print(found: FolderInspection, *, with_tensors: bool) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, width=_WIDTH)
    if found.is_single:
        console.print(f"{found.path}: {_verdict(found.checkpoints[0])}")
    else:
        what = _counted(len(found.checkpoints), "checkpoint")
        console.print(f"{found.path}: {what}, latest: {found.latest or 'none'}")
        console.print(_table(found), soft_wrap=False)
    for problem in found.problems:
        console.print(f"  {problem}")
    for each in found.checkpoints:
        for problem in each.problems if not each.is_under_way else ():
            # A path in front of it is the folder's own, told already.
            told = problem.removeprefix(f"{each.path}: ").removeprefix(f"{each.path}/")
            console.print(f"  {told}" if found.is_single else f"  {each.path.name}: {told}")
    newest = next((each for each in reversed(found.checkpoints) if each.tensors), None)
    if newest is not None:
        if not found.is_single:
            console.print(f"{newest.path.name}:")
        console.print(_facts(newest), soft_wrap=False)
    if with_tensors:
        for each in found.checkpoints:
            if each.tensors:
                console.print(_tensors(each), soft_wrap=False)


def _verdict(each: Inspection) -> str:
    if each.is_under_way:
        return "not finished: under way or interrupted"
    if not each.is_complete:
        return "DAMAGED OR INCOMPLETE"
    if each.written_by == "megatron":
        return "complete by Megatron's own metadata (it has no checksums)"
    return "complete, checksums right" if each.checks_content else "complete, sizes right"


def _table(found: FolderInspection) -> Table:
    """A row a checkpoint."""
    table = Table()
    table.add_column("checkpoint")
    table.add_column("state")
    for column in ("sequences", "ranks", "size"):
        table.add_column(column, justify="right")
    for each in found.checkpoints:
        ranks = "" if each.num_ranks is None else str(each.num_ranks)
        consumed = each.num_consumed_sequences
        table.add_row(
            each.path.name,
            _verdict(each),
            "" if consumed is None else f"{consumed:,}",
            ranks,
            "" if each.num_bytes is None else size_text(each.num_bytes),
        )
    return table


def _facts(each: Inspection) -> Table:
    """What is in one, a line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _lines(each):
        table.add_row(f"  {name}", value)
    return table


def _lines(each: Inspection) -> Iterator[tuple[str, str]]:
    writer = "this program" if each.written_by == "hydraulis" else "plain Megatron"
    ranks = "" if each.num_ranks is None else f" on {_counted(each.num_ranks, 'rank')}"
    yield "written by", writer + ranks
    if each.iteration is not None:
        yield "iteration", f"{each.iteration:,}"
    if each.num_consumed_sequences is not None:
        yield "consumed", f"{each.num_consumed_sequences:,} sequences"
    if each.num_bytes is not None:
        yield "size", size_text(each.num_bytes)
    parameters = each.parameters
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in parameters.values()})
    yield (
        "parameters",
        f"{each.num_parameters:,} in {len(parameters)} tensors, {' and '.join(dtypes)}",
    )
    if each.has_resumable_optimizer:
        yield "optimizer", "fp32 master and moments, for any layout of ranks"
    else:
        yield "optimizer", "in a form of its ranks' layout" if each.has_optimizer else "none"
    if each.pool:
        yield "pool", "; ".join(each.pool)
    told = ", ".join(f"{name} {value}" for name, value in each.model.items() if value is not None)
    if told:
        yield "model", told


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _tensors(each: Inspection) -> Table:
    """All of a checkpoint's."""
    table = Table(title=each.path.name, title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("chunks", justify="right")
    for key, tensor in sorted(each.tensors.items()):
        shape = " × ".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        table.add_row(key, shape, dtype, str(tensor.num_chunks))
    return table
