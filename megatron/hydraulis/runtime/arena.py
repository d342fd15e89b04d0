"""Two flat storages per rank, parameters and gradients, shared by the models of all its roles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.model_building import global_name
from megatron.hydraulis.transfer.calls import Calls
from megatron.hydraulis.transfer.canonical import UNIT_ALIGNMENT_ELEMENTS, CanonicalLayout, Unit
from megatron.hydraulis.transfer.ranges import held_blocks
from megatron.hydraulis.transfer.role import (
    NUM_GRADIENT_SLOTS,
    ParameterRun,
    Role,
    aligned,
    runs_of,
)


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

    def lend_gradients(self, shards: CanonicalShards, place: int, num_elements: int) -> None:
        """Resize for gradients, and put those of the shards at element ``place``; contents of both
        are undefined."""
        flat, num_owned = self._gradients, shards.parameters.numel()
        shards.gradients = shards.gradients.new_empty(0)
        _resize(flat, max(num_elements, place + num_owned))
        shards.gradients = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            flat.untyped_storage(), place, (num_owned,), (1,)
        )

    def return_gradients(self, shards: CanonicalShards) -> None:
        """Copy the shards' gradients to memory of their own if they are in this."""
        flats = self._gradients, shards.gradients
        own, other = (flat.untyped_storage().data_ptr() for flat in flats)
        if shards.gradients.numel() > 0 and own == other:
            shards.gradients = shards.gradients.clone()

    def release_gradients_unless(self, num_elements: int) -> None:
        """Free the gradients' memory unless it has this size already."""
        if self._gradients.untyped_storage().nbytes() != (
            num_elements * self._gradients.element_size()
        ):
            _resize(self._gradients, 0)

    def views(self, num_parameters: int, num_gradients: int) -> tuple[Tensor, Tensor]:
        """Flat parameters and gradients from the start of the storages; only within `reaching`."""
        flats = ((self._parameters, num_parameters), (self._gradients, num_gradients))
        return tuple(
            torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
                flat.untyped_storage(), 0, (num_elements,), (1,)
            )
            for flat, num_elements in flats
        )  # type: ignore[return-value]

    @contextmanager
    def reaching(self, num_parameters: int, num_gradients: int) -> Iterator[None]:
        """Enlarge both storages temporarily, keeping their contents, so that views can be created.

        torch refuses a view beyond its storage, but allows a storage to shrink below its views.
        """
        before = []
        flats = ((self._parameters, num_parameters), (self._gradients, num_gradients))
        for flat, num_elements in flats:
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
    """Flat views of the arena: a parameter of the role, and its gradient unless it is frozen."""

    values: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class Slot:
    """Memory of a storage in which one of several units is whole at a time."""

    start: int
    num_elements: int


@dataclass(frozen=True)
class PlacedRun:
    """A run of a unit's parameters, and where it lies."""

    run: ParameterRun
    start: int
    """First element of what the rank keeps of it, in both storages."""
    start_in_slot: int
    """First element of all of it in the unit's slots, if ranks share it."""


class Arena:
    """One role's layout of the shared memory: the offset of every parameter and gradient.

    Each storage begins with what regrouping fills or sends: the role's trained parameters, unit
    after unit, or where ranks share them this rank's shares. Frozen parameters follow, which have
    no gradients. Where ranks share weights slots follow, in which what is shared of a unit is whole
    while it is used, its frozen parameters behind the others: layers take turns, and always get the
    same slot, because autograd keeps addresses; other units have their own. Gradients have two
    slots for layers; those of the output layer are in the place of the embedding's, unless these
    are tied.

    Args:
        num_slots: slots for the weights of layers, where columns share them.
    """

    def __init__(
        self, layout: CanonicalLayout, role: Role, memory: ArenaMemory, *, num_slots: int = 1
    ) -> None:
        self._layout = layout
        self._role = role
        self._memory = memory
        units = [unit for unit in layout.parameters_of if unit in role.units]
        self.places: dict[Unit, list[PlacedRun]] = {unit.trained: [] for unit in units}
        """The runs of each trained unit and then of the frozen one, in canonical order; keys are
        the trained units, also where nothing is trained."""
        self._place_of: dict[int, PlacedRun] = {}
        self.num_gradients = end = 0
        for unit in sorted(units, key=lambda unit: unit.is_frozen):
            for run in runs_of(layout, role, unit):
                start = aligned(end, UNIT_ALIGNMENT_ELEMENTS)
                placed = PlacedRun(run, start, self._num_in_slot(unit.trained, frozen=True))
                self.places[unit.trained].append(placed)
                self._place_of |= dict.fromkeys(run.offsets, placed)
                end = start + run.share_elements
            if not unit.is_frozen:
                self.num_gradients = end
        self.num_parameters = end
        """Elements that the role needs of the storage of parameters, and of gradients."""
        self.weight_slots: dict[Unit, Slot] = {}
        """Slot in which each unit is whole; empty unless columns share weights."""
        self.gradient_slots: dict[Unit, Slot] = {}
        if role.column is not None:
            self.weight_slots, self.num_parameters = self._slots(end, num_slots, {}, frozen=True)
            ends = {} if role.tied_embeddings else {Unit.output(): Unit.embedding()}
            self.gradient_slots, self.num_gradients = self._slots(
                self.num_gradients, NUM_GRADIENT_SLOTS, ends, frozen=False
            )
        with self.in_memory():
            self.parameters, self.gradients = memory.views(self.num_parameters, self.num_gradients)
        self.bound: dict[int, BoundParameter] = {}
        """Keys are indices into ``layout.parameters``."""

    def _slots(
        self, first: int, num_slots: int, instead_of: Mapping[Unit, Unit], *, frozen: bool
    ) -> tuple[dict[Unit, Slot], int]:
        """The slot of each unit, and the end of all.

        Args:
            first: slots begin here.
            num_slots: for layers.
            instead_of: for each unit that shares the slot of another one, this other unit.
            frozen: whether frozen parameters are in slots, too.
        """
        keys = {
            unit: unit.order % num_slots if unit.is_layer else instead_of.get(unit, unit)
            for unit in self.places
        }
        slots: dict[int | Unit, Slot] = {}
        first = aligned(first, UNIT_ALIGNMENT_ELEMENTS)
        for key in dict.fromkeys(keys.values()):
            members = (unit for unit in keys if keys[unit] == key)
            size = max(self._num_in_slot(unit, frozen=frozen) for unit in members)
            slots[key] = Slot(first, size)
            first += size
        return {unit: slots[key] for unit, key in keys.items()}, first

    def _num_in_slot(self, unit: Unit, *, frozen: bool) -> int:
        """Elements of a unit in its slot."""
        return sum(place.run.num_elements for place in self.shared_places(unit, frozen=frozen))

    def shared_places(self, unit: Unit, *, frozen: bool) -> list[PlacedRun]:
        """The runs of a unit that are in its slot, in their order there.

        frozen: whether frozen parameters are in the slot, too.
        """
        return [
            place
            for place in self.places[unit]
            if place.run.is_shared and (frozen or not place.run.is_frozen)
        ]

    def regrouped_start(self, parameter: int) -> int:
        """Place in both storages where element 0 of a local parameter is regrouped, or would be if
        it were in this rank's share; a frozen one is in that of parameters only."""
        place = self._place_of[parameter]
        return place.start + place.run.offsets[parameter] - place.run.share_start

    def bind(self, model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
        """Give every parameter of a model on `meta`, and its gradient, memory of the arena.

        A parameter is frozen if the layout says so, whatever its stage does: a provider does not
        know which layers of the model its stage has. Any other parameter's gradient is
        ``main_grad``, upstream's name: a view of the arena, in its dtype.
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
        return self._memory.reaching(self.num_parameters, self.num_gradients)

    def place_of_shards(self, shards: CanonicalShards, calls: Calls) -> int:
        """The first element of the gradients' storage for those of the shards, which need no memory
        of their own: they arrive where all that lay there has been sent.

        Scatters run in the reverse order of ``calls``. Until a call has arrived, what calls before
        it will send is in use, and so is what it sends itself.
        """
        is_one_stage = self._role.has_embedding and self._role.has_output
        if not is_one_stage or self._role.column is not None:
            # Shares of other stages arrive too early, and slots are in use until the backward ends.
            return self.num_gradients
        place = unsent = 0
        for call in calls:
            unsent = max(unsent, *(self._bucket_ends[bucket] for bucket in call))
            place = max(place, *(unsent - shards.offset(bucket) for bucket in call))
        return place

    @cached_property
    def _bucket_ends(self) -> list[int]:
        """The element after the last one of each bucket, 0 for a bucket that the role lacks."""
        ends = []
        for bucket in self._layout.buckets:
            blocks = held_blocks(self._layout, bucket, self._role, contributed=False)
            ends.append(
                max((self.regrouped_start(b.parameter) + b.stop for _, b in blocks), default=0)
            )
        return ends

    def zero_gradients(self) -> None:
        """Set all gradients to 0, and those in slots."""
        self.gradients.zero_()

    def _start(self, parameter: int, slots: Mapping[Unit, Slot]) -> int:
        """The first element of a parameter where it is whole."""
        place = self._place_of[parameter]
        start = place.start
        if place.run.is_shared:
            unit = self._layout.parameters[parameter].unit
            start = slots[unit.trained].start + place.start_in_slot
        return start + place.run.offsets[parameter]

    def _bound(
        self, local_name: str, original: torch.nn.Parameter
    ) -> tuple[int, torch.nn.Parameter]:
        name = global_name(local_name, self._role)
        index = self._layout.index_of.get(name)
        cut = None if index is None else self._role.cut_of(self._layout.parameters[index])
        if index not in self._place_of or cut is None:
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
        num_elements = math.prod(shape)
        start = self._start(index, self.weight_slots)
        values = self.parameters[start : start + num_elements]
        # `Parameter(view)` would share the arena's version counter: autograd would raise as soon
        # as the gather of another parameter writes to the arena.
        parameter = torch.nn.Parameter(
            torch.empty(0, dtype=values.dtype), requires_grad=not spec.is_frozen
        )
        parameter.data = values.view(shape)
        for key, value in vars(original).items():
            setattr(parameter, key, value)
        gradient = None
        if not spec.is_frozen:
            start = self._start(index, self.gradient_slots)
            gradient = self.gradients[start : start + num_elements]
            accumulated: Any = parameter  # its attributes are unknown to torch's type
            accumulated.main_grad = gradient.view(shape)
            accumulated.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
        self.bound[index] = BoundParameter(values, gradient)
        return index, parameter


def _add_to_main_grad(parameter: Any) -> None:
    """Follow upstream's rules: a layer that has added to ``main_grad`` returns a meaningless
    gradient, or zeros where another use of the weight has a real gradient."""
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
    parameter.grad_added_to_main_grad = False
