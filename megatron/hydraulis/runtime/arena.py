"""Two flat storages per rank, parameters and gradients, shared by the models of all its roles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.model_building import global_name
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.role import Role

UNIT_ALIGNMENT_ELEMENTS = 64
"""A layer starts at a multiple of this: 256 bytes in fp32, as CUDA kernels prefer. Its matrices,
which come first, usually have such sizes."""
ALIGNMENT_ELEMENTS = 8
"""Every parameter starts at a multiple of this: 16 bytes in bf16, which CUDA kernels need. Norms of
a head's size leave no gaps then, so that a layer travels without staging."""


class ArenaMemory:
    """The memory of all arenas of a rank, sized for the current strategy.

    Storages are resized, not replaced: the views of every role stay valid, but only those of the
    role for which the memory was last sized may be used.
    """

    def __init__(
        self, *, dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parameters = torch.empty(0, dtype=dtype, device=device)
        self._gradients = torch.empty(0, dtype=grad_dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of both storages now."""
        return sum(flat.untyped_storage().nbytes() for flat in (self._parameters, self._gradients))

    def size_parameters(self, num_elements: int) -> None:
        """Resize for parameters; if the size changes, contents are undefined."""
        _resize(self._parameters, num_elements)

    def size_gradients(self, num_elements: int) -> None:
        """Resize for gradients; if the size changes, contents are undefined."""
        _resize(self._gradients, num_elements)

    def release_gradients_unless(self, num_elements: int) -> None:
        """Free the gradients' memory unless it has this size already."""
        if self._gradients.untyped_storage().nbytes() != (
            num_elements * self._gradients.element_size()
        ):
            _resize(self._gradients, 0)

    def views(self, num_elements: int) -> tuple[Tensor, Tensor]:
        """Flat parameters and gradients from the start of the storages; only within `reaching`."""
        return tuple(
            torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
                flat.untyped_storage(), 0, (num_elements,), (1,)
            )
            for flat in (self._parameters, self._gradients)
        )  # type: ignore[return-value]

    @contextmanager
    def reaching(self, num_elements: int) -> Iterator[None]:
        """Enlarge both storages temporarily, keeping their contents, so that views can be created.

        torch refuses a view beyond its storage, but allows a storage to shrink below its views.
        """
        before = []
        for flat in (self._parameters, self._gradients):
            storage = flat.untyped_storage()
            before.append(storage.nbytes())
            storage.resize_(max(storage.nbytes(), num_elements * flat.element_size()))
        try:
            yield
        finally:
            for flat, num_bytes in zip((self._parameters, self._gradients), before, strict=True):
                if flat.untyped_storage().nbytes() != num_bytes:
                    flat.untyped_storage().resize_(num_bytes)


def _resize(flat: Tensor, num_elements: int) -> None:
    storage, num_bytes = flat.untyped_storage(), num_elements * flat.element_size()
    if storage.nbytes() != num_bytes:
        storage.resize_(0)  # free the old contents first: neither copy them nor hold both
        storage.resize_(num_bytes)


@dataclass(frozen=True)
class BoundParameter:
    """Flat views of the arena: a parameter of the role, and its gradient."""

    values: Tensor
    gradient: Tensor


class Arena:
    """One role's layout of the shared memory: the offset of every parameter and gradient."""

    def __init__(self, layout: CanonicalLayout, role: Role, memory: ArenaMemory) -> None:
        self._layout = layout
        self._role = role
        self._memory = memory
        self._offsets: dict[int, int] = {}
        units = role.units
        end, before = 0, None
        for index, spec in enumerate(layout.parameters):
            cut = role.cut_of(spec) if spec.unit in units else None
            if cut is not None:
                step = ALIGNMENT_ELEMENTS if spec.unit == before else UNIT_ALIGNMENT_ELEMENTS
                self._offsets[index] = -(-end // step) * step
                end, before = self._offsets[index] + math.prod(spec.local_shape(cut[0])), spec.unit
        self.num_elements = end
        """Elements that the role needs of each storage."""
        with self.in_memory():
            self.parameters, self.gradients = memory.views(end)
        self.bound: dict[int, BoundParameter] = {}
        """Keys are indices into ``layout.parameters``."""

    def bind(self, model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
        """Give every parameter of a model on `meta`, and its gradient, memory of the arena.

        A parameter's gradient is ``main_grad``, upstream's name: a view of the arena, in its dtype.
        Linear layers with ``config.gradient_accumulation_fusion`` add to it directly; other
        gradients are added when autograd completes them, and ``grad`` is set to None.

        Args:
            model: the role's model; its parameters are replaced by views into the arena that carry
                the attributes Megatron wrote on the originals.

        Returns:
            The new parameters, by index into ``layout.parameters``.

        Raises:
            ConfigurationError: the model's parameters differ from those of the catalogue.
        """
        parameters: dict[int, torch.nn.Parameter] = {}
        new: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        with self.in_memory():
            for local_name, original in model.named_parameters():
                index, parameter = self._bound(local_name, original)
                parameters[index] = new[original] = parameter
        for module in model.modules():  # which register tied weights repeatedly
            for key, registered in module._parameters.items():
                if registered is not None:
                    module._parameters[key] = new[registered]
        return parameters

    def in_memory(self) -> AbstractContextManager[None]:
        """Within, views of the arena can be created, whatever the current size of the memory."""
        return self._memory.reaching(self.num_elements)

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def _bound(
        self, local_name: str, original: torch.nn.Parameter
    ) -> tuple[int, torch.nn.Parameter]:
        name = global_name(local_name, self._role)
        index = self._layout.index_of.get(name)
        cut = None if index is None else self._role.cut_of(self._layout.parameters[index])
        if index is None or index not in self._offsets or cut is None:
            raise ConfigurationError(
                f"parameter '{name}' of the stage is not in the whole model; every stage must "
                "be a part of the model that one rank would build"
            )
        spec = self._layout.parameters[index]
        shape = spec.local_shape(cut[0])
        if tuple(original.shape) != shape:
            raise ConfigurationError(
                f"parameter '{name}' has shape {tuple(original.shape)} on this stage, but "
                f"{spec.shape} cut over tp={cut[0]} gives {shape}"
            )
        start = self._offsets[index]
        place = slice(start, start + math.prod(shape))
        bound = BoundParameter(self.parameters[place], self.gradients[place])
        # `Parameter(view)` would share the arena's version counter: autograd would raise as soon
        # as the gather of another parameter writes to the arena.
        parameter = torch.nn.Parameter(torch.empty(0, dtype=bound.values.dtype))
        parameter.data = bound.values.view(shape)
        for key, value in vars(original).items():
            setattr(parameter, key, value)
        accumulated: Any = parameter  # its attributes are unknown to torch's type
        accumulated.main_grad = bound.gradient.view(shape)
        accumulated.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
        self.bound[index] = bound
        return index, parameter


def _add_to_main_grad(parameter: Any) -> None:
    """Follow upstream's rules: a layer that has added to ``main_grad`` returns a meaningless
    gradient, or zeros where another use of the weight has a real gradient."""
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
    parameter.grad_added_to_main_grad = False
