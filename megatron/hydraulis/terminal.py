"""Output of commands: progress bars, tables that fit the terminal, or JSON."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from megatron.hydraulis.errors import printable

_WIDTH_WITHOUT_TERMINAL = 100
_BYTES_PER_MB = 1e6
_BYTES_PER_GB = 1e9
_LINE_INTERVAL_S = 8.0
_CHECK_INTERVAL_S = 1.0

OnProgress = Callable[[str, int, int], None]
"""A function of the name of a phase, the number of its completed steps, and of all its steps."""


def results_console(width: int = _WIDTH_WITHOUT_TERMINAL) -> Console:
    """A console on stdout, as wide as the terminal, or ``width`` columns if it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


class TimeLeftColumn(TimeRemainingColumn):
    """The remaining time, marked as such."""

    def render(self, task: Task) -> Text:
        """See TimeRemainingColumn."""
        return super().render(task).append(" left")


class ProgressBars(Progress):
    """Bars on stderr, so that stdout has only the results; lines where stderr is no terminal.

    Args:
        columns: after the description and the bar.
        is_shown: False for neither bars nor lines.
        line_interval_s: between lines; a step within it prints none.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        is_shown: bool = True,
        line_interval_s: float = _LINE_INTERVAL_S,
    ) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            *columns,
            console=console,
            transient=True,
            disable=not (is_shown and console.is_terminal),
        )
        self._figures = columns
        self._prints_lines = is_shown and self.disable
        self._line_interval_s = line_interval_s
        self._last_line_s = time.monotonic()
        self._has_ended: threading.Event | None = None

    def start(self) -> None:
        """See Progress. Lines come from a thread too, also while a long step gives no sign."""
        super().start()
        if self._prints_lines and self._line_interval_s and self._has_ended is None:
            self._has_ended = threading.Event()
            threading.Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        """See Progress."""
        super().stop()
        if self._has_ended is not None:
            self._has_ended.set()

    def _print_lines(self) -> None:
        assert self._has_ended is not None  # set before the thread starts
        while not self._has_ended.wait(min(self._line_interval_s, _CHECK_INTERVAL_S)):
            if self.tasks:
                self._print_line(self.tasks[-1].id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Counts steps as done."""
        super().advance(task_id, advance)
        self._print_line(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """See Progress."""
        super().update(task_id, **changes)
        self._print_line(task_id)

    def _print_line(self, task_id: TaskID) -> None:
        now_s = time.monotonic()
        if self._prints_lines and now_s - self._last_line_s >= self._line_interval_s:
            self._last_line_s = now_s
            (task,) = (task for task in self.tasks if task.id == task_id)
            figures = ", ".join(str(column(task)) for column in self._figures)
            print(f"{task.description} ({figures})", file=sys.stderr, flush=True)


@contextmanager
def phase_progress(*, prefix: str = "", is_shown: bool = True) -> Iterator[OnProgress]:
    """Shows a bar for each phase on stderr: its steps, time so far, time that is left."""
    columns = (
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
        TimeLeftColumn(),
    )
    with ProgressBars(*columns, is_shown=is_shown) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(prefix + what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield on_progress


@contextmanager
def shown_while(what: str) -> Iterator[None]:
    """Shows on stderr how long work of one step takes."""
    with phase_progress() as on_progress:
        on_progress(what, 0, 1)
        yield


class ByteProgress:
    """Progress in bytes. The first ones start the bar and with it a thread, so that processes can
    be forked before."""

    def __init__(self, what: str, num_bytes: int) -> None:
        self._bars = ProgressBars(DownloadColumn(), TimeLeftColumn())
        self._task = self._bars.add_task(what, total=num_bytes)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        self._bars.start()
        self._bars.advance(self._task, num_bytes)


def size_text(num_bytes: int) -> str:
    """A size in MB or GB."""
    if num_bytes < _BYTES_PER_GB:
        return f"{num_bytes / _BYTES_PER_MB:.1f} MB"
    return f"{num_bytes / _BYTES_PER_GB:.2f} GB"


def figures_table(
    title: str, texts: Sequence[str] = (), numbers: Sequence[str] = (), *, caption: str = ""
) -> Table:
    """A table with columns of text, then right-aligned columns of numbers."""
    table = Table(
        title=title, title_justify="left", caption=caption or None, caption_justify="left"
    )
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


@dataclass(frozen=True, slots=True)
class StrategyText:
    """A text with strategies in a table: lines break between words and terms, not inside of a term
    such as ``6*tp4cp2``, unless it is longer than a line."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max((len(piece.rstrip()) for piece in self._pieces()), default=0)
        return Measurement(longest, len(self.text)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for piece in self._pieces():
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")

    def _pieces(self) -> list[str]:
        return re.findall(r"[^\s+]+(?:\+|\s*)", self.text)


def table_text(table: Table, width: int) -> str:
    """The table as plain text of a width in columns."""
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=False, highlight=False).print(table)
    return text.getvalue()


def notebook_html(text: str, svg: str = "") -> str:
    """HTML of a result in a notebook: its picture above its tables."""
    svg = svg.replace("<svg", '<svg style="max-width: 100%; height: auto"', 1)
    return f'<div>{svg}<pre style="overflow-x: auto">{html.escape(text)}</pre></div>'


def print_json(content: Any) -> None:
    """Prints content as indented JSON with a final newline."""
    json.dump(content, sys.stdout, indent=1)
    print()


def print_next(command: str, *words: str | Path | int) -> None:
    """Prints the command that usually follows, in one line that a shell reads as it is.

    command: printed as it is; words: quoted where a shell needs it.
    """
    print(f"next: {command} {printable(shlex.join(map(str, words)))}")


def print_next_proposal(
    num_ranks: int, ranks_per_node: int, cost_profile: str | Path, seq_length: int | None
) -> None:
    """Prints the command that proposes a pool for a job with a cost profile.

    seq_length: tokens of the longest sequence; None if not given.
    """
    print_next(
        "hydraulis propose --lengths CORPUS.idx --global-batch-size N --num-ranks",
        *(num_ranks, "--ranks-per-node", ranks_per_node),
        *([] if seq_length is None else ["--seq-length", str(seq_length)]),
        *("--cost-profile", cost_profile, "--out", "pool.json"),
    )


def launch_command(num_ranks: int, ranks_per_node: int) -> str:
    """The words that start training on the ranks of a job: as a job of Slurm if they are on several
    nodes."""
    if num_ranks > ranks_per_node:
        return (
            f"sbatch --nodes {num_ranks // ranks_per_node} --gpus-per-node {ranks_per_node} "
            f"scripts/slurm/pretrain_gpt.sbatch"
        )
    return f"torchrun --standalone --nproc-per-node {num_ranks} --no-python hydraulis train"


def profile_command(num_ranks: int, ranks_per_node: int, largest: int) -> str:
    """The words that measure schemes: on one node if it holds them and the job has several.

    largest: ranks of a replica of the largest scheme.
    """
    if num_ranks <= ranks_per_node:
        where, launcher = f"--standalone --nproc-per-node {num_ranks}", "torchrun"
    elif largest <= ranks_per_node:
        where = f"--standalone --nproc-per-node {ranks_per_node}"
        launcher = (
            f"srun --nodes 1 --ntasks 1 --gpus-per-node {ranks_per_node} --exclusive --mem 0 "
            f"--cpu-bind none torchrun"
        )
    else:
        num_nodes = -(-largest // ranks_per_node)
        launcher = f"torchrun --nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        where = f"--nproc-per-node {ranks_per_node}"
    return f"{launcher} {where} --no-python hydraulis profile"
