"""An arena's memory can be given back and taken again while a model stays bound to it."""

import torch

from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.runtime.catalogue import catalogue
from megatron.hydraulis.runtime.model_building import build_role_model
from megatron.hydraulis.runtime.process_groups import local_collection
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.role import Role
from tests.support.gloo_pool import prepare_parent
from tests.support.models import SmallModel


def test_released_memory_is_gone_and_views_are_valid_once_it_is_back() -> None:
    prepare_parent()
    definition = SmallModel(num_layers=2, dtype=torch.bfloat16).definition()
    role = Role(
        tp=1,
        tp_rank=0,
        first_layer=0,
        num_layers=2,
        num_layers_of_model=2,
        tied_embeddings=False,
    )
    specs = [entry.spec for entry in catalogue(definition)]
    layout = CanonicalLayout.build(specs, num_atoms=1, num_ranks=1)
    device = torch.device("cpu")
    arena = Arena(layout, role, dtype=torch.bfloat16, grad_dtype=torch.float32, device=device)
    model = build_role_model(definition, role, local_collection())
    arena.bind(model)
    flats = (arena.parameters, arena.gradients)
    sizes = [flat.untyped_storage().nbytes() for flat in flats]
    assert sizes == [2 * arena.parameters.numel(), 4 * arena.gradients.numel()]

    for _ in range(2):
        arena.release()
        assert [flat.untyped_storage().nbytes() for flat in flats] == [0, 0]
        arena.allocate()
        assert [flat.untyped_storage().nbytes() for flat in flats] == sizes
        arena.parameters.fill_(3.0)
        arena.gradients.fill_(5.0)
        for name, parameter in model.named_parameters():
            assert parameter.untyped_storage().data_ptr() == arena.parameters.data_ptr(), name
            assert bool((parameter == 3.0).all()), name
            assert parameter.grad is not None
            assert bool((parameter.grad == 5.0).all()), name
        # What the model writes is what scatter reads.
        parameter = next(model.parameters())
        assert parameter.grad is not None
        parameter.grad.zero_()
        bound = arena.bound[0]
        assert not bound.gradient.any()
        arena.zero_gradients()
        assert not arena.gradients.any()
