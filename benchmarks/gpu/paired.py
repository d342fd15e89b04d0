"""Two sides that train the same model on the same batches, step by step in turn.

Both live on the same GPUs, so that clocks and temperature affect both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.rank import Place
from benchmarks.hydraulis_side import HydraulisSide
from benchmarks.paired_statistics import paired_ratio
from benchmarks.plain_megatron import PlainMegatronSide
from benchmarks.static_against_megatron import loss_difference
from benchmarks.step_report import StepReport
from benchmarks.workload import Workload
from megatron.hydraulis.runtime.core_attention import MODULE_OF, choose, current_environment
from megatron.hydraulis.strategy import Strategy

Steps = list[tuple[StepReport, ...]]
"""Of one side: for each step the reports of all ranks."""


def plain(place: Place, text: str) -> None:
    """Our engine against plain Megatron with the same homogeneous strategy."""
    workload = _workload(place)
    scheme = Strategy.parse(text, place.num_ranks).replicas[0].scheme
    # Megatron's first: it refuses to make its global buffer if there is one.
    theirs = PlainMegatronSide(
        workload, tp=scheme.tp, pp=scheme.pp, overlaps_gradients=True, has_fused_adamw=True
    )
    ours = HydraulisSide(workload, text, announces_next=True)
    warm_up, steps = _steps(place, {"ours": ours, "plain": theirs})
    difference = loss_difference(warm_up["ours"], warm_up["plain"])
    times_s = {name: _times_s(reports) for name, reports in steps.items()}
    ratio = paired_ratio(times_s["plain"], times_s["ours"])
    num_tokens = workload.num_tokens_per_micro_batch * workload.num_micro_batches
    place.measured(
        f"speed {scheme}",
        ratio.value,
        interval_95=[ratio.low, ratio.high],
        tokens_per_s={name: num_tokens / median(times) for name, times in times_s.items()},
        times_s=times_s,
    )
    place.measured(f"loss {scheme}", difference)


def overlap(place: Place, text: str) -> None:
    """Our engine with and without overlap of regrouping and compute."""
    workload = _workload(place)
    sides = {
        "overlapped": HydraulisSide(workload, text, announces_next=True),
        "one after the other": HydraulisSide(workload, text, overlap=False),
    }
    warm_up, steps = _steps(place, sides)
    place.measured("loss", loss_difference(*warm_up.values()))
    waits_s = {name: [max(r.waits_s for r in step) for step in of] for name, of in steps.items()}
    shown, whole = (median(waits) for waits in waits_s.values())
    times_s = {name: _times_s(reports) for name, reports in steps.items()}
    ratio = paired_ratio(times_s["overlapped"], times_s["one after the other"])
    details = {"waits_s": waits_s, "times_s": times_s, "interval_95": [ratio.low, ratio.high]}
    place.measured("hidden", 1.0 - shown / whole if whole else 0.0, **details)
    place.measured("time", ratio.value, **details)


def _workload(place: Place) -> Workload:
    sizes, shape = place.sizes, place.sizes.paired_model.shape
    here = current_environment(dtype=torch.bfloat16, head_size=shape.kv_channels)
    name = choose("auto", here).name
    if place.rank == 0:
        print(f"core attention of both sides: {name}", flush=True)
    return Workload(
        shape=shape,
        lengths=sizes.paired_lengths,
        num_micro_batches=sizes.micro_batches_per_rank * place.num_ranks,
        dtype=torch.bfloat16,
        core_attention=MODULE_OF[name],
    )


def _steps(
    place: Place, sides: Mapping[str, Callable[[int], Any]]
) -> tuple[dict[str, Steps], dict[str, Steps]]:
    """Steps to warm up, and measured ones; on every rank."""
    steps: dict[str, Steps] = {name: [] for name in sides}
    num_warm_ups = place.sizes.num_warm_ups
    for iteration in range(num_warm_ups + place.sizes.num_pairs):
        # The first of a pair changes, so that neither always finds the other's caches.
        for name in sorted(sides, reverse=iteration % 2 == 0):
            reports: list[Any] = [None] * place.num_ranks
            dist.all_gather_object(reports, sides[name](iteration))
            steps[name].append(tuple(reports))
        if place.rank == 0:
            times = {name: round(_times_s(of)[-1], 4) for name, of in steps.items()}
            print(f"pair {iteration}: {times} s", flush=True)
    return (
        {name: of[:num_warm_ups] for name, of in steps.items()},
        {name: of[num_warm_ups:] for name, of in steps.items()},
    )


def _times_s(steps: Steps) -> list[float]:
    """The time of every step's slowest rank."""
    return [max(report.step.wall_s for report in step) for step in steps]
