"""The same batch gives the same update under every strategy: gradients and parameters, not losses.

Each case runs three optimizer steps on forked gloo workers and compares every whole tensor with a
one-process run of upstream's model, sequence by sequence, that shares nothing with the engine but
the initial weights. T is 8 throughout: above every tp in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.runtime import executor
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import loss_func, make_forward_step
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.canonical import Contribution
from tests.support import models
from tests.support.broken_rules import Rule, described, forgotten, wrong_with
from tests.support.comparison import relative_errors
from tests.support.gloo_pool import WorkerFailure, pool_of
from tests.support.law import (
    GPT2_LIKE,
    MAIN_MODEL,
    NUM_ATOMS,
    SHORT_MODEL,
    SPLITS,
    changing,
    check_law,
    law_job,
    law_reference,
    model_for,
    waves,
    wrong_gradients,
)
from tests.support.models import (
    Job,
    RankRun,
    SmallModel,
    assemble,
    build_engine,
    packs_of_rank,
    run_initial_weights,
    run_job,
)
from tests.support.reference import initial_parameters

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class PrecisionProbe:
    """Dtypes after one step, by name; what this rank holds or owns."""

    parameter_dtypes: set[str]
    gradient_dtypes: set[str]
    shard_dtypes: set[str]
    optimizer_state_dtypes: set[str]
    num_micro_batches: int
    accumulation_error: float
    """Relative error (2-norm) of the gradient of all micro-batches together, against the fp32 sum
    of what each of them gives alone."""


@dataclass(frozen=True)
class UntrainedProbe:
    """Four iterations: trained, no sequences, all masked, trained."""

    updated: tuple[bool, ...]
    trained_tokens: tuple[int, ...]
    moved_by_training: bool
    unchanged_by_missing: bool
    unchanged_by_masked: bool
    next_update_is_the_same: bool
    """As that of a run without the two iterations between."""


def probe_precision(job: Job) -> PrecisionProbe:
    """On every rank: the first iteration of the job, one replica over all ranks."""
    engine = build_engine(job)
    name = job.strategies[0]
    packs = _packs(engine, job, 0)
    step = make_forward_step()
    engine.forward_backward(name, packs, step)
    engine.discard_gradients()
    together = engine.shards.gradients.clone()
    alone = torch.zeros_like(together)
    for pack in packs:
        engine.forward_backward(name, [pack], step)
        engine.discard_gradients()
        alone += engine.shards.gradients
    engine.train_step(name, packs, step)
    runtime = engine.runtime_of(name)
    assert runtime.model is not None
    assert runtime.arena is not None
    parameters: list[Any] = list(runtime.model.model.parameters())
    gradients = [p.main_grad for p in parameters]
    states = [engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq]
    return PrecisionProbe(
        parameter_dtypes={str(p.dtype) for p in parameters},
        gradient_dtypes={str(g.dtype) for g in gradients},
        shard_dtypes={str(engine.shards.parameters.dtype), str(engine.shards.gradients.dtype)},
        optimizer_state_dtypes={str(value.dtype) for value in states},
        num_micro_batches=len(packs),
        accumulation_error=((together - alone).norm() / alone.norm()).item(),
    )


def probe_untrained_iterations(job: Job) -> UntrainedProbe:
    """On every rank: two iterations of the job, with two between that have nothing to train."""
    name = job.strategies[0]
    step = make_forward_step()
    plain = build_engine(job)
    for i in range(2):
        plain.train_step(name, _packs(plain, job, i), step)

    engine = build_engine(job)
    start = _snapshot(engine)
    outcomes = [engine.train_step(name, _packs(engine, job, 0), step)]
    trained = _snapshot(engine)
    outcomes.append(engine.train_step(name, [], step))
    after_missing = _snapshot(engine)
    masked = [_masked(batch) for batch in _packs(engine, job, 0)]
    outcomes.append(engine.train_step(name, masked, step))
    after_masked = _snapshot(engine)
    outcomes.append(engine.train_step(name, _packs(engine, job, 1), step))
    return UntrainedProbe(
        updated=tuple(outcome.updated for outcome in outcomes),
        trained_tokens=tuple(outcome.loss.trained_tokens for outcome in outcomes),
        moved_by_training=not torch.equal(start[0], trained[0]),
        unchanged_by_missing=_equal(trained, after_missing),
        unchanged_by_masked=_equal(trained, after_masked),
        next_update_is_the_same=_equal(_snapshot(engine), _snapshot(plain)),
    )


def _packs(engine: RuntimeEngine, job: Job, iteration: int) -> list[PackedBatch]:
    strategy = engine.pool.strategies[0]
    return packs_of_rank(strategy, job.assignments[iteration], job.batches[iteration], engine.rank)


def _masked(batch: PackedBatch) -> PackedBatch:
    return dataclasses.replace(batch, weights=torch.zeros_like(batch.weights), trained_tokens=0)


def _snapshot(engine: RuntimeEngine) -> list[torch.Tensor]:
    optimizer = engine.optimizer
    states = (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.num_steps)
    return [state.clone() for state in (engine.shards.parameters, *states)]


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@contextmanager
def _mean_of_each_micro_batch() -> Iterator[None]:
    def mean_loss(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, num_tokens, report = loss_func(mask, output)
        return loss / num_tokens, num_tokens, report

    with (
        patch.object(models, "make_forward_step", lambda: make_forward_step(mean_loss)),
        patch.object(executor, "check_loss_function", lambda *_, **__: True),
    ):
        yield


_REPLICATED = {"contribution": Contribution.REPLICATED}
_PARTIAL = {"contribution": Contribution.PARTIAL}
MUTATIONS: dict[str, Rule] = {
    "q/k norms replicated": partial(described, r"\.[qk]_layernorm\.", **_REPLICATED),
    "sequence-parallel norms replicated": partial(described, "layernorm", **_REPLICATED),
    "replicated biases summed": partial(described, r"fc2\.bias|position_emb", **_PARTIAL),
    "gate and up not cut apart": partial(described, "fc1", parts=()),
    "tied output end forgotten": partial(forgotten, r"^embedding\.", 1),
    "second cp rank forgotten": partial(forgotten, "", 1),
    "offset of second cp rank forgotten": partial(forgotten, "softmax_offset", 1),
    "mean of each micro-batch": _mean_of_each_micro_batch,
}


STRATEGIES = [
    (1, "tp1"),
    (2, "tp2"),
    (2, "pp2"),
    (2, "2*tp1"),
    (2, "tp1+idle"),
    (3, "tp2+tp1"),
    (3, "pp2+tp1"),
    (3, "tp2@2,0+tp1@1"),
    (3, "pp3:2,1,1"),
    (4, "pp2+tp2"),
    (4, "tp2@0,3+pp2:1,3@1,2"),
    (4, "tp2@0,3+pp2@2,1"),
    (4, "pp4"),
    (4, "tp2pp2"),
    (4, "4*tp1"),
    (4, "2*tp2"),
    (4, "tp4"),
    (4, "pp3:1,1,2+tp1"),
    (4, "tp2+2*idle"),
    (4, "tp2+2*tp1"),
]

FP32_STRATEGIES = [
    (1, ("tp1",)),
    (2, ("tp2", "pp2", "2*tp1")),
    (3, ("tp2+tp1", "pp2+tp1", "pp3:2,1,1")),
    (4, ("pp2+tp2", "tp2@0,3+pp2@2,1", "pp4")),
    (4, ("tp2pp2", "4*tp1", "2*tp2")),
    (4, ("tp4", "pp3:1,1,2+tp1", "tp2+2*tp1")),
]
"""Each for one iteration; not those with other placements or idle ranks, which compute the same as
another one."""

MODELS = {
    "no sequence parallelism": replace(SHORT_MODEL, sequence_parallel=False),
    "multi-head attention": replace(SHORT_MODEL, num_groups=8),
    "two query groups": replace(SHORT_MODEL, num_groups=2),
    "tied embeddings": replace(SHORT_MODEL, tied=True),
    "tied, wide padding": replace(SHORT_MODEL, tied=True, padded_vocab_size=96),
    "q/k norms": replace(SHORT_MODEL, qk_layernorm=True),
    "q/k norms, no sequence parallelism": replace(
        SHORT_MODEL, qk_layernorm=True, sequence_parallel=False
    ),
    "SwiGLU with biases": replace(SHORT_MODEL, bias=True),
    "GELU, biases, LayerNorm": replace(
        SHORT_MODEL, normalization="LayerNorm", swiglu=False, bias=True
    ),
    "adapters": replace(SHORT_MODEL, lora_targets=("all-linear",)),
    "GPT-2 like": GPT2_LIKE,
    "GPT-2 like, no sequence parallelism": replace(GPT2_LIKE, sequence_parallel=False),
}
MODEL_STRATEGIES = ("tp2pp2", "tp2@0,3+pp2@2,1", "tp2+2*tp1")
"""One for each iteration."""


@pytest.mark.parametrize(("num_ranks", "text"), STRATEGIES)
def test_every_strategy_gives_the_same_update(num_ranks: int, text: str) -> None:
    check_law(law_job(num_ranks, text), num_ranks)


@pytest.mark.parametrize(("num_ranks", "texts"), FP32_STRATEGIES)
def test_every_strategy_gives_the_same_update_in_fp32(
    num_ranks: int, texts: tuple[str, ...]
) -> None:
    model = replace(model_for(num_ranks, *texts), dtype=torch.float32)
    check_law(changing(texts, model, num_ranks), num_ranks)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_the_same_update(name: str) -> None:
    check_law(changing(MODEL_STRATEGIES, MODELS[name]), 4)


def test_t_from_another_strategy_of_the_pool_gives_the_same_update() -> None:
    job = replace(law_job(4, "tp2+2*tp1", num_atoms=None), extra_tp=("tp4",))
    check_law(job, 4)


def test_a_t_that_a_strategy_cannot_cut_is_refused() -> None:
    with pytest.raises(WorkerFailure, match=r"num_atoms is 3 but .* give a multiple of 2"):
        pool_of(2).run(run_initial_weights, law_job(2, "tp2", num_atoms=3))


def test_strategies_may_change_between_iterations() -> None:
    check_law(changing(("tp2+2*tp1", "tp2@0,3+pp2@2,1", "pp3:2,1,1+idle")), 4)


def test_replicas_get_unequal_numbers_of_micro_batches() -> None:
    """Check the jobs of this file."""
    for num_ranks, text in STRATEGIES:
        if len(Strategy.parse(text, num_ranks).replicas) > 1:
            job = law_job(num_ranks, text)
            counts = [{len(share) for share in a.replicas} for a in job.assignments]
            assert len(counts[0]) > 1, text
            assert 0 in counts[1], text
            assert all(
                sorted(i for share in a.replicas for pack in share for i in pack)
                == list(range(len(batch)))
                for a, batch in zip(job.assignments, job.batches, strict=True)
            )


class TestMutationsAreDetected:
    """The comparison detects every mutation, in the expected parameters."""

    def wrong(self, mutation: str, num_ranks: int, text: str, model: SmallModel) -> set[str]:
        return wrong_with(MUTATIONS[mutation], num_ranks, text, model)

    def test_the_unbroken_rules_pass(self) -> None:
        job = law_job(3, "tp2+tp1", MODELS["q/k norms, no sequence parallelism"])
        assert wrong_gradients(job, pool_of(3).run(run_job, job)) == {}

    def test_qk_norms_replicated(self) -> None:
        model = MODELS["q/k norms, no sequence parallelism"]
        wrong = self.wrong("q/k norms replicated", 3, "tp2+tp1", model)
        assert wrong == {
            f"decoder.layers.{layer}.self_attention.{norm}_layernorm.weight"
            for layer in range(model.num_layers)
            for norm in "qk"
        }

    def test_sequence_parallel_norms_replicated(self) -> None:
        wrong = self.wrong("sequence-parallel norms replicated", 3, "tp2+tp1", SHORT_MODEL)
        norms = {name for name in law_reference(SHORT_MODEL).gradients[0] if "layernorm" in name}
        assert wrong == norms

    def test_replicated_biases_summed(self) -> None:
        model = MODELS["GPT-2 like, no sequence parallelism"]
        wrong = self.wrong("replicated biases summed", 3, "tp2+tp1", model)
        assert "decoder.layers.0.mlp.linear_fc2.bias" in wrong
        assert "embedding.position_embeddings.weight" in wrong
        assert "decoder.layers.0.mlp.linear_fc1.bias" not in wrong

    def test_gate_and_up_not_cut_apart(self) -> None:
        self.wrong("gate and up not cut apart", 3, "tp2+tp1", SHORT_MODEL)

    def test_tied_output_end_forgotten(self) -> None:
        wrong = self.wrong("tied output end forgotten", 3, "pp2+tp1", MODELS["tied embeddings"])
        assert wrong == {"embedding.word_embeddings.weight"}

    def test_second_cp_rank_forgotten(self) -> None:
        wrong = self.wrong("second cp rank forgotten", 2, "cp2", MODELS["two query groups"])
        assert wrong == set(law_reference(MODELS["two query groups"]).gradients[0])

    @pytest.mark.parametrize("way", ["all_gather", "a2a"])
    def test_offset_of_second_cp_rank_forgotten(self, way: str) -> None:
        model = replace(SHORT_MODEL, variant=(("softmax_type", "learnable"),), cp_comm_type=way)
        wrong = self.wrong("offset of second cp rank forgotten", 2, "cp2", model)
        assert wrong == {
            f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset"
            for layer in range(model.num_layers)
        }

    def test_mean_of_each_micro_batch(self) -> None:
        wrong = self.wrong("mean of each micro-batch", 2, "2*tp1", SHORT_MODEL)
        assert wrong == set(law_reference(SHORT_MODEL).gradients[0])

    def test_every_mutation_has_a_test(self) -> None:
        tested = {name.removeprefix("test_") for name in dir(self) if name.startswith("test_")}
        names = {name.replace("/", "").replace(" ", "_").replace("-", "_") for name in MUTATIONS}
        assert names <= tested


class TestInitialWeights:
    """They depend only on the seed and the parameters' names."""

    def weights(self, num_ranks: int, text: str, **changes: object) -> dict[str, np.ndarray]:
        job = replace(law_job(num_ranks, text, SHORT_MODEL), **changes)  # type: ignore[arg-type]
        runs: list[RankRun] = pool_of(num_ranks).run(run_initial_weights, job)
        return assemble(runs, [run.parameters[0] for run in runs])

    def test_no_strategy_and_no_number_of_ranks_or_atoms_changes_a_bit(self) -> None:
        expected = self.weights(1, "tp1", num_atoms=1)
        cases = [(2, "pp2", 1), (3, "tp2+tp1", 2), (4, "tp4", 4), (4, "tp2@3,0+2*idle", NUM_ATOMS)]
        for num_ranks, text, num_atoms in cases:
            found = self.weights(num_ranks, text, num_atoms=num_atoms)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{text} {name}")

    def test_another_seed_gives_other_weights(self) -> None:
        first, second = self.weights(1, "tp1"), self.weights(1, "tp1", seed=8)
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        assert np.mean(first[name] == second[name]) < 0.01

    def test_they_are_distributed_as_upstream_initialises(self) -> None:
        values = initial_parameters(MAIN_MODEL, seed=3)
        std = MAIN_MODEL.transformer().init_method_std
        scaled = std / (2 * MAIN_MODEL.num_layers) ** 0.5
        expected = {
            "linear_qkv": std,
            "linear_fc1": std,
            "linear_proj": scaled,
            "linear_fc2": scaled,
        }
        for kind, deviation in expected.items():
            weight = values[f"decoder.layers.1.{_MODULE_OF[kind]}.{kind}.weight"]
            # The standard deviation of n samples has a relative error of 1 / sqrt(2 n).
            slack = 5 / (2 * weight.numel()) ** 0.5
            assert weight.std().item() == pytest.approx(deviation, rel=slack)
            assert abs(weight.mean().item()) < 5 * deviation / weight.numel() ** 0.5
        assert bool((values["decoder.final_layernorm.weight"] == 1).all())
        first, second = (values[f"decoder.layers.{i}.mlp.linear_fc1.weight"] for i in (0, 1))
        assert not torch.equal(first, second)


_MODULE_OF = {
    "linear_qkv": "self_attention",
    "linear_proj": "self_attention",
    "linear_fc1": "mlp",
    "linear_fc2": "mlp",
}


BF16_LOSS_RTOL = 1e-3
BF16_GRADIENT_ERROR = 0.04
BF16_MOVE_ERROR = 0.4
"""2-norms relative to the gradient and to the update; twice the largest error seen, since AdamW
divides by the gradient's size and so amplifies rounding errors of small gradients."""


class TestPrecision:
    """bf16 parameters, fp32 master weights, gradients and optimizer state."""

    MODEL = replace(MAIN_MODEL, dtype=torch.bfloat16)

    @pytest.mark.parametrize(("num_ranks", "text"), [(1, "tp1"), (3, "tp2+tp1"), (2, "pp2")])
    def test_bf16_stays_close_to_the_exact_answer(self, num_ranks: int, text: str) -> None:
        job = law_job(num_ranks, text, self.MODEL)
        runs: list[RankRun] = pool_of(num_ranks).run(run_job, job)
        reference = law_reference(self.MODEL)
        start = {n: v.double().numpy() for n, v in initial_parameters(self.MODEL, job.seed).items()}
        for i in range(3):
            gradients = assemble(runs, [run.gradients[i] for run in runs])
            parameters = assemble(runs, [run.parameters[i] for run in runs])
            assert runs[0].losses[i] == pytest.approx(reference.losses[i], rel=BF16_LOSS_RTOL)
            for name, exact in reference.gradients[i].items():
                found = gradients[name][: exact.shape[0]]
                error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
                assert error < BF16_GRADIENT_ERROR, (name, i, error)
            for name, exact in reference.parameters[i].items():
                found = parameters[name][: exact.shape[0]]
                error = np.linalg.norm(found - exact) / np.linalg.norm(exact - start[name])
                assert error < BF16_MOVE_ERROR, (name, i, error)

    def test_dtypes_of_parameters_gradients_and_state(self) -> None:
        probes: list[PrecisionProbe] = pool_of(2).run(
            probe_precision, law_job(2, "tp2", self.MODEL)
        )
        for probe in probes:
            assert probe.parameter_dtypes == {"torch.bfloat16"}
            assert probe.gradient_dtypes == {"torch.float32"}
            assert probe.shard_dtypes == {"torch.float32"}
            assert probe.optimizer_state_dtypes == {"torch.float32"}

    def test_gradients_of_micro_batches_add_up_in_fp32(self) -> None:
        for probe in pool_of(2).run(probe_precision, law_job(2, "tp2", self.MODEL)):
            assert probe.num_micro_batches >= 3
            # Rounded to bf16 after each of them, they would be off by about 2**-9.
            assert probe.accumulation_error < 2**-20


class TestNothingToTrain:
    """An iteration without a trained token changes nothing, bit for bit."""

    @pytest.mark.parametrize(
        ("num_ranks", "job"),
        [
            pytest.param(3, law_job(3, "tp2+tp1"), id="tp2+tp1"),
            pytest.param(4, law_job(4, "pp3+idle"), id="pp3+idle"),
            pytest.param(4, waves([SPLITS["2+1+1"]]), id="waves"),
        ],
    )
    def test_masked_or_missing_sequences_change_nothing(self, num_ranks: int, job: Job) -> None:
        probes: list[UntrainedProbe] = pool_of(num_ranks).run(probe_untrained_iterations, job)
        for probe in probes:
            assert probe.updated == (True, False, False, True)
            assert probe.trained_tokens[1:3] == (0, 0)
            assert probe.unchanged_by_missing
            assert probe.unchanged_by_masked
            assert probe.next_update_is_the_same
        moved = [probe.moved_by_training for probe in probes]
        assert all(moved)


def test_relative_errors_detect_nan() -> None:
    truth = {"weight": np.ones((2, 2))}
    found = {"weight": np.array([[1.0, np.nan], [1.0, 1.0]])}
    assert not relative_errors(found, truth)["weight"] <= 1.0
