"""The order in which columns exchange weights and gradients depends on the model alone."""

from __future__ import annotations

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


def layout() -> CanonicalLayout:
    sharded = Contribution.SHARDED
    units = [Unit.embedding(), *map(Unit.layer, range(NUM_LAYERS)), Unit.output()]
    specs = [ParameterSpec(unit.name, (8, 8), unit, sharded, tp_dim=0) for unit in units]
    return CanonicalLayout.build(specs, num_atoms=1, num_ranks=2)


def micro_batch(columns: ColumnShares, units: tuple[Unit, ...], *, recomputes: bool) -> None:
    """The calls that hooks of a model make."""
    for unit in units:
        columns.before_forward(unit)
    for index, unit in reversed(list(enumerate(units))):
        if recomputes and unit.is_layer:
            columns.before_forward(unit)
        columns.before_backward(unit)
        columns.arrived(index)


@pytest.fixture(params=[False, True], ids=["forward once", "recomputed"])
def recomputes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def logged(*, are_done: bool, recomputes: bool = False, num_ahead: int = 1) -> list[str]:
    """Of two micro-batches."""
    track = FakeTrack(are_done)
    memory = ArenaMemory(dtype=torch.bfloat16, grad_dtype=torch.float32, device=torch.device("cpu"))
    role = Role(1, 0, 0, NUM_LAYERS, NUM_LAYERS, tied_embeddings=False, column=(0, 2))
    arena = Arena(layout(), role, memory, num_slots=1 + num_ahead)
    exchange = ColumnExchange(cast(Any, None), track, torch.float32, num_ahead, ColumnMeter())
    units = tuple(arena.places)
    columns = ColumnShares(arena, exchange, {i: [i] for i in range(len(units))})
    of_regrouping = cast(Any, FakePass(track.log))
    columns.begin(of_regrouping, of_regrouping)
    micro_batch(columns, units, recomputes=recomputes)
    micro_batch(columns, units, recomputes=recomputes)
    columns.finish()
    return track.log


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_the_order_does_not_depend_on_what_has_arrived(recomputes: bool, num_ahead: int) -> None:
    settings = {"recomputes": recomputes, "num_ahead": num_ahead}
    assert logged(are_done=True, **settings) == logged(are_done=False, **settings)  # type: ignore[arg-type]


def test_calls_of_two_micro_batches() -> None:
    found = [each for each in logged(are_done=False) if each.split()[0] in ("gather", "scatter")]
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
    log = logged(are_done=False, recomputes=recomputes)
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
