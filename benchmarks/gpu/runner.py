"""Runs steps one after the other within a time budget, and keeps what they measure in one file.

A step measures figures whose bounds are known before it runs. It may fail, hang or be interrupted:
the others run all the same, and the file has the end of its log. The file is written again after
every step. Nothing here imports torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1
WIDTH = 132
"""Columns of the table."""
LEAST_S = 5.0
"""A step is not begun with less of the budget left."""
POLL_S = 0.1
SECONDS_AFTER_FAILURE = 3.0
"""From the end of a rank that failed until the others, which may report it too, are ended."""
SECONDS_FOR_STACKS = 3.0
"""At most from the signal, upon which Python writes the stacks of all threads, to the end."""
TAIL_LINES, TAIL_LINES_OF_OTHERS = 80, 15
TAIL_CHARACTERS = 20_000
MAX_THREADS = 8
NO_MEANING: Final = "on the stand-in: no meaning"

Verdict = Literal["pass", "FAIL", "measured", "not run", "on the stand-in: no meaning"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A quantity that a step measures, with what is expected of it."""

    key: str
    what: str
    """In words that need no knowledge of this project."""
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    is_of_device: bool = False
    """Whether it depends on the speed or memory of the device, so that the stand-in for CUDA cannot
    show it."""

    @property
    def expected(self) -> str:
        """The bound in words."""
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{word} {number(x)}" for word, x in bounds if x is not None) or "-"

    def verdict(self, value: float, *, on_stand_in: bool) -> Verdict:
        """Judges a measured value."""
        if self.is_of_device and on_stand_in:
            return NO_MEANING
        if self.at_most is None and self.at_least is None:
            return "measured"
        is_within = (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )
        return "pass" if is_within else "FAIL"


class StepFailure(RuntimeError):
    """A step cannot go on; the message says why."""


@dataclass(frozen=True)
class Step:
    """A separate check."""

    name: str
    purpose: str
    limit_s: float
    figures: tuple[Figure, ...]
    run: Callable[[Run], None]
    why_not: str = ""
    """Why it cannot run on this machine; empty if it can."""


@dataclass
class Run:
    """A step that runs: its folder, its processes, and what it has measured so far."""

    folder: Path
    deadline_s: float
    """By `time.monotonic`."""
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def figures_path(self) -> Path:
        """The file to which processes append what they measure, see `measured_line`."""
        return self.folder / "figures.jsonl"

    def measured(self, key: str, value: float, **details: Any) -> None:
        """A figure, with what else is worth keeping of it."""
        self.lines.append(measured_line(key, value, **details))

    def lacks(self, key: str, why: str) -> None:
        """A figure that cannot be measured here."""
        self.lines.append({"key": key, "why_not": why})

    def ranks(self, num_ranks: int, *argv: str, name: str = "log", **environment: str) -> list[str]:
        """Run ``python ARGV`` on ranks of one job; what each has written.

        Raises StepFailure if a rank fails or the step's time is over.
        """
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // num_ranks))
        common = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": str(threads),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as the job scripts set
        }
        of_rank = [
            common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment
            for rank in range(num_ranks)
        ]
        logs = [self.folder / f"{name}.rank{rank}.txt" for rank in range(num_ranks)]
        return self._programs(argv, of_rank, logs)

    def program(self, *argv: str, name: str = "log", **environment: str) -> str:
        """Run ``python ARGV`` once, not as a rank; what it has written. Raises as `ranks`."""
        return self._programs(argv, [environment], [self.folder / f"{name}.txt"])[0]

    def all_lines(self) -> list[dict[str, Any]]:
        """Everything measured, also by processes that failed later."""
        found = list(self.lines)
        if self.figures_path.exists():
            for text in self.figures_path.read_text("utf-8").splitlines():
                try:
                    found.append(json.loads(text))
                except json.JSONDecodeError:  # the process was killed while it wrote
                    continue
        return found

    def tails(self) -> dict[str, str]:
        """The end of every log by its name; the first, which has the error, is the longest."""
        logs = sorted(self.folder.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
        marked = [path for path in logs if path.with_suffix(".failed").exists()]
        rest = [path for path in logs if path not in marked]
        return {
            path.stem: _tail(path, TAIL_LINES if path in (marked or logs[-1:]) else None)
            for path in (*marked, *rest)
        }

    def _programs(
        self, argv: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
    ) -> list[str]:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for environment, log in zip(environments, logs, strict=True):
                processes.append(_start(argv, environment, log))
            self._wait(processes, logs, " ".join(argv))
        finally:
            for process in processes:
                _kill(process)
        return [log.read_text("utf-8", errors="replace") for log in logs]

    def _wait(
        self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], what: str
    ) -> None:
        while any(process.poll() is None for process in processes):
            failed = [i for i, process in enumerate(processes) if process.poll()]
            if failed:
                _wait_for_ends(processes, SECONDS_AFTER_FAILURE)
                self._fail(processes, logs, failed, what)
            if time.monotonic() > self.deadline_s:
                late = [i for i, process in enumerate(processes) if process.poll() is None]
                for i in late:  # PYTHONFAULTHANDLER: each writes the stacks of its threads
                    os.killpg(processes[i].pid, signal.SIGABRT)
                    logs[i].with_suffix(".failed").touch()
                _wait_for_ends(processes, SECONDS_FOR_STACKS)
                raise StepFailure(
                    f"{what}: time is over and process {', '.join(map(str, late))} of "
                    f"{len(processes)} has not ended"
                )
            time.sleep(POLL_S)
        failed = [i for i, process in enumerate(processes) if process.poll()]
        if failed:
            self._fail(processes, logs, failed, what)

    def _fail(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        logs: Sequence[Path],
        failed: Sequence[int],
        what: str,
    ) -> None:
        for i in failed:
            logs[i].with_suffix(".failed").touch()
        named = ", ".join(f"process {i} with status {processes[i].returncode}" for i in failed)
        raise StepFailure(f"{what}: {named} of {len(processes)} ended")


def measured_line(key: str, value: float, **details: Any) -> dict[str, Any]:
    """A line of `Run.figures_path`."""
    return {"key": key, "value": float(value), "details": details}


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append to `Run.figures_path`; from one process of a job."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@dataclass
class Results:
    """The content of the file; steps are added as they end."""

    about: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """The figures of all steps."""
        for step in self.steps:
            for row in step["figures"]:
                yield {"step": step["name"], **row}

    @property
    def has_failed(self) -> bool:
        """True if a step or a figure failed."""
        return any(s["status"] == "failed" for s in self.steps) or any(
            row["verdict"] == "FAIL" for row in self.rows
        )

    def table(self) -> Table:
        """One row a figure."""
        table = Table(width=WIDTH, title="What was checked", title_justify="left")
        for name in ("check", "figure", "expected", "measured", "verdict"):
            table.add_column(
                name, overflow="fold", justify="right" if name == "measured" else "left"
            )
        for step in self.steps:
            for i, row in enumerate(step["figures"]):
                value = "-" if row["value"] is None else f"{number(row['value'])} {row['unit']}"
                verdict = row["verdict"] + (f": {row['why']}" if row["why"] else "")
                name = step["name"] if i == 0 else ""
                table.add_row(name, row["what"], row["expected"], value.strip(), verdict)
            table.add_section()
        return table

    def write(self, path: Path) -> None:
        """Write the file; a reader never sees half of one."""
        console = Console(width=WIDTH, file=io.StringIO(), record=True)
        console.print(self.table())
        data = {
            "format": FORMAT,
            **self.about,
            "failed": self.has_failed,
            "steps": self.steps,
            "table": console.export_text().splitlines(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def run_steps(
    steps: Sequence[Step],
    results: Results,
    path: Path,
    *,
    budget_s: float,
    on_stand_in: bool,
    say: Callable[[str], None] = print,
    keep: Path | None = None,
) -> bool:
    """Run the steps in their order and write the file after each; whether all of them had a turn.

    Ctrl-C, and SIGTERM, end the step that runs and all that follow.

    Args:
        steps: to run.
        results: to which they are added.
        path: of the file.
        budget_s: seconds for all steps together.
        on_stand_in: whether the devices are those of the stand-in for CUDA.
        say: shows a line of progress.
        keep: a folder for logs and files of all steps; None deletes them.
    """
    end_s = time.monotonic() + budget_s
    with _folder(keep) as folder, _Interrupts() as interrupts:
        for i, step in enumerate(steps):
            left_s = end_s - time.monotonic()
            why_not = step.why_not
            if interrupts.has_come:
                why_not = "interrupted"
            elif not why_not and left_s < LEAST_S:
                why_not = f"the {budget_s / 60:g} minutes are over"
            if why_not:
                results.steps.append(_outcome(step, "not run", why_not, 0.0, [], on_stand_in))
                say(f"[{i + 1}/{len(steps)}] {step.name}: not run: {why_not}")
                continue
            say(f"[{i + 1}/{len(steps)}] {step.name}: {step.purpose}")
            begun_s = time.monotonic()
            run = Run(folder / step.name.replace(" ", "_"), begun_s + min(left_s, step.limit_s))
            run.folder.mkdir(parents=True, exist_ok=True)
            status, why = "done", ""
            try:
                with interrupts.raised():
                    step.run(run)
            except KeyboardInterrupt:
                status, why = "failed", "interrupted"
            except StepFailure as error:
                status, why = "failed", str(error)
            except Exception as error:
                (run.folder / "step.txt").write_text(traceback.format_exc(), encoding="utf-8")
                (run.folder / "step.failed").touch()
                status, why = "failed", f"{type(error).__name__}: {error}"
            lines = run.all_lines()
            outcome = _outcome(step, status, why, time.monotonic() - begun_s, lines, on_stand_in)
            if status == "failed" or any(row["verdict"] == "FAIL" for row in outcome["figures"]):
                outcome["log_tails"] = run.tails()
            results.steps.append(outcome)
            for row in outcome["figures"]:
                value = "" if row["value"] is None else f" {number(row['value'])} {row['unit']}"
                say(f"    {row['verdict']}: {row['what']}:{value} (expected {row['expected']})")
            say(f"    {status} after {outcome['seconds']:.0f} s{': ' + why if why else ''}")
            results.write(path)
        results.write(path)
    return not interrupts.has_come


def _outcome(
    step: Step,
    status: str,
    why: str,
    seconds: float,
    lines: Sequence[Mapping[str, Any]],
    on_stand_in: bool,
) -> dict[str, Any]:
    by_key = {line["key"]: line for line in lines}
    rows = []
    for figure in step.figures:
        line = by_key.pop(figure.key, {})
        value = line.get("value")
        if value is not None and not math.isfinite(value):
            verdict, reason, value = "FAIL", f"it is {value}", None
        elif value is not None:
            verdict, reason = figure.verdict(value, on_stand_in=on_stand_in), ""
        elif status == "not run" or "why_not" in line:
            verdict, reason = "not run", line.get("why_not", why)
        else:
            verdict, reason = "FAIL", "the step failed" if why else "the step did not measure it"
        rows.append(
            {
                **asdict(figure),
                "expected": figure.expected,
                "value": value,
                "verdict": verdict,
                "why": reason,
                "details": line.get("details", {}),
            }
        )
    return {
        "name": step.name,
        "purpose": step.purpose,
        "status": status,
        "why": why,
        "seconds": round(seconds, 1),
        "limit_s": step.limit_s,
        "figures": rows,
        "other_figures": list(by_key.values()),
    }


def number(value: float) -> str:
    """Four digits, without an exponent where that is readable."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.2g}"


def _start(
    argv: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Starts a command in a new session, so that Ctrl-C reaches it through us, and its children
    with it."""
    folders = [folder for folder in (os.environ.get("PYTHONPATH"), str(ROOT)) if folder]
    settings = {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(folders),
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=os.environ | settings | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_for_ends(processes: Sequence[subprocess.Popen[bytes]], at_most_s: float) -> None:
    end_s = time.monotonic() + at_most_s
    while time.monotonic() < end_s and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _tail(path: Path, num_lines: int | None) -> str:
    lines = path.read_text("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-(num_lines or TAIL_LINES_OF_OTHERS) :])[-TAIL_CHARACTERS:]


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    folder = keep or Path(tempfile.mkdtemp(prefix="gpu_checks_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Interrupts:
    """Ctrl-C and SIGTERM: they end the step that runs, and never the writing of the file."""

    has_come = False

    def __init__(self) -> None:
        self._ends_step = False

    def __enter__(self) -> _Interrupts:
        self._before = {
            number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """The first one raises KeyboardInterrupt in this block."""
        self._ends_step = True
        try:
            yield
        finally:
            self._ends_step = False

    def _take(self, *_: object) -> None:
        self.has_come = True
        if self._ends_step:
            self._ends_step = False
            raise KeyboardInterrupt
