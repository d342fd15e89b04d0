"""verl's distillation trains our actor as it trains one process of transformers.

The reference gets its losses from all logits, as verl's engine for FSDP does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding

from tests.support.gloo_pool import pool_of
from tests.verl.one_process import (
    NUM_RANKS,
    TEMPERATURE,
    TIMEOUT_S,
    TOLERANCE,
    Reference,
    Tensors,
    ppo_config,
    rollout,
    train_once,
    use_as_verl_rank,
)

TOP = 4
LOWEST_LOG_PROB = -5.5
"""Clamps some of the student's log-probabilities, and some of the teacher's."""

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def config_of(folder: Path, loss_mode: str, use_task_rewards: bool) -> Any:
    loss = "distillation.distillation_loss"
    return ppo_config(
        folder,
        *("distillation.enabled=true", "distillation.teacher_models.teacher_model.model_path=none"),
        *(f"{loss}.loss_mode={loss_mode}", f"{loss}.topk={TOP}"),
        *(f"{loss}.log_prob_min_clamp={LOWEST_LOG_PROB}", f"{loss}.distillation_loss_coef=0.5"),
        f"{loss}.use_task_rewards={use_task_rewards}",
    )


def data_of(vocab_size: int, loss_mode: str, use_task_rewards: bool) -> TensorDict:
    """A rollout with the log-probabilities of a teacher: of its most likely tokens, or one."""
    data = rollout(vocab_size)
    shape = data["input_ids"].shape
    logits = torch.randn(*shape, vocab_size, generator=torch.Generator().manual_seed(5))
    log_probs = logits.log_softmax(-1)
    is_top = loss_mode == "forward_kl_topk"
    log_probs, ids = (
        log_probs.topk(TOP) if is_top else (log_probs[..., :1], data["input_ids"][..., None])
    )
    data.update({"teacher_ids": ids.int(), "teacher_logprobs": log_probs})
    train_once(
        data,
        len(data),
        calculate_entropy=True,
        compute_loss=True,
        distillation_use_topk=is_top,
        distillation_only=is_top and not use_task_rewards,
    )
    return data


def run_actor(folder: Path, vocab_size: int, *mode: Any) -> tuple[Any, Tensors]:
    """Metrics of one update, and the model after it."""
    use_as_verl_rank()
    config = config_of(folder, *mode)
    worker = ActorRolloutRefWorker(
        config.actor_rollout_ref, role="actor", distillation_config=config.distillation
    )
    worker.init_model()
    data = data_of(vocab_size, *mode)[2 * dist.get_rank() :][:2]
    output = worker.update_actor(left_right_2_no_padding(data))
    engine = worker.actor.engine
    tensors = dict(engine.get_per_tensor_param()[0])
    engine.engine.close()
    return dict(tu.get(output, "metrics")), tensors


@pytest.mark.parametrize(
    "mode", [("forward_kl_topk", True), ("forward_kl_topk", False), ("k3", False)]
)
def test_distillation_updates_as_one_process(folder: Path, mode: tuple[str, bool]) -> None:
    vocab_size = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    ranks = pool_of(NUM_RANKS).run(run_actor, folder, vocab_size, *mode, timeout_s=TIMEOUT_S)
    reference = Reference(folder)
    config = config_of(folder, *mode)
    loss_of = partial(
        distillation_ppo_loss, distillation_config=omega_conf_to_dataclass(config.distillation)
    )
    data = left_right_2_no_padding(data_of(vocab_size, *mode))
    num_tokens = int(data["loss_mask"].sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens)
    tokens = list(data["input_ids"].unbind())
    outputs = reference.outputs(tokens, TEMPERATURE)
    if mode[0] == "forward_kl_topk":
        logits = torch.cat([reference.model(row[None]).logits[0] for row in tokens]) / TEMPERATURE
        data["teacher_ids"] = data["teacher_ids"].long()
        found = loss_of(
            config=SimpleNamespace(strategy="fsdp"), data=data, student_logits=logits[None]
        )
        for name in ("distillation_losses", "student_mass", "teacher_mass"):
            outputs[name] = torch.nested.nested_tensor_from_jagged(
                found[name][0], data["input_ids"].offsets()
            )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss, metrics = loss_of(config=actor, model_output=outputs, data=data)
    names = ["distillation/loss"]
    if mode[0] == "forward_kl_topk":
        names += ["distillation/student_mass_max", "distillation/teacher_mass_min"]
    wanted = {name: metrics[name].aggregate() for name in names}
    wanted |= {"loss": loss.item(), "grad_norm": reference.update(loss)}
    for found, tensors in ranks:
        assert {name: found[name][0] for name in wanted} == pytest.approx(wanted, rel=TOLERANCE)
        reference.assert_is(tensors)
