"""`pretrain_gpt.py` on `cuda`: losses of the CPU, resumed runs, running out of memory, traces."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.hydraulis.checkpoint.manifest import Manifest
from megatron.hydraulis.loop import entry
from megatron.hydraulis.observability.trace import read_trace
from megatron.hydraulis.runtime.executor import loss_func
from tests.cuda_stand_in.jobs import run_job as run_on_cuda
from tests.support import forked_job
from tests.support.checkpoints import whole_tensors
from tests.support.tiny_corpus import tiny_command, write_corpus
from tests.support.trace_probes import one_f_one_b, operations
from tests.support.training_run import (
    BATCH_SIZE,
    MAIN_FLAGS,
    ROUNDING,
    SEED,
    SPLIT,
    TRAIN_ITERS,
    Run,
)

pytestmark = pytest.mark.distributed

NUM_RANKS = 4
SAVED_AT = 2
STRATEGIES = {"short": "4*tp1", "mixed": "pp2+tp2"}
SCHEDULE = ("mixed", "short", "mixed")
TRACED = (1, 3)
BF16_LOSS_RTOL = 1e-3
SMALL_DEVICE_BYTES = 3 * 2**30
SCRATCH_BYTES = 4000
"""Bytes that the loss needs for the square of a token: a micro-batch of 1,024 tokens needs more
than the small device has, three quarters of it less."""
TRIED = (1024, 768)
"""Tokens of the micro-batches of the trial that fail and that fit."""
LARGE_ENOUGH = 150
"""Tokens of a micro-batch three quarters of which still hold the longest sequence."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture(scope="module")
def pool_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("pool") / "pool.json"
    entries = [{"name": name, "replicas": text} for name, text in STRATEGIES.items()]
    pool = {"num_ranks": NUM_RANKS, "ranks_per_node": NUM_RANKS, "strategies": entries}
    path.write_text(json.dumps(pool))
    return ("--strategy-pool", str(path), "--strategy-schedule", ",".join(SCHEDULE))


def command(corpus: str, folder: Path, *extra: str) -> list[str]:
    return tiny_command(
        *(corpus, folder / "run", "--plan-dir", str(folder / "plans")),
        *("--seed", str(SEED), "--split", SPLIT, "--train-iters", str(TRAIN_ITERS)),
        *("--global-batch-size", str(BATCH_SIZE), *MAIN_FLAGS, *extra),
    )


def train(corpus: str, folder: Path, num_ranks: int, *extra: str, **options: Any) -> Run:
    """A job that must succeed; on ``cuda`` unless ``device`` says otherwise."""
    argv = command(corpus, folder, *extra)
    run_job: Any = forked_job.run_job if options.pop("device", "") == "cpu" else run_on_cuda
    outcome = run_job(argv, num_ranks, folder / "output", **options)
    outcome.assert_succeeded()
    return Run(outcome, folder / "run", folder / "plans", argv)


@pytest.fixture(scope="module")
def uninterrupted(
    corpus: str, pool_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    """A run with trace, asynchronous saves and evaluation."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    flags = ("--save", str(folder / "saved"), "--save-interval", str(SAVED_AT), "--async-save")
    trace = ("--trace", str(folder / "trace"), "--trace-iterations", f"{TRACED[0]}..{TRACED[1]}")
    return train(corpus, folder, NUM_RANKS, *pool_flags, *flags, *trace), folder


def evaluations(run: Run) -> list[float]:
    lines = [line for line in run.outcome.stdout.splitlines() if "validation loss at" in line]
    return [float(line.split("lm loss value:")[1].split()[0]) for line in lines]


def test_losses_are_those_of_the_cpu(
    corpus: str, pool_flags: tuple[str, ...], uninterrupted: tuple[Run, Path], tmp_path: Path
) -> None:
    on_cpu = train(corpus, tmp_path, NUM_RANKS, *pool_flags, device="cpu")
    run, _ = uninterrupted
    assert len(run.losses) == TRAIN_ITERS
    assert run.losses == pytest.approx(on_cpu.losses, rel=ROUNDING)
    assert len(evaluations(run)) >= 2
    assert evaluations(run) == pytest.approx(evaluations(on_cpu), rel=ROUNDING)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["tp2+2*tp1", "cp2+pp2"])
def test_losses_in_bf16_are_near_those_of_the_cpu(
    corpus: str, strategy: str, tmp_path: Path
) -> None:
    flags = ("--strategy", strategy, "--bf16")
    on_cpu = train(corpus, tmp_path / "cpu", NUM_RANKS, *flags, device="cpu")
    run = train(corpus, tmp_path / "cuda", NUM_RANKS, *flags)
    assert "core attention: torch" in run.outcome.stdout
    assert run.losses == pytest.approx(on_cpu.losses, rel=BF16_LOSS_RTOL)


def test_memory_is_tried_and_measured(uninterrupted: tuple[Run, Path]) -> None:
    run, _ = uninterrupted
    trials = [line for line in run.outcome.stdout.splitlines() if line.startswith("memory trial:")]
    assert len(trials) == 3, "one line a scheme"
    for record in run.records:
        assert record.peak_allocated_bytes is not None
        assert record.peak_reserved_bytes is not None
        assert 0 < record.peak_allocated_bytes <= record.peak_reserved_bytes


def test_no_rank_warns_that_it_does_not_know_its_device(uninterrupted: tuple[Run, Path]) -> None:
    run, _ = uninterrupted
    assert "barrier()" not in run.outcome.stderr


def test_resumed_the_run_is_the_same_bit_by_bit(
    corpus: str, pool_flags: tuple[str, ...], uninterrupted: tuple[Run, Path], tmp_path: Path
) -> None:
    whole, folder = uninterrupted
    load = ("--load", str(folder / "saved"), "--ckpt-step", str(SAVED_AT))
    save = ("--save", str(tmp_path / "saved"), "--save-interval", str(SAVED_AT), "--async-save")
    run = train(corpus, tmp_path, NUM_RANKS, *pool_flags, *load, *save)
    assert [record.iteration for record in run.records] == [3, 4]
    assert run.losses == whole.losses[SAVED_AT:]
    last = f"iter_{TRAIN_ITERS:07d}"
    expected, found = (whole_tensors(path / "saved" / last) for path in (folder, tmp_path))
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    states = [Manifest.read(path / "saved" / last).state for path in (folder, tmp_path)]
    assert states[0] == states[1]


def test_a_trace_by_cuda_events_shows_1f1b(uninterrupted: tuple[Run, Path]) -> None:
    run, folder = uninterrupted
    measured = read_trace(folder / "trace" / "trace.json").where(is_planned=False)
    num_checked = 0
    for plan in run.plans[: TRACED[1]]:
        for replica in plan.replicas:
            for rank in replica.ranks:
                position = replica.replica.position_of(rank)
                assert position is not None
                own = measured.where(iteration=plan.iteration + 1, rank=rank)
                wanted = one_f_one_b(len(replica.micro_batches), replica.scheme.pp, position.stage)
                assert operations(own) == wanted
                num_checked += len(wanted)
                assert (
                    own.where(name="scatter").last_end_us <= own.where(name="optimizer").last_end_us
                )
    assert num_checked > NUM_RANKS * TRACED[1]


def with_little_memory(argv: Sequence[str]) -> None:
    """The program with a loss that needs more memory than a line through small micro-batches
    predicts, and with another process on the device of rank 1 after a micro-batch of training."""
    from tests.cuda_stand_in import device

    rank = int(os.environ["RANK"])
    seen: set[int] = set()
    others: list[int] = []

    def loss(loss_mask: Tensor, output: Tensor) -> Any:
        num_tokens = loss_mask.numel()
        if torch.is_grad_enabled():
            num_bytes = SCRATCH_BYTES * num_tokens**2
            is_in_training = seen.issuperset(TRIED) and num_tokens >= LARGE_ENOUGH
            if rank == 1 and is_in_training and not others:
                torch.cuda.empty_cache()
                others.append(torch.cuda.mem_get_info()[0] - int(0.8 * num_bytes))
                device.others_use(rank, others[0])
                print("another process comes", flush=True)
            seen.add(num_tokens)
            torch.empty(num_bytes, dtype=torch.uint8, device=output.device)
        return loss_func(loss_mask, output)

    entry.main(argv, entry.UserHooks(loss_func=loss))


def test_training_recovers_from_running_out_of_memory(corpus: str, tmp_path: Path) -> None:
    flags = ("--strategy", "2*tp1", "--max-tokens-per-micro-batch", str(TRIED[0]))
    alone = train(corpus, tmp_path / "alone", 2, *flags)
    run = train(
        *(corpus, tmp_path / "small", 2, *flags),
        program=with_little_memory,
        settings={"STAND_IN_MEMORY_BYTES": SMALL_DEVICE_BYTES},
    )
    lines = run.outcome.stdout.splitlines()
    (trial,) = [line for line in lines if line.startswith("memory trial:")]
    assert f"limit {TRIED[0]:,} -> {TRIED[1]:,} tokens" in trial
    assert "another process comes" in run.outcome.ranks[1].stdout
    (mended,) = [line for line in lines if "planned again" in line]
    assert "rank 1 ran out of memory in micro-batch" in mended
    assert run.losses == pytest.approx(alone.losses, rel=ROUNDING)


def test_running_out_of_memory_on_a_replica_of_two_ranks_ends_the_run(
    corpus: str, tmp_path: Path
) -> None:
    flags = ("--strategy", "tp2", "--max-tokens-per-micro-batch", str(TRIED[0]))
    outcome = run_on_cuda(
        command(corpus, tmp_path, *flags),
        2,
        tmp_path / "output",
        program=with_little_memory,
        settings={"STAND_IN_MEMORY_BYTES": SMALL_DEVICE_BYTES},
    )
    assert not outcome.timed_out
    assert outcome.statuses.count(0) == 0
    assert "ran out of memory in micro-batch" in outcome.stderr
