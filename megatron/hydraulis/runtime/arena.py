"""Two flat arenas, parameters and gradients, that a role's model is bound to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.model_building import global_name
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.role import Role

ALIGNMENT_ELEMENTS = 64
"""Every parameter starts at a multiple of this: 256 bytes in fp32, what CUDA kernels like."""


@dataclass(frozen=True)
class BoundParameter:
    """A parameter of the role and its places in the arenas, both flat."""

    name: str
    values: Tensor
    gradient: Tensor


class Arena:
    """Memory for one role's parameters (in ``dtype``) and gradients (in ``grad_dtype``).

    The storage is resized, not remade: views stay valid while `release` and `allocate` follow what
    each iteration's strategy needs.
    """

    def __init__(
        self,
        layout: CanonicalLayout,
        role: Role,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._role = role
        self._offsets: dict[int, int] = {}
        units = role.units
        end = 0
        for index, spec in enumerate(layout.parameters):
            if spec.unit in units:
                self._offsets[index] = end
                size = spec.num_elements // (role.tp if spec.tp_dim is not None else 1)
                end += -(-size // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        self.parameters = torch.empty(end, dtype=dtype, device=device)
        self.gradients = torch.zeros(end, dtype=grad_dtype, device=device)
        self.bound: dict[int, BoundParameter] = {}

    def bind(self, model: torch.nn.Module) -> None:
        """Give every parameter of a model on `meta` its place here, gradients included.

        Args:
            model: the role's model; its parameters are replaced by views into the arena that carry
                the attributes Megatron wrote on the originals.

        Raises:
            ConfigurationError: the model's parameters are not those of the catalogue.
        """
        for local_name, original in list(model.named_parameters()):
            name = global_name(local_name, self._role)
            index = self._layout.index_of.get(name)
            if index is None or index not in self._offsets:
                raise ConfigurationError(
                    f"parameter '{name}' of the stage is not in the whole model; every stage must "
                    "be a part of the model that one rank would build"
                )
            spec = self._layout.parameters[index]
            shape = spec.local_shape(self._role.tp)
            if tuple(original.shape) != shape:
                raise ConfigurationError(
                    f"parameter '{name}' has shape {tuple(original.shape)} on this stage, but "
                    f"{spec.shape} cut over tp={self._role.tp} gives {shape}"
                )
            bound = self._views(index, name)
            # `Parameter(view)` would share the arena's version counter, and autograd would raise
            # as soon as another parameter's gather writes to the arena.
            parameter = torch.nn.Parameter(torch.empty(0, dtype=bound.values.dtype))
            parameter.data = bound.values.view(shape)
            for key, value in vars(original).items():
                setattr(parameter, key, value)
            if bound.gradient.dtype != bound.values.dtype:
                parameter.grad_dtype = bound.gradient.dtype
            parameter.grad = bound.gradient.view(shape)
            self.bound[index] = bound
            _replace_parameter(model, local_name, original, parameter)

    def zero_gradients(self) -> None:
        """Start accumulating anew."""
        self.gradients.zero_()

    def release(self) -> None:
        """Give the memory back; views stay, empty."""
        self.parameters.untyped_storage().resize_(0)
        self.gradients.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Take memory again after `release`; contents are undefined."""
        for flat in (self.parameters, self.gradients):
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())

    def _views(self, index: int, name: str) -> BoundParameter:
        spec = self._layout.parameters[index]
        size = spec.num_elements // (self._role.tp if spec.tp_dim is not None else 1)
        start = self._offsets[index]
        return BoundParameter(
            name, self.parameters[start : start + size], self.gradients[start : start + size]
        )


def _replace_parameter(
    model: torch.nn.Module,
    name: str,
    original: torch.nn.Parameter,
    parameter: torch.nn.Parameter,
) -> None:
    """Put ``parameter`` wherever the original is registered: tied weights have several places."""
    replaced = 0
    for module in model.modules():
        for key, registered in module._parameters.items():
            if registered is original:
                module._parameters[key] = parameter
                replaced += 1
    assert replaced, name
