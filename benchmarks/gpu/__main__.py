"""Checks everything that needs a GPU, within minutes: a table, and one file to send back.

The steps, what they expect and why are in checks.py. Each is run in separate processes, so that
one that fails or hangs does not stop the others. `scripts/gpu_checks.sh` prepares the environment.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.checks import num_gpus_used, steps
from benchmarks.gpu.runner import ROOT, WIDTH, Results, Run, StepFailure, run_steps
from benchmarks.gpu.sizes import sizes_of

DEFAULT_FOLDER = Path("runs/gpu_checks")
MACHINE_LIMIT_S = 120.0
EXIT_STATUS_OF_FAILURE, EXIT_STATUS_WITHOUT_GPU, EXIT_STATUS_OF_INTERRUPT = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; returns the exit status."""
    options = _parser().parse_args(argv)
    begun_s = time.monotonic()
    # A rank that hangs is ended by SIGABRT; an image of its memory is of no use.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        machine = _machine()
    except StepFailure as error:
        print(f"error: torch and Megatron cannot be used here: {error}")
        return EXIT_STATUS_WITHOUT_GPU
    devices = machine["devices"]
    if not devices:
        print(
            "error: these checks need a GPU but torch finds no CUDA device; run them where there "
            "is one"
        )
        return EXIT_STATUS_WITHOUT_GPU
    num_gpus = min(len(devices), options.gpus or len(devices))
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = steps(
            sizes_of(
                is_small=options.small,
                memory_bytes=min(device["memory_bytes"] for device in devices),
            ),
            num_gpus,
            peak_flops_per_s=machine["peak_flops_per_s"],
            profile_path=(folder / "cost_profile.json").resolve(),
        )
        unknown = set(options.steps or ()) - {step.name for step in chosen}
        if unknown:
            names = ", ".join(f"'{step.name}'" for step in chosen)
            print(f"error: no step is called {sorted(unknown)}; there are {names}")
            return EXIT_STATUS_WITHOUT_GPU
        chosen = tuple(s for s in chosen if options.steps is None or s.name in options.steps)
        now = datetime.now(UTC)
        device = re.sub(r"[^A-Za-z0-9]+", "_", devices[0]["name"]).strip("_")
        path = options.results / f"{now:%Y-%m-%d_%H%M}_{num_gpus}x_{device}.json"
        results = Results(
            {
                "date": now.isoformat(timespec="seconds"),
                "commit": _git("rev-parse", "HEAD"),
                "changed_files": _git("status", "--porcelain", "--untracked-files=no"),
                "arguments": list(sys.argv[1:] if argv is None else argv),
                "on_stand_in": options.stand_in,
                "num_gpus": num_gpus,
                "num_gpus_used": num_gpus_used(num_gpus),
                "machine": machine,
            }
        )
        print(
            f"{num_gpus} x {devices[0]['name']}, of which {num_gpus_used(num_gpus)} are used; "
            f"{len(chosen)} steps in at most {options.minutes:g} minutes; results go to {path}",
            flush=True,
        )
        is_complete = run_steps(
            chosen,
            results,
            path,
            budget_s=60.0 * options.minutes - (time.monotonic() - begun_s),
            on_stand_in=options.stand_in,
            say=lambda line: print(line, flush=True),
            keep=folder,
        )
    Console(width=WIDTH).print(results.table())
    took_s = time.monotonic() - begun_s
    print(f"{took_s / 60:.1f} minutes. Please send this file back, whatever it says: {path}")
    if not is_complete:
        return EXIT_STATUS_OF_INTERRUPT
    return EXIT_STATUS_OF_FAILURE if results.has_failed else 0


def _machine() -> dict[str, Any]:
    """Runs machine.py in a process that does not stay on the device; returns what it finds."""
    with tempfile.TemporaryDirectory(prefix="gpu_checks_") as folder:
        run = Run(Path(folder), time.monotonic() + MACHINE_LIMIT_S)
        try:
            text = run.program("-m", "benchmarks.gpu.machine")
        except StepFailure as error:
            raise StepFailure(f"{error}\n{next(iter(run.tails().values()), '')}") from None
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def _git(*words: str) -> str:
    try:
        found = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "no git"
    return found.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=15.0,
        metavar="M",
        help="for everything; steps that are not begun by then are left out (default: %(default)g)",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="use no more than so many GPUs")
    parser.add_argument("--steps", "--parts", nargs="+", metavar="STEP", help="only these steps")
    parser.add_argument(
        "--results",
        type=Path,
        default=DEFAULT_FOLDER,
        metavar="DIR",
        help="folder of the file to send back (default: %(default)s)",
    )
    parser.add_argument(
        "--keep", "--folder", type=Path, metavar="DIR", help="keep logs, runs and profile here"
    )
    parser.add_argument(
        "--small", action="store_true", help="toy models: shows that every step runs, not more"
    )
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="the devices are those of tests/cuda_stand_in: speeds are marked as without meaning",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
