"""The same batch gives the same update under every strategy, with layers and core attention of
Transformer Engine: its Python side on several ranks of the stand-in, with reference computations
for its kernels, against the CPU's run of one process with local layers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cuda_stand_in.lone_ranks import log_of
from tests.cuda_stand_in.order import check_order, read_log
from tests.cuda_stand_in.pool import run_logged
from tests.distributed.test_experts import BF16_MODELS, WHOLE_EXPERTS
from tests.distributed.test_experts import MODELS as EXPERT_MODELS
from tests.distributed.test_latent_attention import MODELS as LATENT_MODELS
from tests.support.bf16_error import LEAST_ERROR, MOST_OF_ONE_PROCESS, worst_ratio
from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, SPLITS, assert_law, changing, law_job, waves
from tests.support.models import Job, RankRun, SmallModel, assemble, run_job
from tests.support.routing_error import rounded_runs

pytestmark = pytest.mark.timeout(900)

FP32_MODEL = replace(MAIN_MODEL, dtype=torch.float32, has_te_layers=True)
"""Its core attention takes no fp32."""
BF16_ON_THE_CPU = replace(MAIN_MODEL, dtype=torch.bfloat16, hidden_size=64)
BF16_MODEL = replace(BF16_ON_THE_CPU, core_attention="te", has_te_layers=True)

NUM_DRAWS = 2
"""Of weights and sequences."""
STRATEGIES = ("tp2+2*tp1", "cp4~", "pp2+tp2", "cp4~fs", "tp2cp2fs")
# Products of weight gradients add to the arena.
LAYERS = {"generic_gemm", "generic_gemm_accumulating", "rmsnorm_fwd", "rmsnorm_bwd"}
GROUPED = {"grouped_gemm", "grouped_gemm_accumulating"}
SORT = {"permute_with_mask_map", "unpermute_with_mask_map"}
ATTENTION = {"fused_attn_fwd", "fused_attn_bwd"}
REORDER = {"thd_cp_rank_order_to_sequence_order", "thd_sequence_order_to_cp_rank_order"}
KERNELS_OF = {
    "p2p": {
        "thd_read_half_tensor",
        "thd_read_second_half_lse",
        "thd_second_half_lse_correction",
        "thd_out_correction",
        "thd_grad_correction",
    },
    "all_gather": REORDER | {"thd_copy_valid_tokens"},
    "a2a": REORDER,
}
"""Kernels of Transformer Engine that each exchange of a row's parts needs."""


def job_of(text: str, model: SmallModel) -> Job:
    if "~" not in text:
        return law_job(4, text, model)
    return replace(waves(list(SPLITS.values()), model), strategies=(text,))


@pytest.mark.parametrize("text", STRATEGIES)
def test_layers_in_fp32(text: str, tmp_path: Path) -> None:
    job = job_of(text, FP32_MODEL)
    runs, kernels = run(job, tmp_path)
    assert_law(job, runs)
    assert kernels >= LAYERS


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_latents_in_fp32(name: str, tmp_path: Path) -> None:
    model = replace(LATENT_MODELS[name], dtype=torch.float32, has_te_layers=True)
    for text in ("tp2+2*tp1", "cp4~"):
        job = job_of(text, model)
        runs, kernels = run(job, tmp_path / text)
        assert_law(job, runs)
        assert kernels >= LAYERS


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_experts_in_fp32(name: str, tmp_path: Path) -> None:
    model = replace(EXPERT_MODELS[name], dtype=torch.float32, has_te_layers=True)
    for text in ("tp2+2*tp1", "tp2cp2ep4", "pp2+cp2ep2", "tp2cp2fs"):
        job = law_job(4, text, model)
        runs, kernels = run(job, tmp_path / text)
        assert_law(job, runs)
        gathers = dict(model.variant)["moe_token_dispatcher_type"] == "allgather"
        assert kernels >= LAYERS | GROUPED
        assert (kernels >= SORT) is not (gathers and text == "tp2cp2ep4")


@pytest.mark.parametrize("name", ["top 2, gathered", "sigmoid scores in groups"])
def test_whole_experts_in_waves_in_fp32(name: str, tmp_path: Path) -> None:
    model = replace(EXPERT_MODELS[name], dtype=torch.float32, has_te_layers=True)
    job = waves(list(SPLITS.values()), model, ep=4)
    runs, kernels = run(job, tmp_path)
    assert_law(job, runs)
    assert kernels >= LAYERS | GROUPED


@pytest.mark.parametrize("text", ["tp2+2*tp1", "tp2cp2ep4"])
def test_experts_one_by_one_in_fp32(text: str, tmp_path: Path) -> None:
    model = EXPERT_MODELS["top 8 of 16"]
    variant = (*model.variant, ("moe_grouped_gemm", False))
    job = law_job(4, text, replace(model, dtype=torch.float32, has_te_layers=True, variant=variant))
    runs, kernels = run(job, tmp_path)
    assert_law(job, runs)
    assert kernels >= LAYERS | SORT
    assert not kernels & GROUPED


@pytest.mark.parametrize("text", ["tp2+2*tp1", "pp2+cp2ep2", "cp4~fs"])
def test_recomputed_norms_and_activations_in_fp32(text: str, tmp_path: Path) -> None:
    plain = replace(
        EXPERT_MODELS["every second layer dense"], dtype=torch.float32, has_te_layers=True
    )
    again = (
        ("recompute_granularity", "selective"),
        ("recompute_modules", ("layernorm", "moe_act")),
    )
    job = job_of(text, plain)
    runs, _ = run(replace(job, model=replace(plain, variant=(*plain.variant, *again))), tmp_path)
    assert_law(job, runs)


@pytest.mark.parametrize("text", [*STRATEGIES, "tp2pp2"])
def test_layers_and_attention_in_bf16(text: str, tmp_path: Path) -> None:
    kernels = run_in_bf16(job_of(text, BF16_MODEL), tmp_path)
    assert kernels >= LAYERS | ATTENTION


@pytest.mark.parametrize("text", ["tp2+2*tp1", "cp4~"])
def test_its_rotation_in_bf16(text: str, tmp_path: Path) -> None:
    kernels = run_in_bf16(job_of(text, replace(BF16_MODEL, fuses_rope=True)), tmp_path)
    assert kernels >= {"fused_rope_forward", "fused_rope_backward"}


@pytest.mark.parametrize("way", KERNELS_OF)
@pytest.mark.parametrize("text", ["cp2+2*tp1", "tp2cp2"])
def test_every_exchange_in_bf16(text: str, way: str, tmp_path: Path) -> None:
    kernels = run_in_bf16(job_of(text, replace(BF16_MODEL, cp_comm_type=way)), tmp_path)
    assert kernels >= LAYERS | ATTENTION
    assert {name for name in kernels if name.startswith("thd_")} == KERNELS_OF[way]


@pytest.mark.parametrize("name", BF16_MODELS)
def test_experts_in_bf16(name: str, tmp_path: Path) -> None:
    """Tokens go to the experts that exact arithmetic chooses."""
    of_cpu = replace(EXPERT_MODELS[name], dtype=torch.bfloat16, hidden_size=64)
    model = replace(of_cpu, core_attention="te", has_te_layers=True)
    alone = rounded_runs(law_job(1, "tp1", of_cpu), NUM_DRAWS, is_free=False)
    jobs = {
        "one strategy": law_job(4, "tp2cp2ep4", model),
        "waves": waves(list(SPLITS.values()), model, ep=4),
        **{", ".join(texts): changing(texts, model) for texts in WHOLE_EXPERTS[:2]},
    }
    for text, job in jobs.items():
        run_on_device = partial(pool_of(4, "cuda").run, run_logged, tmp_path)
        found = rounded_runs(job, NUM_DRAWS, is_free=False, run=run_on_device)
        ratio = found.worst_ratio(alone)
        print(f"\n{name}, {text}: {ratio:.2f} x the error of one process")
        assert found.errors["everything"] > LEAST_ERROR
        assert ratio <= MOST_OF_ONE_PROCESS
        assert kernels_in(tmp_path) >= LAYERS | GROUPED | ATTENTION


def run(job: Job, folder: Path) -> tuple[list[RankRun], set[str]]:
    """All ranks and the kernels that they launch."""
    folder.mkdir(exist_ok=True)
    runs: list[RankRun] = pool_of(4, "cuda").run(run_logged, folder, run_job, job)
    return runs, kernels_in(folder)


def kernels_in(folder: Path) -> set[str]:
    """The kernels in the logs of all ranks, whose NCCL calls match and have one order."""
    logs = [log_of(folder, rank) for rank in range(4)]
    report = check_order([read_log(log) for log in logs])
    assert not report.mismatches, str(report)
    assert not report.cycle, str(report)
    return {
        name for log in logs for name in re.findall(r"KERNEL stream \S+ (\w+)", log.read_text())
    }


def run_in_bf16(job: Job, folder: Path) -> set[str]:
    """`run` with the error of gradients checked."""
    runs, kernels = run(job, folder)
    gradients = [assemble(runs, [r.gradients[i] for r in runs]) for i in range(len(job.batches))]
    assert worst_ratio(BF16_ON_THE_CPU, gradients, BF16_ON_THE_CPU) <= MOST_OF_ONE_PROCESS
    return kernels
