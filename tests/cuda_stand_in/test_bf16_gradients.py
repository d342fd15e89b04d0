"""Gradients in bf16 on the stand-in: the dtypes, kinds and bytes of all NCCL calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cuda_stand_in.lone_ranks import log_of
from tests.cuda_stand_in.order import Call, check_order, read_log
from tests.cuda_stand_in.pool import run_logged
from tests.support.gloo_pool import pool_of
from tests.support.law import SHORT_MODEL, SPLITS, assert_law, law_job, waves
from tests.support.models import Job, run_job

pytestmark = pytest.mark.distributed

MODEL = replace(SHORT_MODEL, dtype=torch.float32)
"""Nothing but gradients travels in bf16."""
NUM_RANKS = 4
BF16 = 9
SIZES = {1: 1, 4: 8, 7: 4, 8: 8, BF16: 2}
"""Bytes of NCCL's types: uint8, int64, fp32, fp64, bf16."""
JOBS = {
    "one rank each": law_job(4, "4*tp1", MODEL),
    "one rank each, relays": replace(law_job(4, "4*tp1", MODEL), ranks_per_node=2),
    "mixed tp": law_job(4, "tp2+2*tp1", MODEL),
    "mixed tp, relays": replace(law_job(4, "tp2+2*tp1", MODEL), ranks_per_node=2),
    "pipeline": law_job(4, "pp2+tp2", replace(MODEL, num_layers=4)),
    "cp": law_job(4, "2*cp2", MODEL),
    "waves": waves(list(SPLITS.values()), MODEL),
}
EVERY_RANK_HOLDS_ALL = ("one rank each", "one rank each, relays", "cp", "waves")
"""Their gradients travel by reduce-scatter in fp32."""


def calls_of(job: Job, folder: Path) -> list[Call]:
    """The calls of all ranks, without the creation of communicators."""
    folder.mkdir()
    runs = pool_of(NUM_RANKS, "cuda").run(run_logged, folder, run_job, job)
    if job.gradient_dtype is None:
        assert_law(job, runs)
    logs = [read_log(log_of(folder, rank)) for rank in range(NUM_RANKS)]
    report = check_order(logs)
    assert not report.mismatches, str(report)
    assert not report.cycle, str(report)
    return [
        call
        for log in logs
        for operation in log.operations
        for call in operation.calls
        if call.kind != "Join"
    ]


def sent_bytes(calls: list[Call]) -> int:
    """The bytes of messages, and of the collectives that carry parts of a buffer."""
    shares = {"Send": 1, "AllGather": NUM_RANKS - 1, "ReduceScatter": NUM_RANKS - 1}
    return sum(shares.get(call.kind, 0) * call.count * SIZES[call.dtype] for call in calls)


BY_DEFAULT = ("one rank each", "mixed tp, relays")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in BY_DEFAULT else pytest.mark.nightly) for x in JOBS],
)
def test_half_the_bytes_travel_and_no_call_adds_them_up(name: str, tmp_path: Path) -> None:
    wide = calls_of(JOBS[name], tmp_path / "fp32")
    narrow = calls_of(replace(JOBS[name], gradient_dtype=torch.bfloat16), tmp_path / "bf16")
    gradients = [call for call in narrow if call.dtype == BF16]
    assert not [call for call in wide if call.dtype == BF16]
    assert {call.kind for call in gradients} == {"Send", "Recv"}
    saved_bytes = sent_bytes(wide) - sent_bytes(narrow)
    if name in EVERY_RANK_HOLDS_ALL:
        # fp32 shares are padded.
        assert 0.0 <= saved_bytes - sent_bytes(gradients) < 0.1 * saved_bytes
    else:
        assert saved_bytes == sent_bytes(gradients) > 0
