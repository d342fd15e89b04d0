"""AdamW on canonical shards equals torch's on whole parameters, whoever owns which rows."""

from __future__ import annotations

import pytest
import torch

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings, ShardedAdamW
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.transfer.canonical import (
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Unit,
)

_SPECS = (
    ParameterSpec(
        "embedding",
        (8, 4),
        Unit.embedding(),
        Contribution.SHARDED,
        tp_dim=0,
        is_embedding_or_output=True,
    ),
    ParameterSpec("proj", (4, 6), Unit.layer(0), Contribution.SHARDED, tp_dim=1),
    ParameterSpec("norm", (5,), Unit.layer(0), Contribution.REPLICATED, decays=False),
)
_SETTINGS = AdamWSettings(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-3, clip_grad=0.0)
_NUM_RANKS = 3
Whole = dict[str, torch.Tensor]


def layout_of(num_ranks: int) -> CanonicalLayout:
    return CanonicalLayout.build(
        list(_SPECS), num_atoms=2, num_ranks=num_ranks, bucket_cap_elements=10**6
    )


def shards_of(rank: int, num_ranks: int = _NUM_RANKS) -> CanonicalShards:
    device = torch.device("cpu")
    return CanonicalShards(
        layout_of(num_ranks),
        rank,
        dtype=torch.float64,
        frozen_dtype=torch.float64,
        device=device,
    )


def drawn(seed: int) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        for spec in _SPECS
    }


def copy(shards: CanonicalShards, flat: torch.Tensor, whole: Whole, *, into_whole: bool) -> None:
    """Copy what the rank owns between its flat shards and whole tensors."""
    for part in shards.rectangles():
        spec = shards.layout.parameters[part.parameter]
        matrix = whole[spec.name].reshape(-1, spec.shape[1] if len(spec.shape) > 1 else 1)
        if len(spec.shape) == 1:
            matrix = matrix.reshape(1, -1) if part.num_columns > 1 else matrix
        rows = slice(part.first_row, part.first_row + part.num_rows)
        columns = slice(part.first_column, part.first_column + part.num_columns)
        own = flat[part.shard_offset : part.shard_offset + part.num_elements]
        if into_whole:
            matrix[rows, columns] = own.view(part.num_rows, part.num_columns)
        else:
            own.copy_(matrix[rows, columns].reshape(-1))


def trained(settings: AdamWSettings, *, clips_at: float | None = None) -> Whole:
    """Three updates on the shards of all ranks; the whole parameters afterwards."""
    whole = drawn(0)
    found = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    norms = {
        seed: torch.cat([g.flatten() for g in drawn(seed).values()]).norm().item()
        for seed in (1, 2, 3)
    }
    for rank in range(_NUM_RANKS):
        shards = shards_of(rank)
        optimizer = ShardedAdamW(shards, settings)
        copy(shards, shards.parameters, whole, into_whole=False)
        for seed, norm in norms.items():
            copy(shards, shards.gradients, drawn(seed), into_whole=False)
            optimizer.step(norm)
        copy(shards, shards.parameters, found, into_whole=True)
    return found


def by_torch(settings: AdamWSettings) -> Whole:
    """The same three updates by torch.optim.AdamW."""
    whole = {name: torch.nn.Parameter(value) for name, value in drawn(0).items()}
    decoupled = settings.decoupled_lr
    groups = [
        {
            "params": [whole[spec.name]],
            "weight_decay": settings.weight_decay if spec.decays else 0.0,
            "lr": settings.lr
            if decoupled is None or not spec.is_embedding_or_output
            else decoupled,
        }
        for spec in _SPECS
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, lr=settings.lr
    )
    for seed in (1, 2, 3):
        for name, gradient in drawn(seed).items():
            whole[name].grad = gradient
        if settings.clip_grad:
            torch.nn.utils.clip_grad_norm_(whole.values(), settings.clip_grad)
        optimizer.step()
    return {name: value.detach() for name, value in whole.items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"clip_grad": 0.5}, {"decoupled_lr": 0.01}],
    ids=["plain", "clipped", "decoupled"],
)
def test_updates_equal_those_of_torch_on_whole_parameters(changes: dict[str, float]) -> None:
    settings = AdamWSettings(**{**vars(_SETTINGS), **changes})
    torch.testing.assert_close(trained(settings), by_torch(settings), rtol=1e-9, atol=1e-12)


def test_buckets_are_updated_one_by_one_in_their_order() -> None:
    shards = shards_of(0, num_ranks=1)
    optimizer = ShardedAdamW(shards, _SETTINGS)
    shards.gradients.fill_(1.0)
    updated = []
    for index in optimizer.step_by_bucket(1.0):
        updated.append(index)
        changed = [bool(shards.bucket_parameters(bucket).any()) for bucket in shards.layout.buckets]
        assert changed == [bucket.index <= index for bucket in shards.layout.buckets]
    assert updated == [bucket.index for bucket in shards.layout.buckets]
    assert optimizer.num_steps == 1


def test_the_divisor_divides_what_the_norm_sees() -> None:
    squared = 0.0
    for rank in range(_NUM_RANKS):
        shards = shards_of(rank)
        optimizer = ShardedAdamW(shards, _SETTINGS)
        copy(shards, shards.gradients, drawn(1), into_whole=False)
        optimizer.divide_gradients(4.0)
        squared += optimizer.squared_norm().item()
    whole = torch.cat([gradient.flatten() for gradient in drawn(1).values()])
    assert squared == pytest.approx(whole.square().sum().item() / 16, rel=1e-12)


def test_groups_that_upstreams_scheduler_writes_are_used() -> None:
    shards = shards_of(0, num_ranks=1)
    optimizer = ShardedAdamW(shards, _SETTINGS)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    shards.parameters.fill_(1.0)
    shards.gradients.fill_(1.0)
    optimizer.step(1.0)
    assert bool((shards.parameters == 1.0).all())


@pytest.mark.parametrize("field", ["lr", "beta1", "eps", "clip_grad"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), "1"])
def test_settings_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=field):
        AdamWSettings(**{"lr": 0.1, field: value})  # type: ignore[arg-type]
