"""Adapters get the values that peft gives them on one process, in every strategy.

Peft wraps transformers' models, whose weights and adapters are those of the engine; four updates in
fp32, with torch's own AdamW, sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.comparison import assert_same
from tests.support.gloo_pool import pool_of, prepare_parent
from tests.support.huggingface import load, mixtral, plain_llama, qwen3, to_llama
from tests.support.law import FP64_SETTINGS, LENGTHS, MAIN_MODEL, in_turns
from tests.support.models import Job, RankRun, SmallModel, assemble, run_job
from tests.support.reference import initial_parameters

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
"""Relative to a tensor's largest value; losses and norms relative to themselves."""
NUM_ITERATIONS = 4
LLAMA = replace(MAIN_MODEL, dtype=torch.float32, lora_targets=("all-linear",))
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
FAMILIES: dict[str, tuple[SmallModel, Callable[[SmallModel], torch.nn.Module]]] = {
    "Llama": (LLAMA, plain_llama),
    "Qwen3": (replace(LLAMA, qk_layernorm=True, tied=True), qwen3),
    "Mixtral": (replace(LLAMA, num_layers=2, variant=tuple(_EXPERTS.items())), mixtral),
}
POOLS = {
    "one process": (1, ("tp1",)),
    "tp2": (2, ("tp2",)),
    "pp2": (2, ("pp2",)),
    "cp2": (2, ("cp2",)),
    "waves": (4, ("cp4~",)),
    "pool": (4, ("tp2+2*tp1", "tp2pp2", "cp4~", "2*cp2")),
    "recomputed": (4, ("tp2pp2r", "cp4~r")),
}


def job_of(model: SmallModel, num_ranks: int, texts: tuple[str, ...]) -> Job:
    """Four iterations with large steps, each in the next strategy."""
    turns = [(i % len(texts), i % len(LENGTHS)) for i in range(NUM_ITERATIONS)]
    job = in_turns(model, num_ranks, texts, turns)
    # A larger eps: AdamW amplifies roundings of gradients that are small next to it.
    return replace(job, settings=replace(FP64_SETTINGS, eps=1e-3))


def to_peft(tensors: dict[str, Any]) -> dict[str, Any]:
    """The adapters among Megatron's tensors, by peft's names."""
    found = {}
    for name, value in tensors.items():
        if ".adapters." in name:
            _, _, layer, *_, target, matrix = name.split(".")
            module = "self_attn" if target[0] in "qkvo" else "mlp"
            at = f"base_model.model.model.layers.{layer}.{module}.{target}"
            found[f"{at}.{matrix}.default.weight"] = value
    return found


class PeftRun:
    """Losses, gradient norms and adapters after each of the updates."""

    def __init__(self, name: str) -> None:
        import peft  # accelerate, with it, takes a second

        prepare_parent()
        small, build = FAMILIES[name]
        job = job_of(small, 1, ("tp1",))
        values = {n: v.numpy() for n, v in initial_parameters(small, job.seed).items()}
        base = {n: v for n, v in values.items() if ".adapters." not in n}
        adapters = to_peft(values)
        assert small.lora is not None
        config = peft.LoraConfig(
            r=small.lora.rank,
            lora_alpha=small.lora.alpha,  # type: ignore[arg-type]
            target_modules=list(small.lora.targets),
        )
        model: Any = peft.get_peft_model(load(to_llama(base, small), small, build), config)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert trained.keys() == adapters.keys()
        with torch.no_grad():
            for n, parameter in trained.items():
                parameter.copy_(torch.from_numpy(adapters[n]))
        settings = job.settings
        adamw = torch.optim.AdamW(
            trained.values(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.adapters: list[dict[str, np.ndarray]] = []
        for i, batch in enumerate(job.batches):
            adamw.zero_grad()
            total = 0.0
            for tokens, weights in zip(batch, job.weights[i], strict=True):
                ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
                losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
                loss = (torch.from_numpy(weights[1:]) * losses).sum()
                loss.backward()
                total += loss.item()
            divisor = job.weight_sum(i)
            for parameter in trained.values():
                parameter.grad.div_(divisor)
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), settings.clip_grad)
            adamw.step()
            self.losses.append(total / divisor)
            self.norms.append(norm.item())
            self.adapters.append(
                {n: p.detach().double().numpy().copy() for n, p in trained.items()}
            )


peft_run = cache(PeftRun)


def check(name: str, model: SmallModel, num_ranks: int, texts: tuple[str, ...]) -> None:
    expected, job = peft_run(name), job_of(model, num_ranks, texts)
    runs: list[RankRun] = pool_of(num_ranks).run(run_job, job)
    for i in range(NUM_ITERATIONS):
        found = to_peft(assemble(runs, [run.parameters[i] for run in runs]))
        assert_same(found, expected.adapters[i], TOLERANCE, f"update {i}")
    assert runs[0].losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert runs[0].norms == pytest.approx(expected.norms, rel=TOLERANCE)


CASES = [
    pytest.param(
        name,
        pool,
        marks=()
        if pool == "one process" or (name, pool) == ("Llama", "pool")
        else pytest.mark.nightly,
    )
    for name in FAMILIES
    for pool in POOLS
]


@pytest.mark.parametrize(("name", "pool"), CASES)
def test_adapters_are_peft_s(name: str, pool: str) -> None:
    check(name, FAMILIES[name][0], *POOLS[pool])


@pytest.mark.nightly
def test_without_sequence_parallelism_too() -> None:
    check("Llama", replace(LLAMA, sequence_parallel=False), 4, ("tp2pp2", "tp4", "2*tp2r"))
