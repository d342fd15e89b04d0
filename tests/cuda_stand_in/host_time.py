"""Measures how long the host takes to issue a layer's forward and backward.

    python -m tests.cuda_stand_in.host_time [--te] [--kinds KIND …] [--rounds N]

A layer's time for a micro-batch is a second difference of the processor time of training steps:
between two numbers of micro-batches, and two of layers. So loss, optimizer and regrouping cancel.
The machine may have other work, so processor time is taken, not elapsed time, and cases take turns.
Other work can only add to it, through shared caches and cores: the least of several runs counts.
The forward runs in the main thread, the backward in a thread of autograd.

Times are also stated in forwards of one ``torch.nn.Linear``, measured between the steps: its host
time on a GPU server is known, and so the factor between that server's core and this one
(`cost_model/host.py`). What the stand-in takes is subtracted from both: the price of a call that
launches nothing, times the launches that were counted. A driver takes more.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda_stand_in.counters import NUM_RANKS, Case, Side, count, step_of
from tests.cuda_stand_in.lone_ranks import run_alone

LAYERS = (2, 6)
MICRO_BATCHES = (1, 5)
NUM_WARM = 3
NUM_REPEATS = 20
NUM_LINEARS = 300
NUM_CALLS = 100_000
_MS_PER_S, _US_PER_S = 1e3, 1e6
# Copies move nothing, as on a device they would not take the host's time.
_COPY_LIMIT_BYTES = 4096

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, tp2": {"tp": 2},
    "4 experts": {"has_experts": True},
    "8 experts": {"has_experts": True, "num_experts": 8},
    "latents": {"has_latents": True},
}


@dataclass(frozen=True)
class HostTimes:
    """Processor time of the host in seconds: of a step, a micro-batch or a layer."""

    forward_s: float
    """Of the main thread."""
    backward_s: float
    """Of all other threads."""
    linear_s: float
    """Of the forward of a linear layer, meanwhile."""


def of_micro_batch(case: Case) -> HostTimes:
    """What one more micro-batch takes, on a lone rank."""
    linears_s: list[float] = []
    with _disable_current_modes():  # the one that makes the host read zeros is slow
        step = step_of(replace(case, micro_batches=max(MICRO_BATCHES)))
        linear = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device="cuda")

        def step_s(num_micro_batches: int) -> tuple[float, float]:
            linears_s.append(_of_linear(linear))
            return _of_step(step, num_micro_batches)

        forward_s, backward_s = of_one_more(step_s, NUM_REPEATS)
    return HostTimes(forward_s, backward_s, min(linears_s))


def of_one_more(step_s: Callable[[int], tuple[float, ...]], num_repeats: int) -> list[float]:
    """What one more micro-batch takes: the difference of the least times of several steps.

    step_s: trains a number of micro-batches and returns its times, all of which are compared.
    """
    few, many = MICRO_BATCHES
    turns = [(step_s(few), step_s(many)) for _ in range(NUM_WARM + num_repeats)][NUM_WARM:]
    of_few, of_many = (
        [min(each) for each in zip(*of, strict=True)] for of in zip(*turns, strict=True)
    )
    return [(b - a) / (many - few) for a, b in zip(of_few, of_many, strict=True)]


def _of_step(step: Callable[[int], object], num_micro_batches: int) -> tuple[float, float]:
    main_s, all_s = time.thread_time(), time.process_time()
    step(num_micro_batches)
    main_s, all_s = time.thread_time() - main_s, time.process_time() - all_s
    return main_s, all_s - main_s


def _of_linear(linear: torch.nn.Linear) -> float:
    row = torch.empty(256, 64, dtype=torch.bfloat16, device="cuda")
    start_s = time.thread_time()
    for _ in range(NUM_LINEARS):
        linear(row)
    return (time.thread_time() - start_s) / NUM_LINEARS


def null_launch_s() -> float:
    """What the stand-in takes for a launch: a call of it from Python, less a call that returns at
    once. Run in a process on the stand-in."""
    library = ctypes.CDLL("libcuda.so.1")
    dim3 = type("dim3", (ctypes.Structure,), {"_fields_": [(x, ctypes.c_uint) for x in "xyz"]})
    arguments = (ctypes.c_void_p(1), dim3(1, 1, 1), dim3(1, 1, 1), None, ctypes.c_size_t(0), None)

    def of_a_call(function: Any) -> float:
        start_s = time.thread_time()
        for _ in range(NUM_CALLS):
            function(*arguments)
        return (time.thread_time() - start_s) / NUM_CALLS

    launch, returns = library.cudaLaunchKernel, library.cudaPeekAtLastError
    return median(of_a_call(launch) - of_a_call(returns) for _ in range(5))


def of_layer(case: Case) -> HostTimes:
    """What a layer takes for a micro-batch: one round of both numbers of layers."""
    few, many = (_run(of_micro_batch, replace(case, layers=num)) for num in LAYERS)
    num_more = LAYERS[1] - LAYERS[0]
    return HostTimes(
        (many.forward_s - few.forward_s) / num_more,
        (many.backward_s - few.backward_s) / num_more,
        (many.linear_s + few.linear_s) / 2,
    )


def launches_of_layer(case: Case) -> float:
    """Launches of a layer's forward and backward for a micro-batch, NCCL's not counted."""
    with TemporaryDirectory() as folder:
        few, more, longer, both = (
            count(
                replace(case, layers=layers, micro_batches=num),
                Path(folder),
            ).num_launches
            for layers in LAYERS
            for num in MICRO_BATCHES
        )
    return (both - longer - more + few) / (
        (LAYERS[1] - LAYERS[0]) * (MICRO_BATCHES[1] - MICRO_BATCHES[0])
    )


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    (result,) = run_alone(
        function,
        *arguments,
        num_ranks=NUM_RANKS,
        ranks=(0,),
        timeout_s=300.0,
        STAND_IN_COPY_LIMIT_BYTES=_COPY_LIMIT_BYTES,
    )
    return result


def print_table(kinds: Sequence[str], num_rounds: int, *, with_te: bool) -> None:
    """Least and median of the rounds, for README.md."""
    cases = {
        (kind, "Transformer Engine's" if has_te else "local", side): Case(
            side,
            layers=LAYERS[0],
            has_te=has_te,
            fused_gradients=has_te,
            same_attention=not has_te,
            **KINDS[kind],
        )
        for kind in kinds
        for has_te in ((False, True) if with_te else (False,))
        for side in get_args(Side)
    }
    rounds = [{name: of_layer(case) for name, case in cases.items()} for _ in range(num_rounds)]
    stand_in_s = _run(null_launch_s)
    linear_s = min(each.linear_s for of_round in rounds for each in of_round.values()) - stand_in_s
    print(f"A launch takes the stand-in {_US_PER_S * stand_in_s:.2f} µs, and the forward of a")
    print(f"linear layer the host {_US_PER_S * linear_s:.1f} µs without it.\n")
    print("| layer | layers | side | forward, ms | backward, ms | both, in linears | launches |")
    print("|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        num_launches = launches_of_layer(case)
        # A third of the launches are the forward's.
        forward_s, backward_s = (
            sorted(
                getattr(of_round[name], half) - share * num_launches * stand_in_s
                for of_round in rounds
            )
            for half, share in (("forward_s", 1 / 3), ("backward_s", 2 / 3))
        )
        halves = (
            f"{_MS_PER_S * times_s[0]:.2f} ({_MS_PER_S * median(times_s):.2f})"
            for times_s in (forward_s, backward_s)
        )
        in_linears = (forward_s[0] + backward_s[0]) / linear_s
        columns = (*name, *halves, f"{in_linears:.0f}", f"{num_launches:.0f}")
        print(f"| {' | '.join(columns)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--rounds", type=int, default=4, help="of all cases, one after the other")
    parser.add_argument("--te", action="store_true", help="layers of Transformer Engine, too")
    arguments = parser.parse_args()
    if arguments.te:
        from tests.cuda_stand_in.te.launch import settings

        os.environ.update(settings() | {"STAND_IN_MAJOR": "9"})
    print_table(arguments.kinds, arguments.rounds, with_te=arguments.te)


if __name__ == "__main__":
    # Imported by name, so that ranks unpickle the same class.
    from tests.cuda_stand_in import host_time

    host_time.main()
