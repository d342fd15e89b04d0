"""The project's own programs on one GPU: profile, then training with it; what they foretold."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from benchmarks.gpu.packs import MODEL_FLAGS, NUM_TOKENS, SEQ_LENGTH, VOCAB_SIZE
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.flags.arguments import parse_arguments
from megatron.hydraulis.loop.planning import Planning
from megatron.hydraulis.loop.startup import constants_of_this_rank
from megatron.hydraulis.observability.records import read_metrics
from megatron.hydraulis.profiler.measurements import measurements_path
from megatron.hydraulis.strategy import Scheme

STRATEGY = "tp1"
NUM_ITERATIONS = 50
NUM_NOT_COUNTED = 5
"""Iterations at the beginning in which kernels are chosen and memory settles."""
NUM_DOCUMENTS = 4000
MEDIAN_TOKENS, SIGMA = 900, 1.3
"""Of documents: log-normal, most short, some as long as the limit."""
_THROUGHPUT = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)")
_TRIAL = re.compile(
    r"memory trial: .* micro-batches of ([0-9,]+) tokens take ([0-9.]+) of ([0-9.]+) GiB"
)
_BYTES_PER_GIB = 2**30


def torchrun(*arguments: str) -> str:
    """Run a program on one rank; its output, which is shown as well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "8"}
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    if process.wait():
        raise SystemExit(f"error: {' '.join(command)} ended with status {process.returncode}")
    return "".join(lines)


def profile_flags(path: Path) -> list[str]:
    """Of the command profile."""
    return [
        *("--out", str(path), "--schemes", STRATEGY),
        *("--max-tokens", str(NUM_TOKENS), "--num-sizes", "4", "--", *MODEL_FLAGS),
    ]


def training_flags(folder: Path, corpus: Path) -> list[str]:
    """Of pretrain_gpt.py, less the cost profile."""
    return [
        *(*MODEL_FLAGS, "--strategy", STRATEGY, "--data-path", str(corpus), "--split", "100,0,0"),
        *("--train-iters", str(NUM_ITERATIONS), "--global-batch-tokens", str(8 * NUM_TOKENS)),
        *("--lr", "3e-4", "--min-lr", "3e-5", "--memory-trial", "on"),
        *("--max-tokens-per-micro-batch", str(NUM_TOKENS), "--run-dir", str(folder / "run")),
    ]


def profile(folder: Path) -> dict[str, Any]:
    """Measured time of packs of equal tokens and different Σs² beside the fitted model."""
    path = folder / "profile.json"
    torchrun("-m", "megatron.hydraulis", "profile", *profile_flags(path))
    row = json.loads(path.read_text())["schemes"][0]
    fitted = Coefficients(row["a_ms_per_token2"], row["b_ms_per_token"], row["c_ms"])
    rows = []
    for text in measurements_path(path).read_text().splitlines():
        line = json.loads(text)
        if line.get("kind") != "point" or not line["fits"]:
            continue
        lengths = [n for n, times in line["lengths"] for _ in range(times)]
        measured_ms, fitted_ms = max(line["stage_ms"]), fitted.time_ms(lengths)
        rows.append(
            {
                "packing": line["packing"],
                "tokens": sum(lengths),
                "sum_of_squares": sum(n * n for n in lengths),
                "measured_ms": measured_ms,
                "fitted_ms": fitted_ms,
                "error": fitted_ms / measured_ms - 1.0,
                "peak_gib": line["peak_bytes"] / _BYTES_PER_GIB,
            }
        )
    return {"coefficients": row, "rows": rows}


def training(folder: Path, profile_path: Path | None) -> dict[str, Any]:
    """50 iterations of the model: MFU, predicted times, memory foretold and measured."""
    flags = training_flags(folder, write_corpus(folder))
    told = torchrun(
        "pretrain_gpt.py",
        *flags,
        *(() if profile_path is None else ("--cost-profile", str(profile_path))),
    )
    throughputs = [float(found) for found in _THROUGHPUT.findall(told)][NUM_NOT_COUNTED:]
    records = read_metrics(folder / "run" / "metrics.jsonl")[NUM_NOT_COUNTED:]
    device = constants_of_this_rank(has_cuda=True, speaks=False)
    errors = [r.prediction_error for r in records if r.prediction_error is not None]
    losses = [record.lm_loss for record in records if record.lm_loss is not None]
    return {
        "iterations": NUM_ITERATIONS,
        "not_counted": NUM_NOT_COUNTED,
        "core_attention": next(
            line for line in told.splitlines() if line.startswith("core attention:")
        ),
        "median_tflops_per_s": statistics.median(throughputs),
        "mfu": statistics.median(throughputs) * 1e12 / device.peak_flops_per_s,
        "median_iteration_s": statistics.median(r.iteration_time_s for r in records),
        "tokens_per_s": sum(r.num_tokens for r in records)
        / sum(r.iteration_time_s for r in records),
        "median_prediction_error": statistics.median(errors) if errors else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "memory": _memory(flags, told),
    }


def _memory(flags: Sequence[str], told: str) -> list[dict[str, float]]:
    """Of the memory trial, and what the memory model foretells of the same micro-batch."""
    resolved = parse_arguments(list(flags), num_ranks=1, rank=0)
    device = constants_of_this_rank(has_cuda=True, speaks=False)
    model = Planning.of(resolved, device, None).cost_model
    assert isinstance(model, AnalyticCostModel)
    rows = []
    for tokens, measured, capacity in _TRIAL.findall(told):
        num_tokens = int(tokens.replace(",", ""))
        foretold = model.memory.peak_bytes(Scheme(), 0, num_tokens)
        rows.append(
            {
                "tokens": num_tokens,
                "foretold_gib": foretold / _BYTES_PER_GIB,
                "reserve_gib": model.memory.reserve_bytes / _BYTES_PER_GIB,
                "measured_gib": float(measured),
                "capacity_gib": float(capacity),
            }
        )
    return rows


def write_corpus(folder: Path, num_documents: int = NUM_DOCUMENTS) -> Path:
    """Random tokens in documents of a long tail; the prefix of its files."""
    rng = np.random.default_rng(0)
    prefix = folder / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    lengths = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, num_documents))
    for length in np.clip(lengths, 2, SEQ_LENGTH + 1).astype(int):
        builder.add_document(
            torch.from_numpy(rng.integers(0, VOCAB_SIZE, int(length))), [int(length)]
        )
    builder.finalize(f"{prefix}.idx")
    return prefix
