"""The project's own programs: profile, then training with it on one GPU; what they predicted."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import ROOT, Run, StepFailure
from benchmarks.gpu.sizes import Sizes
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.observability.records import read_metrics
from megatron.hydraulis.profiler.measurements import MeasuredPoint, measurements_path
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.strategy.notation import parse_scheme

SINGLE = "tp1"
GIB = 2**30
_TRIAL = re.compile(
    r"memory trial: .* micro-batches of ([0-9,]+) tokens take ([0-9.]+) of ([0-9.]+) GiB"
)


def profile_flags(sizes: Sizes, path: Path, schemes: Sequence[str]) -> list[str]:
    """Flags of the command profile."""
    return [
        "--out",
        str(path),
        "--schemes",
        *schemes,
        *sizes.profile_flags,
        "--",
        *sizes.model.flags,
    ]


def training_flags(sizes: Sizes, folder: Path) -> list[str]:
    """Flags of pretrain_gpt.py on one GPU, less the cost profile."""
    return [
        *(*sizes.model.flags, "--strategy", SINGLE, "--data-path", str(folder / "corpus")),
        *("--split", "100,0,0", "--train-iters", str(sizes.num_iterations)),
        *("--global-batch-tokens", str(sizes.batch_tokens), "--lr", "3e-4", "--min-lr", "3e-5"),
        *("--memory-trial", "on", "--run-dir", str(folder / "run")),
        *("--max-tokens-per-micro-batch", str(sizes.model.seq_length)),
    ]


def profile(run: Run, sizes: Sizes, path: Path, pool: Pool | None) -> None:
    """Measure a cost profile of the schemes of a pool, or of one GPU, and how well it fits."""
    schemes = [SINGLE]
    if pool is not None:
        found = {str(scheme) for strategy in pool.strategies for scheme in strategy.schemes}
        schemes = sorted(found)
    num_ranks = 1 if pool is None else pool.num_ranks
    flags = profile_flags(sizes, path, schemes)
    run.ranks(num_ranks, "-m", "megatron.hydraulis", "profile", *flags)
    lines = map(json.loads, measurements_path(path).read_text().splitlines())
    points = [MeasuredPoint.from_json(line) for line in lines if line.get("kind") == "point"]
    rows = [_fit(ProfileCostModel.read(path), point) for point in points if point.fits]
    errors = [row["error"] for row in rows]
    run.measured("fit", statistics.median(errors), points=rows)
    run.measured("worst fit", max(errors))


def _fit(model: ProfileCostModel, point: MeasuredPoint) -> dict[str, Any]:
    """The fitted and the measured time of a micro-batch."""
    scheme = parse_scheme(point.scheme, label="cost profile")
    fitted_ms = model.coefficients(scheme).time_ms(point.point.lengths)
    return {
        "scheme": point.scheme,
        "packing": point.point.packing,
        "tokens": point.point.num_tokens,
        "sum_of_squares": point.point.sum_of_squares,
        "measured_ms": point.time_ms,
        "fitted_ms": fitted_ms,
        "error": abs(fitted_ms / point.time_ms - 1.0),
        "peak_gib": point.peak_bytes / GIB,
    }


def training(run: Run, sizes: Sizes, profile_path: Path, peak_flops_per_s: float) -> None:
    """Train the model on one GPU: speed, predicted times, predicted and measured memory."""
    inputs = ("-m", "benchmarks.gpu.training_inputs")
    run.program(*inputs, "corpus", str(run.folder), *sizes.options, name="corpus")
    flags = training_flags(sizes, run.folder)
    if profile_path.is_file():
        flags += ["--cost-profile", str(profile_path)]
    else:
        run.lacks("prediction", "there is no cost profile, as the step 'profile' failed")
    (log,) = run.ranks(1, str(ROOT / "pretrain_gpt.py"), *flags)
    records = read_metrics(run.folder / "run")[sizes.num_not_counted :]
    rates = [r.model_flops / r.iteration_time_s for r in records if r.model_flops]
    if not rates:
        raise StepFailure("metrics.jsonl has no iterations, or none with operations")
    (core_attention,) = re.findall(r"^core attention: .*$", log, re.MULTILINE)
    run.measured("mfu", statistics.median(rates) / peak_flops_per_s, core_attention=core_attention)
    time_s = sum(record.iteration_time_s for record in records)
    times_s = [record.iteration_time_s for record in records]
    run.measured("tokens/s", sum(r.num_tokens for r in records) / time_s, iteration_times_s=times_s)
    if profile_path.is_file():
        errors = [r.prediction_error for r in records if r.prediction_error is not None]
        run.measured("prediction", statistics.median(errors), errors=errors)
    losses = [record.lm_loss for record in records if record.lm_loss is not None]
    run.measured("loss", losses[-1] / losses[0], losses=losses)
    _memory(run, sizes, log, max(r.peak_allocated_bytes or 0 for r in records))


def _memory(run: Run, sizes: Sizes, log: str, allocated_bytes: int) -> None:
    """Predicted and measured memory of the trial's micro-batches."""
    trials = _TRIAL.findall(log)
    if not trials:
        raise StepFailure("the log has no line of the memory trial")
    tokens, measured_gib, capacity_gib = trials[-1]
    num_tokens = int(tokens.replace(",", ""))
    text = run.program(
        *("-m", "benchmarks.gpu.training_inputs", "memory", str(run.folder), *sizes.options),
        *("--tokens", str(num_tokens)),
        name="memory",
    )
    predicted = json.loads(text.splitlines()[-1])
    tensors, reserve = (predicted[f"{name}_bytes"] / GIB for name in ("tensor", "reserve"))
    details: dict[str, Any] = {
        "tokens": num_tokens,
        "predicted_tensors_gib": tensors,
        "predicted_reserve_gib": reserve,
        "measured_device_gib": float(measured_gib),
        "capacity_gib": float(capacity_gib),
        "allocated_in_training_gib": allocated_bytes / GIB,
    }
    run.measured("memory of the device", float(measured_gib) / (tensors + reserve), **details)
    run.measured("memory of tensors", allocated_bytes / GIB / tensors, **details)
