"""AdamW on the canonical shards: its state never moves, whatever strategy computed a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.shards import CanonicalShards


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Hyper-parameters; learning rate and weight decay are those of the first iteration."""

    lr: float
    min_lr: float = 0.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.min_lr < 0:
            raise ConfigurationError(f"--lr {self.lr} and --min-lr {self.min_lr} must not be < 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigurationError(
                f"--adam-beta1 {self.beta1} and --adam-beta2 {self.beta2} must lie in [0, 1)"
            )
        if self.clip_grad < 0:
            raise ConfigurationError(f"--clip-grad {self.clip_grad} must not be < 0")


class ShardedAdamW:
    """torch's fused AdamW over runs of the flat shards, with what upstream's loop asks for.

    No weight decay on biases and norms. Gradients arrive as sums over tokens and are divided by
    the number of trained tokens of the global batch here, once.
    """

    is_stub_optimizer = False

    def __init__(self, shards: CanonicalShards, settings: AdamWSettings) -> None:
        self._shards = shards
        self.settings = settings
        decayed, others = self._runs()
        groups = [
            {"params": decayed, "wd_mult": 1.0, "weight_decay": settings.weight_decay},
            {"params": others, "wd_mult": 0.0, "weight_decay": 0.0},
        ]
        for group in groups:
            group.update(
                lr_mult=1.0, max_lr=settings.lr, min_lr=settings.min_lr, default_config=True
            )
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._loss_scale = torch.ones(1, device=shards.parameters.device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Upstream's scheduler writes ``lr`` and ``weight_decay`` here."""
        return self._adamw.param_groups

    def scale_loss(self, loss: Tensor) -> Tensor:
        """bf16 and fp32 need no loss scale."""
        return loss

    def get_loss_scale(self) -> Tensor:
        """Always 1, shape (1,)."""
        return self._loss_scale

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing to do: `Regrouper.scatter` overwrites the shards' gradients."""

    def divide_gradients(self, num_tokens: int) -> None:
        """Turn sums over tokens into means over the global batch."""
        self._shards.gradients.div_(num_tokens)

    def gradient_norm(self) -> float:
        """2-norm of the whole model's gradient; every element lies on exactly one rank."""
        # Adds up in fp64 without an fp64 copy of the shards.
        norm = torch.linalg.vector_norm(self._shards.gradients, dtype=torch.float64)
        squares = norm.square().reshape(1)
        dist.all_reduce(squares)
        return math.sqrt(squares.item())

    def step(self, gradient_norm: float) -> None:
        """Clip by the global norm and update the shards.

        Args:
            gradient_norm: from `gradient_norm`, after `divide_gradients`; finite.
        """
        limit = self.settings.clip_grad
        if limit and gradient_norm > limit:
            # The small term is torch's and upstream's: it keeps the quotient away from 1 / 0.
            self._shards.gradients.mul_(limit / (gradient_norm + 1.0e-6))
        self._adamw.step()

    def _runs(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """Neighbouring owned rectangles of equal decay, each as one parameter over the shards."""
        parameters = self._shards.layout.parameters
        runs: list[tuple[int, int, bool]] = []
        for part in self._shards.rectangles():
            decays = parameters[part.parameter].decays
            stop = part.shard_offset + part.num_elements
            if runs and runs[-1][1] == part.shard_offset and runs[-1][2] == decays:
                runs[-1] = (runs[-1][0], stop, decays)
            else:
                runs.append((part.shard_offset, stop, decays))
        groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for start, stop, decays in runs:
            parameter = torch.nn.Parameter(self._shards.parameters[start:stop])
            parameter.grad = self._shards.gradients[start:stop]
            groups[decays].append(parameter)
        return groups[True], groups[False]

    def state_dict(self) -> dict[str, Any]:
        """torch's state of this rank's runs."""
        state: dict[str, Any] = self._adamw.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, on the same rank of an equal layout."""
        self._adamw.load_state_dict(state)
