"""Frozen parameters never change, and all others are updated as on one process, in every strategy.

A model provider freezes the embedding and the first layer by their names in its stage: on other
stages these belong to another layer, which is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.hydraulis.checkpoint.inspect import inspect_folder
from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint
from megatron.hydraulis.runtime import arena, strategy_runtime
from megatron.hydraulis.runtime.arena import PlacedRun
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.regroup import Regrouper
from megatron.hydraulis.transfer.canonical import UNIT_ALIGNMENT_ELEMENTS
from megatron.hydraulis.transfer.role import ParameterRun
from tests.distributed.test_context_combinations import combined
from tests.distributed.test_shared_weights import another_slot, freed_slot_read, poisoned
from tests.support.broken_rules import Rule, run_broken
from tests.support.checkpoints import make_engine, save_new, whole_tensors
from tests.support.comparison import assert_same, wrong_tensors
from tests.support.gloo_pool import WorkerFailure, pool_of
from tests.support.law import (
    FP64_TOLERANCE,
    LENGTHS,
    MAIN_MODEL,
    changing,
    check_law,
    in_turns,
    law_job,
)
from tests.support.models import (
    Job,
    RankRun,
    SmallModel,
    assemble,
    build_engine,
    most_of_every_layer,
    packs_of_rank,
    rank_run,
    run_job,
    use_fp64_loss,
)
from tests.support.overlap_probes import bytes_of_iterations
from tests.support.reference import ReferenceRun, initial_parameters, run_reference

pytestmark = pytest.mark.distributed

FROZEN = ("embedding.", "decoder.layers.0.")
MODEL = replace(MAIN_MODEL, frozen=FROZEN)
PARTLY = replace(MAIN_MODEL, qk_layernorm=True, frozen=most_of_every_layer(4))
STRATEGIES = ("2*tp2", "2*pp2", "2*cp2", "cp4~", "tp2+pp2")
"""One for each iteration, twice."""
WITH_SHARED_WEIGHTS = ("2*tp2", "tp2cp2fs", "cp2fs+pp2", "cp4~fs", "2*cp2fs")
NUM_ITERATIONS = 10


def frozen_job(
    model: SmallModel,
    strategies: tuple[str, ...] = STRATEGIES,
    *,
    recomputes: bool = False,
    repeats: int = 1,
) -> Job:
    """Ten iterations of the law's batches, a strategy for as many in a row before the next one."""
    num_strategies = len(strategies)
    turns = [((i // repeats) % num_strategies, i % len(LENGTHS)) for i in range(NUM_ITERATIONS)]
    job = in_turns(model, 4, strategies, turns)
    if recomputes:
        texts = tuple("+".join(f"{each}r" for each in text.split("+")) for text in strategies)
        job = replace(job, strategies=texts)
    return job


@cache
def reference(model: SmallModel) -> ReferenceRun:
    found: ReferenceRun = pool_of(1).run(run_reference, frozen_job(model))[0]
    return found


def check(job: Job, runs: list[RankRun]) -> None:
    """The trained tensors are the reference's, the frozen ones those of the beginning."""
    expected = reference(job.model)
    before = initial_parameters(job.model, job.seed)
    for i in range(NUM_ITERATIONS):
        for kind in ("gradients", "parameters"):
            found = assemble(runs, [getattr(run, kind)[i] for run in runs])
            what = f"iteration {i}: {kind}"
            assert_same(found, getattr(expected, kind)[i], FP64_TOLERANCE, what)
        for name, value in assemble(runs, [run.frozen[i] for run in runs], frozen=True).items():
            assert name.startswith(job.model.frozen)
            wanted = before[name].numpy()
            np.testing.assert_array_equal(value[: wanted.shape[0]], wanted)
        for run in runs:
            np.testing.assert_allclose(run.losses[i], expected.losses[i], rtol=1e-12)
    names = {runs[0].names[part.parameter] for run in runs for part in run.frozen_rectangles}
    assert names == {name for name in before if name.startswith(job.model.frozen)}


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "recomputed"])
def test_every_strategy_gives_the_same_update_and_leaves_what_is_frozen(recomputes: bool) -> None:
    job = frozen_job(MODEL, recomputes=recomputes)
    check(job, pool_of(4).run(run_job, job))


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("model", [MODEL, PARTLY], ids=["a layer", "a part of every layer"])
def test_columns_share_what_is_frozen(model: SmallModel, recomputes: bool) -> None:
    job = frozen_job(model, WITH_SHARED_WEIGHTS, recomputes=recomputes)
    check(job, pool_of(4).run(run_broken, job, poisoned))


def evaluated_between(job: Job) -> RankRun:
    """On every rank: the job, with an evaluation by the last strategy before every iteration."""
    train = RuntimeEngine.train_step

    def step(self: RuntimeEngine, name: str, packs: Any, *others: Any, **named: Any) -> Any:
        self.evaluate(self.pool.strategies[-1].name, [], make_forward_step())
        return train(self, name, packs, *others, **named)

    with patch.object(RuntimeEngine, "train_step", step):
        return run_job(job)


@pytest.mark.parametrize(
    ("run", "strategies"),
    [
        (run_job, STRATEGIES),
        (evaluated_between, STRATEGIES),
        (evaluated_between, WITH_SHARED_WEIGHTS),
    ],
)
def test_what_is_held_is_right_when_strategies_stay(run: Any, strategies: tuple[str, ...]) -> None:
    job = frozen_job(MODEL, strategies, repeats=2)
    check(job, pool_of(4).run(run, job))


@pytest.mark.parametrize("text", ["tp2+2*tp1", "tp2cp2fs"])
def test_bytes_are_those_of_what_is_trained_where_strategies_stay(text: str) -> None:
    job = law_job(4, text, MODEL)
    for found in pool_of(4).run(bytes_of_iterations, job):
        (_, first, _), (_, second, _), (_, third, _) = found
        assert [exchanged for _, exchanged, _ in found] == [counted for *_, counted in found]
        assert second == third < first


FIRST_HALF = ("embedding.", "decoder.layers.0.", "decoder.layers.1.")
STAGES = {
    "first stage": (FIRST_HALF, 2, "pp2"),
    "first stage, recomputed": (FIRST_HALF, 2, "pp2r"),
    "stage between": (("decoder.layers.1.", "decoder.layers.2."), 3, "pp3:1,2,1"),
    "stage between, recomputed": (("decoder.layers.1.", "decoder.layers.2."), 3, "pp3r:1,2,1"),
    "output layer": (("output_layer.",), 2, "tp2"),
    "all but the last norm": (("embedding.", "decoder.layers.", "output_layer."), 4, "tp2pp2r"),
}


@pytest.mark.parametrize("name", STAGES)
def test_whole_stages_may_be_frozen(name: str) -> None:
    frozen, num_ranks, text = STAGES[name]
    check_law(law_job(num_ranks, text, replace(MAIN_MODEL, frozen=frozen)), num_ranks)


@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2fs"])
def test_a_tied_embedding_may_be_frozen(text: str) -> None:
    model = replace(MAIN_MODEL, frozen=("embedding.",), tied=True)
    check_law(law_job(2, text, model), 2)


EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.02,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(
    "strategies",
    [("cp4ep4", "tp2cp2ep2r", "4*tp1"), ("cp4fsep2", "tp2cp2fsep4", "tp2cp2fsr")],
    ids=["whole", "shared"],
)
def test_experts_and_their_router_may_be_frozen(strategies: tuple[str, ...]) -> None:
    model = replace(MAIN_MODEL, num_layers=2, variant=tuple(EXPERTS.items()))
    model = replace(model, frozen=("embedding.", "decoder.layers.0.mlp."))
    check_law(changing(strategies, model), 4)


def test_selective_recompute() -> None:
    modules = ("core_attn", "mlp")
    recomputed = combined(PARTLY, granularity="selective", modules=modules)
    job = frozen_job(PARTLY, WITH_SHARED_WEIGHTS)
    check(job, pool_of(4).run(run_job, replace(job, model=recomputed)))


def losses_without_optimizer(job: Job) -> list[float]:
    """On every rank: of the first batch by every strategy, twice."""
    use_fp64_loss()
    engine = build_engine(replace(job, settings=cast(Any, None)))
    losses = []
    for i in range(NUM_ITERATIONS):
        strategy = engine.pool.strategies[job.schedule[i]]
        packs = packs_of_rank(
            strategy, job.assignments[i], job.batches[i], engine.rank, weights=job.weights_of(i)
        )
        losses.append(engine.evaluate(strategy.name, packs, make_forward_step()).mean)
    assert engine.shards.parameters.numel() == 0
    return losses


def test_columns_share_weights_without_an_optimizer() -> None:
    job = frozen_job(MODEL, WITH_SHARED_WEIGHTS, repeats=2)
    of_ranks = pool_of(4).run(losses_without_optimizer, job)
    for i in range(0, NUM_ITERATIONS, 3):  # with the first batch
        np.testing.assert_allclose(
            [each[i] for each in of_ranks], reference(MODEL).losses[0], rtol=1e-12
        )


@pytest.mark.parametrize(
    "options",
    [{"ranks_per_node": 2}, {"overlap": False}, {"owners_for": "2*tp2"}],
    ids=["two nodes", "no overlap", "owners"],
)
def test_regrouping_of_every_kind(options: dict[str, Any]) -> None:
    check_law(replace(changing(("2*tp2", "tp2+2*tp1", "4*tp1"), MODEL), **options), 4)


@contextmanager
def _frozen_buckets_are_scattered() -> Iterator[None]:
    make = Regrouper.__init__

    def with_all_calls(self: Regrouper, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.scatter_calls = self.calls

    with patch.object(Regrouper, "__init__", with_all_calls):
        yield


@contextmanager
def _frozen_embeddings_need_no_gradient() -> Iterator[None]:
    with patch.object(strategy_runtime, "_requiring_gradient", lambda *_: None):
        yield


@contextmanager
def _frozen_runs_overlap_trained_ones() -> Iterator[None]:
    def placed(run: ParameterRun, start: int, start_in_slot: int) -> PlacedRun:
        return PlacedRun(run, start, 0 if run.is_frozen else start_in_slot)

    with patch.object(arena, "PlacedRun", placed):
        yield


BROKEN: dict[str, tuple[Rule, int, str, SmallModel]] = {
    "frozen buckets are scattered": (_frozen_buckets_are_scattered, 4, "2*tp2", MODEL),
    "embeddings need no gradient": (_frozen_embeddings_need_no_gradient, 2, "pp2r", MODEL),
    "layers in slots of others": (another_slot, 2, "cp2fs", PARTLY),
    "a freed slot is read": (freed_slot_read, 2, "cp2fs", PARTLY),
    "frozen runs overlap trained ones": (_frozen_runs_overlap_trained_ones, 2, "cp2fs", PARTLY),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    rule, num_ranks, text, model = BROKEN[name]
    runs = pool_of(num_ranks).run(run_broken, law_job(num_ranks, text, model), rule)
    found = assemble(runs, [run.gradients[0] for run in runs])
    wrong = wrong_tensors(found, reference(model).gradients[0], FP64_TOLERANCE)
    assert any(name.startswith("decoder.layers.1.") for name in wrong)
    assert any(not error <= 1e-3 for error in wrong.values())  # a poisoned one is NaN


def sizes_after_a_step(job: Job) -> None:
    """On every rank: nothing of a frozen parameter but its values in bf16."""
    engine = build_engine(job)
    step = make_forward_step()
    packs = packs_of_rank(
        engine.pool.strategies[0], job.assignments[0], job.batches[0], engine.rank
    )
    engine.train_step(job.strategies[0], packs, step)
    shards, optimizer = engine.shards, engine.optimizer
    runtime = engine.runtime_of(job.strategies[0])
    assert runtime.model is not None
    assert runtime.arena is not None
    frozen = [b for b in engine.layout.buckets if b.unit.is_frozen]
    num_frozen = sum(stop - start for start, stop in (b.shard_range(engine.rank) for b in frozen))
    num_owned = sum(np.subtract(*b.shard_range(engine.rank)[::-1]) for b in engine.layout.buckets)
    assert (shards.frozen.dtype, shards.frozen.numel()) == (torch.bfloat16, num_frozen)
    flats = (shards.parameters, optimizer.exp_avg, optimizer.exp_avg_sq, shards.gradients)
    assert {flat.numel() for flat in flats} == {num_owned - num_frozen}
    parameters: list[Any] = list(runtime.model.model.parameters())
    for parameter in parameters:
        assert hasattr(parameter, "main_grad") == parameter.requires_grad
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    assert num_trained < sum(p.numel() for p in parameters)
    alignment = UNIT_ALIGNMENT_ELEMENTS * len(runtime.arena.places)
    assert num_trained <= runtime.num_gradients <= num_trained + alignment


@pytest.mark.parametrize(("text", "model"), [("tp2", MODEL), ("cp2fs", PARTLY)])
def test_a_frozen_parameter_has_no_gradient_moments_or_fp32_copy(
    text: str, model: SmallModel
) -> None:
    """Half of the layers fit in slots of gradients: with the shares they take as much as all."""
    job = law_job(2, text, replace(model, dtype=torch.bfloat16))
    pool_of(2).run(sizes_after_a_step, job)


def freeze_by_rank(job: Job) -> None:
    """Rank 1 freezes another parameter than rank 0."""
    number = torch.distributed.get_rank()
    build_engine(replace(job, model=replace(MODEL, frozen=(f"decoder.layers.{number}.mlp.",))))


def test_ranks_that_freeze_others_are_refused() -> None:
    with pytest.raises(WorkerFailure, match=r"rank 1 differs from rank 0 in 4 of .*layers\.0\.mlp"):
        pool_of(2).run(freeze_by_rank, law_job(2, "2*tp1", MODEL))


def test_something_must_be_trained() -> None:
    with pytest.raises(WorkerFailure, match="trained but all 27 are frozen"):
        pool_of(2).run(build_engine, law_job(2, "2*tp1", replace(MODEL, frozen=("",))))


def loaded(model: SmallModel, text: str, path: str, *, with_optimizer: bool) -> RankRun:
    """On every rank: an engine of other weights loads a checkpoint."""
    engine = make_engine(model.definition(), [text], seed=123)
    wanted = {"vocab_size": model.vocab_size}
    load_checkpoint(Path(path), engine, wanted, with_optimizer=with_optimizer)
    values = [engine.shards.parameters.numpy().copy()]
    run = rank_run(engine, [], values, [], [])
    return replace(run, frozen=(engine.shards.frozen.double().numpy(),))


SAVED = replace(MAIN_MODEL, dtype=torch.float32, frozen=("embedding.", "decoder.layers.0.mlp."))
OTHER = replace(SAVED, frozen=("embedding.", "decoder.layers.1.mlp.linear_fc1."))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("frozen")
    pool_of(2).run(save_new, SAVED, ("tp2", "pp2"), str(root))
    return root / "iter_0000003"


class TestCheckpoints:
    def test_the_optimizer_has_nothing_of_frozen_parameters(self, saved: Path) -> None:
        tensors = whole_tensors(saved)
        assert not any(torch.isnan(tensor).any() for tensor in tensors.values())
        of_layer = [f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2)]
        frozen = ["embedding.word_embeddings.weight", *of_layer]
        for prefix in ("param", "exp_avg", "exp_avg_sq"):
            of_optimizer = {key for key in tensors if key.startswith(f"optimizer.state.{prefix}.")}
            assert not of_optimizer & {f"optimizer.state.{prefix}.{key}" for key in frozen}
            assert len(of_optimizer) == 27 - len(frozen)
        (found,) = inspect_folder(saved).checkpoints
        num_frozen = sum(tensors[key].numel() for key in frozen)
        assert (found.complete, found.num_frozen_parameters) == (True, num_frozen)

    def test_an_export_reads_frozen_and_trained_layers(self, saved: Path) -> None:
        checkpoint, wanted = StoredCheckpoint(saved), initial_parameters(SAVED, 7)
        for layer in range(SAVED.num_layers):
            found = checkpoint.read("mlp.linear_fc1.weight", layer)
            assert torch.equal(found, wanted[f"decoder.layers.{layer}.mlp.linear_fc1.weight"])

    def test_others_are_named_and_refused(self, saved: Path) -> None:
        message = (
            r"of 27 1 are frozen only here: decoder\.layers\.1\.mlp\.linear_fc1\.weight; 2 are "
            r"frozen only there: decoder\.layers\.0\.mlp\..* --no-load-optim"
        )
        with pytest.raises(WorkerFailure, match=message):
            pool_of(2).run(partial(loaded, with_optimizer=True), OTHER, "tp2", str(saved))

    def test_without_the_optimizer_others_may_be_frozen(self, saved: Path) -> None:
        wanted = {name: value.numpy() for name, value in initial_parameters(SAVED, 7).items()}
        load = partial(loaded, with_optimizer=False)
        for model in (OTHER, replace(OTHER, frozen=())):
            runs = pool_of(2).run(load, model, "pp2", str(saved))
            found = assemble(runs, [run.parameters[0] for run in runs])
            frozen = assemble(runs, [run.frozen[0] for run in runs], frozen=True)
            assert set(frozen) == {name for name in wanted if name.startswith(model.frozen or "-")}
            assert_same(found | frozen, wanted, 0.0)
