"""The same batch gives the same update under every strategy: on GPUs, against one CPU process.

Ranks train small models with the engine, and keep their gradients and parameters in files. A
process on the CPU trains the same sequences one after the other with upstream's model alone, in
fp64, and compares.

    python -m benchmarks.gpu.law FOLDER    # the comparison
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rank import Place
from benchmarks.gpu.runner import append_line, measured_line
from megatron.hydraulis.runtime.core_attention import current_environment
from tests.support.bf16_error import worst_ratio
from tests.support.gloo_pool import close_pools
from tests.support.law import MAIN_MODEL, changing, law_job, law_share, waves
from tests.support.models import Job, SmallModel, assemble, run_job

MODELS = {
    "fp32": replace(MAIN_MODEL, dtype=torch.float32),
    # Heads of a size that torch's kernel for packed rows takes.
    "bf16": replace(MAIN_MODEL, dtype=torch.bfloat16, hidden_size=64, core_attention="torch"),
}
BF16_ON_THE_CPU = replace(MODELS["bf16"], core_attention="sdpa")
WAVES = {
    2: [[(0, 2)], [(0, 1), (1, 1)]],
    4: [[(0, 4)], [(0, 2), (2, 1), (3, 1)], [(0, 2), (2, 2)]],
    8: [[(0, 8)], [(0, 4), (4, 2), (6, 1), (7, 1)], [(0, 2), (2, 2), (4, 4)]],
}


def job_of(text: str, num_ranks: int, model: SmallModel) -> Job:
    """Three iterations in a strategy, or in one after the other of ``A | B | C``."""
    if "|" in text:
        return changing(tuple(map(str.strip, text.split("|"))), model, num_ranks)
    if text == f"cp{num_ranks}~":
        return waves(WAVES[num_ranks], model)
    return law_job(num_ranks, text, model)


def train(place: Place, *texts: str) -> None:
    """Train all strategies in all precisions, as often as there are rounds for changing ones."""
    for text in texts:
        for precision, model in MODELS.items():
            if why_not := _why_not(model):
                place.lacks(f"{text} {precision}", why_not)
                continue
            job = job_of(text, place.num_ranks, model)
            for number in range(place.sizes.num_rounds if "|" in text else 1):
                path = place.folder / "runs" / f"{precision} {text} {number} {place.rank}.pickle"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(pickle.dumps(run_job(job)))
        if place.rank == 0:
            print(f"{text}: trained", flush=True)


def _why_not(model: SmallModel) -> str | None:
    head_size = model.hidden_size // model.num_heads
    here = current_environment(dtype=model.dtype, head_size=head_size)
    return here.obstacle(model.core_attention)


def compare(folder: Path) -> None:
    """Write the figures of everything that was trained."""
    paths = (folder / "runs").glob("*.pickle")
    found: dict[tuple[str, str], dict[int, dict[int, Any]]] = {}
    for path in paths:
        precision, *words, number, rank = path.stem.split(" ")
        run = pickle.loads(path.read_bytes())
        of_job = found.setdefault((precision, " ".join(words)), {})
        of_job.setdefault(int(number), {})[int(rank)] = run
    for (precision, text), rounds in sorted(found.items()):
        num_ranks = max(len(runs) for runs in rounds.values())
        job = job_of(text, num_ranks, MODELS[precision])
        worst: Callable[..., float] = partial(_worst, precision, job)
        values = [
            worst([runs[rank] for rank in range(num_ranks)])
            for runs in rounds.values()
            if len(runs) == num_ranks  # the job may have ended in the middle
        ]
        line = measured_line(f"{text} {precision}", max(values), rounds=len(values))
        print(line, flush=True)
        append_line(folder / "figures.jsonl", line)


def _worst(precision: str, job: Job, runs: list[Any]) -> float:
    if precision == "fp32":
        return law_share(job, runs)
    gradients = [
        assemble(runs, [run.gradients[i] for run in runs]) for i in range(len(job.batches))
    ]
    return worst_ratio(MODELS[precision], gradients, BF16_ON_THE_CPU)


if __name__ == "__main__":
    try:
        compare(Path(sys.argv[1]))
    finally:
        close_pools()
