"""AdamW on the canonical shards: its state never moves when the strategy changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.transfer.canonical import ParameterSpec

Run = tuple[int, int]
"""Elements [start, stop) of the flat shards."""

_DECAYING, _NOT_DECAYING, _DECOUPLED = range(3)
"""Indices of parameter groups: weights, biases and norms, embedding and output layer."""

NORM_CHUNK_ELEMENTS = 1 << 22
"""Elements of the gradient whose norm is computed at once: 32 MiB in fp64."""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Hyper-parameters; learning rate and weight decay of the first iteration."""

    lr: float
    min_lr: float = 0.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    decoupled_lr: float | None = None
    """Learning rate of embedding and output layer; None for that of all others."""
    decoupled_min_lr: float | None = None
    """Least learning rate of embedding and output layer; None for that of all others."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name.startswith("decoupled"):
                continue
            limit = 1.0 if name.startswith("beta") else math.inf
            if not isinstance(value, Real) or not 0 <= float(value) < limit:
                raise ConfigurationError(
                    f"AdamWSettings: {name} is a number, at least 0 and below {limit:g}, but is "
                    f"{value!r}; correct it"
                )


class ShardedAdamW:
    """torch's fused AdamW over runs of the flat shards, with the interface of upstream's loop.

    Biases and norms have no weight decay. Gradients arrive as weighted sums over tokens and are
    divided once by the sum of the weights of the global batch. The moments have the layout of the
    shards.
    """

    is_stub_optimizer = False

    def __init__(self, shards: CanonicalShards, settings: AdamWSettings) -> None:
        self._shards = shards
        self.settings = settings
        self.exp_avg = torch.zeros_like(shards.parameters)
        """First moments, flat as the shards."""
        self.exp_avg_sq = torch.zeros_like(shards.parameters)
        """Second moments, flat as the shards."""
        self.num_steps = torch.zeros((), dtype=torch.float32, device=shards.parameters.device)
        """Updates made; fp32 as in torch's own AdamW."""
        self._runs = self._runs_of_buckets()
        self.param_groups: list[dict[str, Any]] = [
            self._group(_DECAYING, wd_mult=1.0),
            self._group(_NOT_DECAYING, wd_mult=0.0),
        ]
        """Upstream's scheduler writes ``lr`` and ``weight_decay`` here."""
        if settings.decoupled_lr is not None:
            rates = {"max_lr": settings.decoupled_lr}
            if settings.decoupled_min_lr is not None:
                rates["min_lr"] = settings.decoupled_min_lr
            self.param_groups.append(self._group(_DECOUPLED, wd_mult=1.0, **rates))
        self._loss_scale = torch.ones(1)  # on the host: upstream's loop reads it every iteration

    def scale_loss(self, loss: Tensor) -> Tensor:
        """bf16 and fp32 need no loss scale."""
        return loss

    def get_loss_scale(self) -> Tensor:
        """The loss scale: always 1, shape (1,)."""
        return self._loss_scale

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: the first scatter after an update replaces the shards' gradients."""

    def divide_gradients(self, divisor: float) -> None:
        """Turn weighted sums over tokens into means over the global batch."""
        self._shards.gradients.div_(divisor)

    def squared_norm(self) -> Tensor:
        """Sum of the squares of this rank's gradients, shape (1,) in fp64.

        Every element of the model's gradient lies on exactly one rank.
        """
        # A reduction to fp64 copies what it reads to fp64 (`_foreach_norm` on the CPU,
        # `vector_norm` on CUDA too): chunks keep the copy small.
        chunks = self._shards.gradients.split(NORM_CHUNK_ELEMENTS)
        norms = torch.stack(torch._foreach_norm(chunks, 2, torch.float64))
        return norms.square().sum(dim=0, keepdim=True)

    def step(self, gradient_norm: float) -> None:
        """Clip by the global norm and update the shards.

        Args:
            gradient_norm: 2-norm of the model's gradient after `divide_gradients`; finite.
        """
        for _ in self.step_by_bucket(gradient_norm):
            pass

    def step_by_bucket(
        self, gradient_norm: float, order: Sequence[int] | None = None
    ) -> Iterator[int]:
        """`step`, yielding the index of every bucket as soon as it is updated.

        The iterator must be exhausted.

        Args:
            order: of all buckets; by rising index if None.
        """
        limit = self.settings.clip_grad
        if limit and gradient_norm > limit:
            # torch and upstream add the same small term.
            self._shards.gradients.mul_(limit / (gradient_norm + 1.0e-6))
        self.num_steps += 1
        for bucket in range(len(self._runs)) if order is None else order:
            for index, group in enumerate(self.param_groups):
                self._update(self._runs[bucket][index], group)
            yield bucket

    def _group(self, index: int, *, wd_mult: float, **rates: float) -> dict[str, Any]:
        """A parameter group of upstream's, with the names of torch's AdamW.

        rates: ``max_lr`` and ``min_lr`` if they are not the scheduler's.
        """
        settings = self.settings
        return {
            "params": [
                self._shards.parameters[start:stop]
                for runs in self._runs
                for start, stop in runs[index]
            ],
            "wd_mult": wd_mult,
            "weight_decay": settings.weight_decay * wd_mult,
            "lr_mult": 1.0,
            "lr": rates.get("max_lr", settings.lr),
            "betas": (settings.beta1, settings.beta2),
            "eps": settings.eps,
            "default_config": not rates,
            **rates,
        }

    def _runs_of_buckets(self) -> list[tuple[list[Run], ...]]:
        """Runs of adjacent owned rectangles, by bucket and parameter group; none if frozen."""
        parameters = self._shards.layout.parameters
        found: list[tuple[list[Run], ...]] = []
        for bucket in self._shards.layout.buckets:
            runs: tuple[list[Run], ...] = ([], [], [])
            owned = () if bucket.unit.is_frozen else self._shards.rectangles_of(bucket)
            for part in owned:
                of_group = runs[self._group_index(parameters[part.parameter])]
                stop = part.shard_offset + part.num_elements
                if of_group and of_group[-1][1] == part.shard_offset:
                    of_group[-1] = (of_group[-1][0], stop)
                else:
                    of_group.append((part.shard_offset, stop))
            found.append(runs)
        return found

    def _group_index(self, parameter: ParameterSpec) -> int:
        if self.settings.decoupled_lr is not None and parameter.is_embedding_or_output:
            return _DECOUPLED
        return _DECAYING if parameter.decays else _NOT_DECAYING

    def _update(self, runs: Sequence[Run], group: dict[str, Any]) -> None:
        if not runs:
            return
        shards = self._shards
        beta1, beta2 = group["betas"]
        # The kernel adds 1 to the steps of every tensor.
        steps = [self.num_steps - 1 for _ in runs]
        adamw(
            [shards.parameters[start:stop] for start, stop in runs],
            [shards.gradients[start:stop] for start, stop in runs],
            [self.exp_avg[start:stop] for start, stop in runs],
            [self.exp_avg_sq[start:stop] for start, stop in runs],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
