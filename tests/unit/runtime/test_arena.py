"""Arenas of several roles share memory of the size that the current role needs."""

from collections import Counter
from typing import Any

import torch

from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.arena import Arena, ArenaMemory
from megatron.hydraulis.runtime.catalogue import catalogue
from megatron.hydraulis.runtime.model_building import build_role_model
from megatron.hydraulis.runtime.process_groups import local_collection
from megatron.hydraulis.transfer.canonical import CanonicalLayout, Unit
from megatron.hydraulis.transfer.role import Role
from tests.support.gloo_pool import prepare_parent
from tests.support.models import SmallModel

BF16_BYTES, FP32_BYTES = 2, 4


def role_of_layers(first: int, num_layers: int) -> Role:
    return Role(
        tp=1,
        tp_rank=0,
        first_layer=first,
        num_layers=num_layers,
        num_layers_of_model=2,
        tied_embeddings=False,
    )


def test_two_roles_use_the_memory_in_turn() -> None:
    prepare_parent()
    definition = SmallModel(num_layers=2, dtype=torch.bfloat16).definition()
    specs = [entry.spec for entry in catalogue(definition)]
    layout = CanonicalLayout.build(specs, num_atoms=1, num_ranks=1)
    memory = ArenaMemory(dtype=torch.bfloat16, grad_dtype=torch.float32, device=torch.device("cpu"))
    arenas, models = [], []
    for role in (role_of_layers(0, 2), role_of_layers(1, 1)):
        arena = Arena(layout, role, memory)
        model = build_role_model(definition, role, local_collection())
        arena.bind(model)
        assert memory.num_bytes == 0, "binding keeps no memory"
        arenas.append(arena)
        models.append(model)
    whole, half = arenas
    assert whole.num_parameters > half.num_parameters > 0

    for arena, model in [*zip(arenas, models, strict=True)] * 2:
        memory.size_parameters(arena.num_parameters)
        memory.size_gradients(arena.num_gradients)
        assert memory.num_bytes == (BF16_BYTES + FP32_BYTES) * arena.num_parameters
        arena.parameters.fill_(3.0)
        arena.gradients.fill_(5.0)
        for name, parameter in model.named_parameters():
            assert parameter.untyped_storage().data_ptr() == arena.parameters.data_ptr(), name
            assert bool((parameter == 3.0).all()), name
            assert bool((vars(parameter)["main_grad"] == 5.0).all()), name
        # A scatter reads the memory that the model writes.
        first: Any = next(model.parameters())
        (first * 2.0).sum().backward()
        assert first.grad is None
        gradient = next(iter(arena.bound.values())).gradient
        assert gradient is not None
        assert bool((gradient == 7.0).all())
        # A layer that has added to it returns a meaningless tensor to autograd.
        first.grad_added_to_main_grad = True
        (first * 100.0).sum().backward()
        assert bool((gradient == 7.0).all())
        (first * 2.0).sum().backward()
        assert bool((gradient == 9.0).all())
        arena.zero_gradients()
        assert not arena.gradients.any()


def test_gradients_of_shards_follow_those_of_each_bucket() -> None:
    """They take the place of a part of the output layer once it is sent, before other parts are."""
    specs = [entry.spec for entry in catalogue(SmallModel(num_layers=2).definition())]
    layout = CanonicalLayout.build(specs, num_atoms=1, num_ranks=4, bucket_cap_elements=500)
    memory = ArenaMemory(dtype=torch.float32, grad_dtype=torch.float32, device=torch.device("cpu"))
    arena = Arena(layout, role_of_layers(0, 2), memory)
    # The role has all parameters, in canonical order.
    ends, in_unit = [], Counter[Unit]()
    for bucket in layout.buckets:
        in_unit[bucket.unit] += bucket.num_elements
        ends.append(arena.places[bucket.unit][0].start + in_unit[bucket.unit])
    assert in_unit[Unit.output()] > 1000
    calls = tuple((bucket.index,) for bucket in layout.buckets)
    for rank in range(4):
        shards = CanonicalShards(
            layout,
            rank,
            dtype=torch.float32,
            frozen_dtype=torch.float32,
            device=torch.device("cpu"),
            has_gradients=False,
        )
        needed = max(end - shards.offset(bucket) for bucket, end in enumerate(ends))
        assert arena.place_of_shards(shards, calls) == needed


def test_the_same_size_again_keeps_what_is_there() -> None:
    memory = ArenaMemory(dtype=torch.float32, grad_dtype=torch.float32, device=torch.device("cpu"))
    memory.size_parameters(4)
    with memory.reaching(4, 4):
        parameters, _ = memory.views(4, 4)
    parameters.fill_(2.0)
    memory.size_parameters(4)
    assert parameters.tolist() == [2.0] * 4
    memory.size_gradients(4)
    memory.release_gradients_unless(4)
    assert memory.num_bytes == 32
    memory.release_gradients_unless(5)
    assert memory.num_bytes == 16
    with memory.reaching(1000, 1000):
        assert parameters.tolist() == [2.0] * 4
    assert memory.num_bytes == 16
    assert parameters.tolist() == [2.0] * 4
    memory.size_parameters(0)
    assert memory.num_bytes == 0
