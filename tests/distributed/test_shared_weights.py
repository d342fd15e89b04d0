"""Columns that share their weights give the same update as one process, in every combination."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.runtime.columns import ColumnShares
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.runtime.track import StagingSlot, Step
from megatron.hydraulis.strategy import Replica
from megatron.hydraulis.transfer.canonical import Unit
from tests.distributed.test_context_combinations import combined
from tests.distributed.test_experts import MODELS as EXPERT_MODELS
from tests.distributed.test_latent_attention import MODELS as LATENT_MODELS
from tests.support.broken_rules import run_broken
from tests.support.evaluation_probes import check_evaluation
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    BIASED_MODEL,
    GPT2_LIKE,
    MAIN_MODEL,
    SPLITS,
    assert_law,
    changing,
    check_law,
    law_cases,
    law_job,
    waves,
    wrong_gradients,
)
from tests.support.models import Job, SmallModel, build_engine, run_job
from tests.support.overlap_probes import spans_of_job

pytestmark = pytest.mark.distributed

STRATEGIES = [
    (2, "cp2fs"),
    (3, "cp3fs"),
    (4, "cp4fs"),
    (4, "tp2cp2fs"),
    (4, "2*cp2fs"),
    (4, "cp2fs@2,0+pp2"),
    (4, "cp2fs+tp2"),
]
MODELS = {
    "tied": replace(MAIN_MODEL, tied=True),
    "tied, no sequence parallelism": replace(MAIN_MODEL, tied=True, sequence_parallel=False),
    "two query groups, norms of queries": replace(MAIN_MODEL, num_groups=2, qk_layernorm=True),
    "biases and learned positions": replace(BIASED_MODEL, num_layers=3),
    "GPT-2 like, no sequence parallelism": replace(GPT2_LIKE, sequence_parallel=False),
    "experts": EXPERT_MODELS["every second layer dense"],
    "experts, recomputed": EXPERT_MODELS["balanced sigmoid scores"],
    "latents": LATENT_MODELS["one projection of queries"],
}
WHOLE_EXPERTS = (
    ("cp4fsep2", "tp2cp2fsep4", "2*cp2fsep2"),
    ("tp2cp2fsep2@3,1,0,2", "cp4ep2", "cp4fsep4"),
    ("cp2fsep2+tp2ep2", "tp2cp2fs", "cp4fsep2@2,0,3,1"),
)
"""One for each iteration; one, two or four ranks hold the same experts."""
ALL_SPLITS = list(SPLITS.values())
RECOMPUTE: dict[str, dict[str, Any]] = {
    "every layer": {"granularity": "full", "method": "uniform", "num_layers_recomputed": 1},
    "two layers together": {"granularity": "full", "method": "uniform", "num_layers_recomputed": 2},
    "some layers": {"granularity": "full", "method": "block", "num_layers_recomputed": 2},
    "selective": {"granularity": "selective", "modules": ("core_attn", "mlp")},
}


def shared_waves(model: SmallModel = MAIN_MODEL, ep: int = 1) -> Job:
    """Waves of all splits, on columns that share their weights."""
    return replace(waves(ALL_SPLITS, model), strategies=(f"cp4~fsep{ep}",))


@contextmanager
def poisoned() -> Iterator[None]:
    """A slot is NaN from the time when its unit is freed until the next one has arrived."""
    right = ColumnShares._gather_steps

    def steps(self: ColumnShares, unit: Unit, slot: StagingSlot) -> Iterator[Step]:
        for whole, _, _ in self._shared(unit, gathers=True):
            whole.fill_(torch.nan)
        yield from right(self, unit, slot)

    with patch.object(ColumnShares, "_gather_steps", steps):
        yield


@pytest.mark.parametrize(("num_ranks", "text"), STRATEGIES)
def test_every_strategy_gives_the_same_update(num_ranks: int, text: str) -> None:
    job = law_job(num_ranks, text, MAIN_MODEL)
    assert_law(job, pool_of(num_ranks).run(run_broken, job, poisoned))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_the_same_update(name: str) -> None:
    check_law(changing(("tp2cp2fs", "cp4fs", "tp2+cp2fs"), MODELS[name]), 4)


@pytest.mark.parametrize(("name", "strategies"), law_cases(EXPERT_MODELS, WHOLE_EXPERTS))
def test_whole_experts_give_the_same_update(name: str, strategies: tuple[str, ...]) -> None:
    job = changing(strategies, EXPERT_MODELS[name])
    assert_law(job, pool_of(4).run(run_broken, job, poisoned))


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize(
    "name", ["every second layer dense", pytest.param("recomputed", marks=pytest.mark.nightly)]
)
def test_whole_experts_give_the_same_update_in_waves(name: str, ep: int) -> None:
    job = shared_waves(EXPERT_MODELS[name], ep)
    assert_law(job, pool_of(4).run(run_broken, job, poisoned))


def test_experts_and_latents_are_shared_at_the_same_time() -> None:
    model = replace(
        MODELS["latents"], variant=MODELS["latents"].variant + MODELS["experts"].variant
    )
    check_law(changing(("tp2cp2fsep2", "cp4fsep2", "cp4fsep4"), model), 4)


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["tp4cp2fsep2", "tp2cp4fsep4", "cp8~fsep2"])
def test_eight_ranks_share_experts(text: str) -> None:
    """Holders of the same experts may have several tp ranks."""
    check_law(law_job(8, text, EXPERT_MODELS["top 2, gathered"]), 8)


@pytest.mark.parametrize("num_layers_ahead", [0, 1, 2, 9])
def test_groups_may_change_from_micro_batch_to_micro_batch(num_layers_ahead: int) -> None:
    job = replace(shared_waves(), num_layers_ahead=num_layers_ahead)
    assert_law(job, pool_of(4).run(run_broken, job, poisoned))


def test_every_model_trains_in_waves() -> None:
    check_law(shared_waves(MODELS["experts"]), 4)


def test_fp32() -> None:
    check_law(shared_waves(replace(MAIN_MODEL, dtype=torch.float32)), 4)


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute(name: str) -> None:
    model = replace(MAIN_MODEL, tied=name == "every layer")
    recomputed = combined(model, cp_comm_type="all_gather", **RECOMPUTE[name])
    for job in (shared_waves(model), law_job(4, "tp2cp2fs", model)):
        assert_law(job, pool_of(4).run(run_job, replace(job, model=recomputed)))


def test_strategies_with_and_without_shares_alternate() -> None:
    jobs = [law_job(4, text, MAIN_MODEL) for text in ("cp4fs", "tp2cp2", "cp2fs+pp2:3,1")]
    plain = changing(tuple(job.strategies[0] for job in jobs), MAIN_MODEL)
    for job in (plain, replace(plain, knows_next=False), replace(plain, overlap=False)):
        check_law(job, 4)
    check_law(replace(plain, ranks_per_node=2, owners_for="cp4fs"), 4)


def test_evaluation_changes_nothing_and_agrees_with_training() -> None:
    job = changing(("cp4fs", "tp2cp2fs", "2*cp2fs"), MAIN_MODEL)
    check_evaluation(job)


class ExpectedError(Exception):
    """Raised in a micro-batch on all ranks."""


def raising(forward_step: ForwardStep, where: str) -> ForwardStep:
    """A forward step that raises in the second micro-batch, at a place."""
    is_first = True

    def step(batches: Iterator[Any], model: torch.nn.Module) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return forward_step(batches, model)
        if where == "data":
            raise ExpectedError
        if where == "layer":
            layers: Any = model.decoder.layers  # type: ignore[union-attr]
            hook = layers[0].mlp.register_forward_pre_hook(fail)
            try:
                return forward_step(batches, model)
            finally:
                hook.remove()
        output, _ = forward_step(batches, model)
        return output, fail

    def fail(*arguments: Any) -> Any:
        raise ExpectedError

    return step


@contextmanager
def failing(where: str) -> Iterator[None]:
    """Every call fails first, as does an evaluation after every update, while columns are late."""
    right, right_update = RuntimeEngine.forward_backward, RuntimeEngine.optim_step
    steps = {name: getattr(ColumnShares, name) for name in ("_gather_steps", "_scatter_steps")}
    last: tuple[Any, ...] = ()
    is_late = False

    def late(name: str) -> Any:
        def found(self: ColumnShares, unit: Unit, slot: StagingSlot) -> Iterator[Step]:
            for works in steps[name](self, unit, slot):
                time.sleep(0.03 * is_late)  # posted, and not complete
                yield works
                time.sleep(0.03 * is_late)  # complete, and not added

        return found

    def forward_backward(
        self: RuntimeEngine, name: str, batches: Any, step: ForwardStep, **named: Any
    ) -> None:
        nonlocal last, is_late
        last, is_late = (name, batches, raising(step, where)), True
        with pytest.raises(ExpectedError):
            right(self, name, batches, raising(step, where))
        self.abandon_gradients()
        is_late = False
        right(self, name, batches, step, **named)

    def optim_step(self: RuntimeEngine, **named: Any) -> Any:
        nonlocal is_late
        outcome = right_update(self, **named)
        is_late = True
        with pytest.raises(ExpectedError):
            self.evaluate(*last)
        is_late = False
        return outcome

    with (
        patch.multiple(ColumnShares, **{name: late(name) for name in steps}),
        patch.multiple(RuntimeEngine, forward_backward=forward_backward, optim_step=optim_step),
    ):
        yield


@pytest.mark.parametrize("where", ["data", "layer", "loss"])
@pytest.mark.parametrize("changes", [False, True], ids=["waves", "changing strategies"])
def test_an_error_leaves_nothing_on_its_way(where: str, *, changes: bool) -> None:
    job = changing(("cp4fs", "tp2cp2fs"), MAIN_MODEL) if changes else shared_waves(MAIN_MODEL)
    assert_law(job, pool_of(4).run(run_broken, job, partial(failing, where)))


def test_gathers_and_scatters_are_recorded() -> None:
    job = law_job(2, "cp2fs", MAIN_MODEL)
    late_rank = 1
    for iteration, assignment in zip(
        pool_of(2).run(spans_of_job, job, late_rank)[0], job.assignments, strict=True
    ):
        found = Counter((span.name, span.detail.get("unit")) for span in iteration)
        num_micro_batches = len(assignment.replicas[0])
        for unit in (f"layer {number}" for number in range(MAIN_MODEL.num_layers)):
            assert found["column gather", unit] >= num_micro_batches
            assert found["column scatter", unit] == num_micro_batches
        # The other column is late for the first gather.
        assert any(span.name == "column gather wait" for span in iteration)


def bytes_of_arenas(job: Job) -> list[int]:
    """On every rank: of each strategy of the job."""
    engine = build_engine(job)
    found = []
    for strategy in engine.pool.strategies:
        runtime = engine.runtime_of(strategy.name)
        assert runtime.arena is not None
        item_bytes = engine.dtype.itemsize, engine.shards.gradients.element_size()
        counts = runtime.num_parameters, runtime.num_gradients
        found.append(sum(a * b for a, b in zip(item_bytes, counts, strict=True)))
    return found


def test_arenas_hold_a_share_and_slots() -> None:
    """Of 16 layers with tied embeddings, four columns hold a quarter, and slots of two layers."""
    model = replace(MAIN_MODEL, num_layers=16, tied=True, dtype=torch.float32)
    job = replace(law_job(4, "cp4", model), strategies=("cp4", "cp4fs"))
    for whole, shared in pool_of(4).run(bytes_of_arenas, job):
        embedding, slots = model.padded_vocab_size * model.hidden_size, 2 / model.num_layers
        of_layers = whole / 8 - embedding
        expected = whole / 8 / 4 + slots * of_layers + embedding
        assert shared / 8 == pytest.approx(expected, rel=0.03)


# --- broken on purpose ---


@contextmanager
def another_slot() -> Iterator[None]:
    """Layers are gathered into the slots of others."""
    right = ColumnShares.__init__

    def init(self: ColumnShares, arena: Arena, *others: Any) -> None:
        right(self, arena, *others)
        layers = [unit for unit in arena.weight_slots if unit.is_layer]
        moved = [*layers[1:], layers[0]]
        slots = {unit: arena.weight_slots[other] for unit, other in zip(layers, moved, strict=True)}
        arena.weight_slots.update(slots)

    with patch.object(ColumnShares, "__init__", init):
        yield


@contextmanager
def freed_slot_read() -> Iterator[None]:
    """Weights are not gathered again before the backward."""
    right = ColumnShares._fetch

    def fetch(self: ColumnShares, units: Sequence[Unit]) -> None:
        if not self._is_backward:
            right(self, units)

    with patch.object(ColumnShares, "_fetch", fetch):
        yield


@contextmanager
def scatter_left_out() -> Iterator[None]:
    right = ColumnShares._scatter_all_but

    def scatter(self: ColumnShares, unit: Unit | None) -> None:
        if unit == Unit.layer(1):
            self._has_gradient.pop(Unit.layer(2), None)
        right(self, unit)

    with patch.object(ColumnShares, "_scatter_all_but", scatter):
        yield


@pytest.mark.parametrize("rule", [another_slot, freed_slot_read, scatter_left_out])
def test_broken_rules_are_found(rule: Any) -> None:
    job = law_job(4, "tp2cp2fs", MAIN_MODEL)
    errors = wrong_gradients(job, pool_of(4).run(run_broken, job, rule))
    assert any(not error <= 1e-3 for error in errors.values()), errors  # a poisoned one is NaN


@contextmanager
def experts_gathered_in_another_group() -> Iterator[None]:
    """Two of four ranks share experts that one of them does not hold."""
    groups = ((0, 1, 2, 3), (0, 3), (1, 2))
    with patch.object(Replica, "column_groups", property(lambda self: groups)):
        yield


@contextmanager
def scatter_of_experts_left_out() -> Iterator[None]:
    right = ColumnShares._shared

    def shared(self: ColumnShares, unit: Unit, *, gathers: bool) -> Iterator[Any]:
        runs = list(right(self, unit, gathers=gathers))
        yield from runs if gathers else runs[:1]

    with patch.object(ColumnShares, "_shared", shared):
        yield


@pytest.mark.parametrize("rule", [experts_gathered_in_another_group, scatter_of_experts_left_out])
def test_broken_rules_of_experts_are_found(rule: Any) -> None:
    job = law_job(4, "cp4fsep2", EXPERT_MODELS["every second layer dense"])
    errors = wrong_gradients(job, pool_of(4).run(run_broken, job, rule))
    assert any(not error <= 1e-3 for error in errors.values()), errors
