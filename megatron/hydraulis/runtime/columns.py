"""Columns that share their weights: a unit is gathered before use, its gradient scattered after.

The arena of a column holds a share of every unit. A unit's weights are gathered within the columns'
group into the unit's slot, where the model reads them, and stay until another layer needs the slot.
The unit's gradient is computed in a slot and scattered after its backward: each column adds up the
parts of its share. Frozen parameters are gathered with the trained unit of the same layer, and have
nothing to scatter: units here are the keys of `Arena.places`. Whole experts are shared likewise, by
the ranks that hold the same ones, and where there is one such rank they stay where regrouping fills
them.

All columns run the same modules in the same order, so these calls are one sequence in each group.
Nothing here depends on what has arrived: units are gathered ahead at fixed places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.runtime.arena import Arena, Slot
from megatron.hydraulis.runtime.passes import GatherPass, ScatterPass, StallTimer
from megatron.hydraulis.runtime.regroup import all_gather, reduce_scatter
from megatron.hydraulis.runtime.spans import NO_SPANS, CudaStamp, HostStamp, SpanRecorder
from megatron.hydraulis.runtime.track import StagingSlot, Step, Ticket, Track, TrackJob
from megatron.hydraulis.transfer.canonical import Unit


class ColumnMeter:
    """Adds up the bytes that a rank's columns exchange, and the time for which compute waits.

    Args:
        stamp: as of `StallTimer`.
    """

    def __init__(
        self,
        spans: SpanRecorder = NO_SPANS,
        stamp: Callable[[], HostStamp | CudaStamp] = HostStamp,
    ) -> None:
        self.num_bytes = 0
        """Received from other columns and sent to them, since `forget`."""
        self.gathers = StallTimer("column gather wait", spans, stamp)
        self.scatters = StallTimer("column scatter wait", spans, stamp)

    def take_s(self) -> float:
        """Time of all waits; see `StallTimer.take_s`."""
        return self.gathers.take_s() + self.scatters.take_s()

    def forget(self) -> None:
        self.num_bytes = 0
        self.gathers.forget()
        self.scatters.forget()


@dataclass(frozen=True)
class ColumnExchange:
    """How columns that share their weights exchange them."""

    groups: Mapping[tuple[int, int], dist.ProcessGroup]
    """Groups of the ranks that share parameters, in their order, used for this only; keys are those
    of `ParameterRun.sharer`."""
    track: Track
    """Runs these jobs only."""
    wire_dtype: torch.dtype
    """Dtype in which gradients travel; they are added up in that of the arena."""
    num_ahead: int
    """Layers that are gathered ahead."""
    meter: ColumnMeter


class ColumnShares:
    """The gathers and scatters of one role's units within its columns' group.

    Args:
        arena: with ``exchange.num_ahead`` + 1 slots.
        buckets_of: buckets of each parameter of the role, by index into ``layout.parameters``.
    """

    def __init__(
        self, arena: Arena, exchange: ColumnExchange, buckets_of: Mapping[int, Sequence[int]]
    ) -> None:
        self._arena = arena
        self._exchange = exchange
        self._units = tuple(arena.places)
        self._parameters_of = {
            unit: tuple(index for each in arena.places[unit] for index in each.run.offsets)
            for unit in self._units
        }
        self._buckets_of = {
            unit: sorted({bucket for index in indices for bucket in buckets_of[index]})
            for unit, indices in self._parameters_of.items()
        }
        self._unit_of = {index: unit for unit in self._units for index in self._parameters_of[unit]}
        self._gather: GatherPass | None = None
        self._scatter: ScatterPass | None = None
        self._is_backward = False
        self._in_slot: dict[Slot, Unit] = {}
        """The unit that each slot of weights holds or will hold."""
        self._gathers: dict[Unit, Ticket] = {}
        """Gathers of those units that have not been waited for."""
        self._has_gradient: dict[Unit, None] = {}
        """Units whose gradients are in their slots, and have not been scattered."""
        self._scatters: dict[Slot, tuple[Unit, Ticket]] = {}
        """Scatters that have not been waited for, by slot of gradients."""

    def begin(self, gather: GatherPass, scatter: ScatterPass | None) -> None:
        """Begin to run micro-batches: wait for the one, and report complete gradients to the other.

        Slots of gradients must be 0.
        """
        self._gather, self._scatter = gather, scatter
        self._is_backward = False
        for state in (self._in_slot, self._gathers, self._has_gradient, self._scatters):
            state.clear()  # of micro-batches that failed

    def finish_backward(self) -> None:
        """Wait until the gradients of all backwards so far have been added to the shares."""
        self._scatter_all_but(None)
        self._wait_for_scatters(tuple(self._scatters))

    def finish(self) -> None:
        """End all that is under way."""
        self.finish_backward()
        for unit in tuple(self._gathers):
            self._wait_for_gather(unit)

    def before_forward(self, unit: Unit) -> None:
        """A module of the unit is about to run, perhaps as a part of the backward."""
        is_embedding = unit.order < 0
        if is_embedding:
            self._is_backward = False
        if self._is_backward:  # recomputes
            self._fetch((unit,))
            self._scatter_all_but(unit)
            self._wait_for_gather(unit)
            return
        self._scatter_all_but(None)
        if not (is_embedding or unit.is_layer):
            # Output layers add to gradients, also to tied ones, before a hook of theirs can run.
            self._wait_for_scatters(tuple(self._scatters))
        place = self._units.index(unit)
        self._fetch(self._units[place : place + 1 + self._exchange.num_ahead])
        self._wait_for_gather(unit)

    def before_backward(self, unit: Unit) -> None:
        """The gradient of a module's output is known."""
        self._is_backward = True
        place = self._units.index(unit)
        first = max(0, place - self._exchange.num_ahead)
        self._fetch(self._units[first : place + 1][::-1])
        self._scatter_all_but(unit)
        self._wait_for_gather(unit)
        self._wait_for_scatters((self._arena.gradient_slots[unit],))

    def arrived(self, parameter: int) -> None:
        """A backward has added to the gradient of a parameter."""
        self._is_backward = True
        self._has_gradient[self._unit_of[parameter]] = None

    def _fetch(self, units: Sequence[Unit]) -> None:
        """Gather the units that are not in their slots."""
        assert self._gather is not None
        for unit in units:
            slot = self._arena.weight_slots[unit]
            before = self._in_slot.get(slot)
            if before == unit:
                continue
            if before is not None:
                self._gathers.pop(before, None)
            self._gather.need(self._buckets_of[unit])
            self._in_slot[slot] = unit
            self._gathers[unit] = self._submit("gather", unit)

    def _wait_for_gather(self, unit: Unit) -> None:
        ticket = self._gathers.pop(unit, None)
        if ticket is not None:
            self._exchange.meter.gathers.wait_for(ticket)

    def _scatter_all_but(self, unit: Unit | None) -> None:
        for complete in [each for each in self._has_gradient if each != unit]:
            del self._has_gradient[complete]
            ticket = self._submit("scatter", complete)
            self._scatters[self._arena.gradient_slots[complete]] = (complete, ticket)

    def _wait_for_scatters(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot in self._scatters:
                unit, ticket = self._scatters.pop(slot)
                self._exchange.meter.scatters.wait_for(ticket)
                if self._scatter is not None:
                    for parameter in self._parameters_of[unit]:
                        self._scatter.arrived(parameter)

    def _submit(self, what: str, unit: Unit) -> Ticket:
        gathers, exchange = what == "gather", self._exchange
        dtype = self._arena.parameters.dtype if gathers else exchange.wire_dtype
        runs = [place.run for place in self._arena.shared_places(unit, frozen=gathers)]
        num_moved = sum(run.num_elements - run.share_elements for run in runs)
        exchange.meter.num_bytes += 2 * num_moved * dtype.itemsize  # received and sent
        return exchange.track.submit(
            TrackJob(
                span=f"column {what}",
                detail={"unit": unit.name},
                num_steps=1,
                needs_staging=not gathers,
                steps=partial(self._gather_steps if gathers else self._scatter_steps, unit),
            )
        )

    def _shared(
        self, unit: Unit, *, gathers: bool
    ) -> Iterator[tuple[Tensor, Tensor, dist.ProcessGroup]]:
        """Yields for each run of the unit that ranks share, of parameters or else of gradients, all
        of it, in the slot, this rank's share, and their group."""
        arena = self._arena
        flat = arena.parameters if gathers else arena.gradients
        slot = (arena.weight_slots if gathers else arena.gradient_slots)[unit]
        for place in arena.shared_places(unit, frozen=gathers):
            run, start = place.run, slot.start + place.start_in_slot
            whole = flat[start : start + run.num_elements]
            share = flat[place.start : place.start + run.share_elements]
            yield whole, share, self._exchange.groups[run.sharer]

    def _gather_steps(self, unit: Unit, _: StagingSlot) -> Iterator[Step]:
        works = []
        for whole, share, group in self._shared(unit, gathers=True):
            work = all_gather(whole, share, group=group, async_op=True)
            assert work is not None
            works.append(work)
        yield works

    def _scatter_steps(self, unit: Unit, slot: StagingSlot) -> Iterator[Step]:
        """Reduce-scatters where NCCL can add up; messages where it would do so in a narrow dtype,
        and for gloo, whose reduce-scatter moves everything."""
        arena, wire = self._arena, self._exchange.wire_dtype
        narrows = wire != arena.gradients.dtype
        adds_up = arena.gradients.is_cuda and not narrows
        runs = list(self._shared(unit, gathers=False))
        staged = slot.parts(
            [
                {
                    "sent": narrows * whole.numel() * wire.itemsize,
                    "received": (share if adds_up else whole).numel() * wire.itemsize,
                }
                for whole, share, _ in runs
            ]
        )
        works, arrived = [], []
        for (whole, share, group), part in zip(runs, staged, strict=True):
            if adds_up:
                received = part.take("received", share.numel(), wire)
                work = reduce_scatter(received, whole, group=group, async_op=True)
            else:
                send = part.take("sent", whole.numel(), wire).copy_(whole) if narrows else whole
                received = part.take("received", whole.numel(), wire)
                work = dist.all_to_all_single(received, send, group=group, async_op=True)
            assert work is not None
            works.append(work)
            arrived.append(received)
        yield works
        for (whole, share, _), received in zip(runs, arrived, strict=True):
            for of_rank in received.view(-1, share.numel()):
                share += of_rank
            whole.zero_()
