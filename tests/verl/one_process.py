"""What tests with verl share: its configurations on our ranks, and one process of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tests.verl.cpu_platform import average_with_gloo

NUM_RANKS = 4
TOLERANCE = 1e-5
LR = 1e-3
WEIGHT_DECAY = 10.0
"""So large that LR · WEIGHT_DECAY · parameter is above the tolerance."""
TEMPERATURE = 0.7
TIMEOUT_S = 240.0
CONFIG = "megatron.hydraulis.library.verl_engine.HydraulisEngineConfig"
Tensors = dict[str, Tensor]


def composed(name: str, overrides: list[str]) -> Any:
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name, overrides)


def use_as_verl_rank() -> None:
    """What torchrun and verl's own start of the process group would have set."""
    if "MASTER_ADDR" not in os.environ:
        average_with_gloo()
    os.environ.update(
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_RANK=str(dist.get_rank()),
        RAY_LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )


def engine_overrides(prefix: str, pool: str) -> list[str]:
    return [
        f"{prefix}._target_={CONFIG}",
        f"{prefix}.dtype=float32",
        f"+{prefix}.pool=[{pool}]",
        f"+{prefix}.max_tokens_per_micro_batch=256",
        f"+{prefix}.options=[--distributed-timeout-minutes,'1']",
    ]


def rollout(vocab_size: int) -> TensorDict:
    """8 prompts, padded on the left, with responses, padded on the right."""
    generator = torch.Generator().manual_seed(7)
    num, prompt, response = 2 * NUM_RANKS, 6, 11
    prompt_lengths = torch.randint(2, prompt + 1, (num, 1), generator=generator)
    response_lengths = torch.randint(3, response + 1, (num, 1), generator=generator)
    mask = torch.cat(
        [
            torch.arange(prompt) >= prompt - prompt_lengths,
            torch.arange(response) < response_lengths,
        ],
        dim=1,
    ).long()
    tokens = torch.randint(3, vocab_size, (num, prompt + response), generator=generator) * mask
    response_mask = mask[:, prompt:]
    values = torch.randn(5, num, response, generator=generator)
    return tu.get_tensordict(
        {
            "input_ids": tokens,
            "prompts": tokens[:, :prompt],
            "responses": tokens[:, prompt:],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": values[0] * response_mask,
            "old_log_probs": (values[1] * 0.1 - 5.5) * response_mask,
            "ref_log_prob": (values[2] * 0.1 - 5.5) * response_mask,
            "values": values[3] * response_mask,
            "returns": values[4] * response_mask,
        },
        {"temperature": TEMPERATURE},
    )


def actor_config(folder: Path) -> Any:
    return ppo_config(folder).actor_rollout_ref


def ppo_config(folder: Path, *more: str) -> Any:
    actor = "actor_rollout_ref.actor"
    return composed(
        "ppo_trainer",
        [
            *engine_overrides(f"{actor}.fsdp_config", "cp2+tp2"),
            *engine_overrides("actor_rollout_ref.ref.fsdp_config", "pp2+2*tp1"),
            f"{actor}.fsdp_config.optimizer_offload=true",
            f"{actor}.strategy=hydraulis",
            f"actor_rollout_ref.model.path={folder}",
            *(f"{actor}.ppo_mini_batch_size=4", f"{actor}.use_dynamic_bsz=True"),
            *(f"{actor}.entropy_coeff=0.01", f"{actor}.use_kl_loss=True"),
            f"{actor}.loss_agg_mode=seq-mean-token-mean",
            *(f"{actor}.optim.lr={LR}", f"{actor}.optim.weight_decay={WEIGHT_DECAY}"),
            *("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.name=vllm"),
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
            *more,
        ],
    )


def train_once(data: TensorDict, num_sequences: int, **settings: bool) -> None:
    """Ask for one update by all the sequences, in their order."""
    tu.assign_non_tensor(
        data,
        global_batch_size=num_sequences,
        mini_batch_size=num_sequences,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        **settings,
    )


class Reference:
    """transformers' model and torch's AdamW, by which norms and biases do not decay."""

    def __init__(self, folder: Path, kind: Any = AutoModelForCausalLM) -> None:
        self.model = kind.from_pretrained(folder, dtype=torch.float32)
        parameters = list(self.model.parameters())
        matrices = [each for each in parameters if each.dim() > 1]
        others = [each for each in parameters if each.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR)

    def outputs(self, tokens: list[Tensor], temperature: float = 1.0) -> dict[str, Tensor]:
        """As verl's engines give them."""
        found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
        for row in tokens:
            logits = self.model(row[None]).logits[0] / temperature
            log_probs = logits.log_softmax(dim=1)
            found["log_probs"].append(log_probs.gather(1, row.roll(-1)[:, None]).squeeze(1))
            found["entropy"].append(-(log_probs.exp() * log_probs).sum(dim=1))
        return {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            for name, rows in found.items()
        }

    def values(self, tokens: list[Tensor]) -> Tensor:
        """As verl's engines give them."""
        rows = [self.model(row[None]).logits[0, :, 0] for row in tokens]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def adapt(self, adapters: Tensors, config: peft.LoraConfig) -> None:
        """Train adapters with these first values instead of the model; A and B decay."""
        self.model = peft.get_peft_model(self.model, config)
        loaded: Any = peft.set_peft_model_state_dict(self.model, adapters)
        assert not loaded.unexpected_keys
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY)

    def update(self, loss: Tensor, lr: float = LR) -> float:
        """Norm of the gradient before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return norm.item()

    def assert_is(self, tensors: Tensors) -> None:
        own = self.model.state_dict()
        assert tensors.keys() == own.keys() - {"lm_head.weight"} or tensors.keys() == own.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, own[name], rtol=TOLERANCE, atol=TOLERANCE)
