"""The order in which columns exchange weights and gradients depends on the model alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from megatron.hydraulis.runtime.arena import Arena, ArenaMemory
from megatron.hydraulis.runtime.columns import ColumnExchange, ColumnMeter, ColumnShares
from megatron.hydraulis.runtime.track import TrackJob
from megatron.hydraulis.transfer.canonical import CanonicalLayout, Contribution, ParameterSpec, Unit
from megatron.hydraulis.transfer.role import Role

NUM_LAYERS = 4


@dataclass
class FakeTicket:
    job: str
    log: list[str]
    is_done: bool

    def wait(self) -> None:
        self.log.append(f"wait {self.job}")


@dataclass
class FakeTrack:
    """Writes down what is submitted and waited for; jobs are done at once, or never until then."""

    are_done: bool
    log: list[str] = field(default_factory=list)
    may_delay_compute: bool = True

    def submit(self, job: TrackJob) -> FakeTicket:
        name = f"{job.span.removeprefix('column ')} {job.detail['unit']}"
        self.log.append(name)
        return FakeTicket(name, self.log, self.are_done)

    def finish(self) -> None: ...

    def close(self) -> None: ...


class FakePass:
    """A gather or scatter of regrouping."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def need(self, buckets: Any) -> None: ...

    def arrived(self, parameter: int) -> None:
        self._log.append(f"arrived {parameter}")


UNITS = (Unit.embedding(), *map(Unit.layer, range(NUM_LAYERS)), Unit.output())


def layout(frozen: Iterable[Unit] = ()) -> CanonicalLayout:
    """Units of 128 elements, and frozen ones of 1,024."""
    sharded = Contribution.SHARDED
    specs = [ParameterSpec(unit.name, (8, 16), unit, sharded, tp_dim=0) for unit in UNITS]
    specs += [
        ParameterSpec(f"frozen {unit.name}", (8, 128), unit.frozen, sharded, tp_dim=0)
        for unit in frozen
    ]
    return CanonicalLayout.build(specs, num_atoms=1, num_ranks=2)


def micro_batch(columns: ColumnShares, layout: CanonicalLayout, *, recomputes: bool) -> None:
    """The calls that hooks of a model make."""
    for unit in UNITS:
        columns.before_forward(unit)
    for unit in reversed(UNITS):
        if recomputes and unit.is_layer:
            columns.before_forward(unit)
        columns.before_backward(unit)
        columns.arrived(layout.index_of[unit.name])


@pytest.fixture(params=[False, True], ids=["forward once", "recomputed"])
def recomputes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@dataclass
class Run:
    """Two micro-batches."""

    log: list[str]
    arena: Arena
    num_bytes: int
    """Exchanged by columns."""


def run(
    *,
    are_done: bool = False,
    recomputes: bool = False,
    num_ahead: int = 1,
    frozen: Iterable[Unit] = (),
) -> Run:
    track = FakeTrack(are_done)
    memory = ArenaMemory(dtype=torch.bfloat16, grad_dtype=torch.float32, device=torch.device("cpu"))
    role = Role(1, 0, 0, NUM_LAYERS, NUM_LAYERS, tied_embeddings=False, column=(0, 2))
    parameters = layout(frozen)
    arena = Arena(parameters, role, memory, num_slots=1 + num_ahead)
    exchange = ColumnExchange(cast(Any, None), track, torch.float32, num_ahead, ColumnMeter())
    columns = ColumnShares(arena, exchange, {i: [i] for i in range(len(parameters.parameters))})
    of_regrouping = cast(Any, FakePass(track.log))
    columns.begin(of_regrouping, of_regrouping)
    micro_batch(columns, parameters, recomputes=recomputes)
    micro_batch(columns, parameters, recomputes=recomputes)
    columns.finish()
    return Run(track.log, arena, exchange.meter.num_bytes)


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_the_order_does_not_depend_on_what_has_arrived(recomputes: bool, num_ahead: int) -> None:
    settings = {"recomputes": recomputes, "num_ahead": num_ahead}
    assert run(are_done=True, **settings).log == run(are_done=False, **settings).log  # type: ignore[arg-type]


def test_calls_of_two_micro_batches() -> None:
    found = [each for each in run().log if each.split()[0] in ("gather", "scatter")]
    layers = [f"layer {i}" for i in range(NUM_LAYERS)]
    backward = [
        *("scatter output", "gather layer 1", "scatter layer 3", "gather layer 0"),
        *("scatter layer 2", "scatter layer 1", "scatter layer 0"),
    ]
    assert found == [
        *(f"gather {name}" for name in ("embedding", *layers, "output")),
        *backward,
        "scatter embedding",
        # Slots still hold the first two layers, the embedding and the output layer.
        *("gather layer 2", "gather layer 3"),
        *backward,
        "scatter embedding",
    ]


def test_nothing_is_used_or_overwritten_before_it_is_complete(recomputes: bool) -> None:
    log = run(recomputes=recomputes).log
    under_way: dict[str, int] = {}
    for entry in log:
        what, name = entry.split(" ", 1)
        if what == "wait":
            del under_way[name]
        elif what in ("gather", "scatter"):
            assert entry not in under_way
            under_way[entry] = 1
            of_layers = [each for each in under_way if each.startswith("scatter layer")]
            assert len(of_layers) <= 2, "there are two slots"
    assert not under_way
    # Regrouping sends a gradient only after it has been added up.
    for index in range(NUM_LAYERS + 2):
        assert log.count(f"arrived {index}") == 2
    first = log.index("arrived 2")
    assert log[first - 1] == "wait scatter layer 1"


def test_frozen_parts_are_gathered_with_their_layer_and_have_no_gradients(recomputes: bool) -> None:
    plain, found = run(recomputes=recomputes), run(recomputes=recomputes, frozen=UNITS)

    def calls_of(log: list[str]) -> list[str]:
        return [entry for entry in log if not entry.startswith("arrived")]

    assert calls_of(found.log) == calls_of(plain.log)
    assert found.arena.num_gradients == plain.arena.num_gradients
    num_gathers = sum(entry.startswith("gather") for entry in found.log)
    # Half of each comes from the other column, as much is sent to it, in bf16.
    assert found.num_bytes == plain.num_bytes + num_gathers * 1024 * 2
    # Shares, slots of two layers, embedding and output layer.
    more = found.arena.num_parameters - plain.arena.num_parameters
    assert more == len(UNITS) * 1024 // 2 + 4 * 1024
