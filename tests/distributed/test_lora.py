"""Adapters are trained alike in every strategy, and the model below them never changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lora import ADAPTERS
from megatron.hydraulis.runtime import adapters
from megatron.hydraulis.runtime.catalogue import catalogue, initial_rows
from megatron.hydraulis.transfer.canonical import Contribution, model_parameters
from tests.distributed.test_shared_weights import poisoned
from tests.support.broken_rules import Rule, described, run_broken, wrong_with
from tests.support.checkpoints import make_engine, save_new
from tests.support.gloo_pool import WorkerFailure, pool_of, prepare_parent
from tests.support.law import (
    MAIN_MODEL,
    SHORT_MODEL,
    SPLITS,
    assert_law,
    changing,
    check_law,
    law_job,
    waves,
)
from tests.support.models import RankRun, SmallModel, assemble, rank_run, run_job
from tests.support.overlap_probes import bytes_of_iterations
from tests.support.recomputed_models import recomputed
from tests.support.reference import initial_parameters

pytestmark = pytest.mark.distributed

ALL = ("all-linear",)
MODEL = replace(MAIN_MODEL, lora_targets=ALL)
SHORT = replace(SHORT_MODEL, lora_targets=ALL)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.02,
    "moe_token_dispatcher_type": "alltoall",
}
LATENTS = {
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 8,
    "kv_channels": 8,
    "rope_type": "rope",
}
MODELS: dict[str, tuple[SmallModel, tuple[str, ...]]] = {
    "pipelines": (MODEL, ("tp2pp2", "pp3:2,1,1+tp1", "cp2pp2")),
    "recomputed": (MODEL, ("tp2pp2r", "pp4r", "cp2pp2r")),
    "no sequence parallelism": (
        replace(SHORT, sequence_parallel=False),
        ("tp2pp2r", "2*tp2", "tp4"),
    ),
    "some targets": (
        replace(MODEL, lora_targets=("k_proj", "o_proj", "up_proj")),
        ("tp2+pp2", "tp4", "tp2cp2r"),
    ),
    "output layer": (
        replace(MODEL, lora_targets=("lm_head", "linear_fc2")),
        ("tp2pp2", "2*tp2", "cp4r"),
    ),
    "biases, plain MLP, tied": (
        replace(
            SHORT,
            bias=True,
            swiglu=False,
            normalization="LayerNorm",
            tied=True,
            lora_targets=("all-linear", "output_layer"),
        ),
        ("tp2pp2", "2*tp2", "cp4"),
    ),
    "experts": (
        replace(SHORT, variant=tuple((EXPERTS | {"moe_layer_freq": (0, 1)}).items())),
        ("cp4ep4", "tp2cp2ep2r", "2*pp2"),
    ),
    "shared weights": (MODEL, ("tp2cp2fs", "cp2fs+pp2", "cp4fsr")),
    "shared weights, tied": (replace(SHORT, tied=True), ("cp4fs", "tp2+cp2fs", "tp2cp2fsr")),
    "shared experts": (
        replace(SHORT, variant=tuple((EXPERTS | {"moe_layer_freq": (0, 1)}).items())),
        ("cp4fsep2", "tp2cp2fs", "tp2cp2fsep4r"),
    ),
    "latents": (
        replace(SHORT, num_groups=8, qk_layernorm=True, variant=tuple(LATENTS.items())),
        ("tp2pp2", "tp2cp2r", "4*tp1"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_gives_the_same_adapters(name: str) -> None:
    """Another one in each iteration."""
    model, texts = MODELS[name]
    check_law(changing(texts, model), 4)


def test_a_recomputed_mlp_gives_the_same_adapters() -> None:
    """Nothing in front of the first one, inside the first layer's MLP, is trained."""
    model = replace(MODEL, lora_targets=("up_proj", "down_proj"))
    job = changing(("tp2pp2", "cp4~", "tp2+2*tp1"), model)
    again = recomputed(model, granularity="selective", modules=("mlp",))
    assert_law(job, pool_of(4).run(run_job, replace(job, model=again)))


@pytest.mark.parametrize("name", MODELS)
def test_planning_knows_the_adapters_that_the_model_has(name: str) -> None:
    model, _ = MODELS[name]
    shape = model.shape()
    prepare_parent()
    found = [entry.spec for entry in catalogue(model.definition())]
    planned = model_parameters(shape, frozen=Frozen.around(model.lora, shape))
    assert {
        (
            spec.unit,
            re.sub(r"decoder\.layers\.\d+\.", "", spec.name)
            .replace(ADAPTERS, ".")
            .replace("lora_", ""),
            spec.shape,
            spec.contribution,
        )
        for spec in found
        if not spec.is_frozen
    } == {
        (spec.unit, spec.name.removeprefix(f"{spec.unit.name}."), spec.shape, spec.contribution)
        for spec in planned
        if not spec.is_frozen
    }


@pytest.mark.parametrize("text", ["cp4~", "cp4~fs"])
def test_waves_give_the_same_adapters(text: str) -> None:
    job = replace(waves(list(SPLITS.values()), SHORT), strategies=(text,))
    assert_law(job, pool_of(4).run(run_broken, job, poisoned))


def test_bytes_are_those_of_adapters_where_strategies_stay() -> None:
    prepare_parent()
    num_adapted = sum(
        value.numel() for name, value in initial_parameters(SHORT, 7).items() if ADAPTERS in name
    )
    for found in pool_of(4).run(bytes_of_iterations, law_job(4, "tp2+2*tp1", SHORT)):
        (_, first, _), (_, second, _), (_, third, _) = found
        assert [exchanged for _, exchanged, _ in found] == [counted for *_, counted in found]
        # A gather of the values and a scatter of the gradients, received and sent, in fp64.
        assert second == third <= 4 * 8 * num_adapted
        assert first > second


@contextmanager
def _rows_are_added_after_the_sum() -> Iterator[None]:
    """Every rank adds what it has of the adapter to the sum over all of them."""
    kind = adapters.AdaptedRowParallelLinear

    def forward(self: Any, given: torch.Tensor) -> Any:
        output, bias = RowParallelLinear.forward(self, given)
        low, rows = self.adapters(given)
        num_ranks, rank = self.tp_place
        low = low.chunk(num_ranks)[rank] if self.sequence_parallel else low
        return output + low @ rows.T, bias

    plain = RowParallelLinear._forward_impl
    with patch.object(kind, "_forward_impl", plain), patch.object(kind, "forward", forward):
        yield


@contextmanager
def _keys_and_values_are_swapped() -> Iterator[None]:
    right = adapters.Adapters.__init__

    def init(self: Any, parts: Any, *others: Any) -> None:
        right(self, sorted(parts, key=lambda part: "qvk".find(part.target[0])), *others)

    with patch.object(adapters.Adapters, "__init__", init):
        yield


def _all_use_the_rows_of_the_first() -> Any:
    return patch.object(adapters, "get_pg_rank", lambda group: 0)


BROKEN: dict[str, Rule] = {
    "replicated": partial(described, "lora_", contribution=Contribution.REPLICATED),
    "after the sum": _rows_are_added_after_the_sum,
    "keys and values swapped": _keys_and_values_are_swapped,
    "rows of the first rank": _all_use_the_rows_of_the_first,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
    "sequence_parallel", [True, pytest.param(False, marks=pytest.mark.nightly)]
)
def test_a_broken_rule_is_found(name: str, sequence_parallel: bool) -> None:
    model = replace(SHORT, sequence_parallel=sequence_parallel)
    wrong = wrong_with(BROKEN[name], 2, "tp2", model)
    assert any(name.startswith("decoder.layers.0.self_attention.linear_") for name in wrong)


def test_initial_values_are_peft_s() -> None:
    prepare_parent()
    for entry in catalogue(SHORT.definition()):
        name, shape = entry.spec.name, entry.spec.shape
        if ADAPTERS not in name:
            continue
        values = initial_rows(entry, 7, 0, shape[0], torch.float64)
        if name.endswith("lora_B"):
            assert not values.any()
        else:
            bound = shape[1] ** -0.5  # of torch.nn.init.kaiming_uniform_(A, a=math.sqrt(5))
            assert 0.8 * bound < values.abs().max() <= bound


def loaded(model: SmallModel, path: str, **options: Any) -> tuple[RankRun, bool]:
    """On every rank: an engine of other weights loads a checkpoint."""
    engine = make_engine(model.definition(), ["pp2"], seed=123)
    wanted = {"vocab_size": model.vocab_size}
    found = load_checkpoint(Path(path), engine, wanted, **options)
    run = rank_run(engine, [], [engine.shards.parameters.numpy().copy()], [], [])
    run = replace(run, frozen=(engine.shards.frozen.double().numpy(),))
    return run, found.has_new_adapters


def initial(model: SmallModel, seed: int) -> dict[str, np.ndarray]:
    """Whole initial weights of an engine: B of an adapter is 0."""
    values = {name: value.numpy() for name, value in initial_parameters(model, seed).items()}
    return {name: (0 if name.endswith("lora_B") else 1) * value for name, value in values.items()}


BASE = replace(SHORT_MODEL, dtype=torch.float32)
ADAPTED = replace(BASE, lora_targets=ALL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for name, model in (("base", BASE), ("adapted", ADAPTED)):
        pool_of(2).run(save_new, model, ("tp2",), str(root / name))
    return {path.name: path / "iter_0000003" for path in root.iterdir()}


class TestCheckpoints:
    def read(self, folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
        """The adapters, the model, and whether the adapters are new."""
        found = pool_of(2).run(partial(loaded, **options), ADAPTED, str(folder))
        runs: list[RankRun] = [run for run, _ in found]
        trained = assemble(runs, [run.parameters[0] for run in runs])
        frozen = assemble(runs, [run.frozen[0] for run in runs], frozen=True)
        return trained, frozen, found[0][1]

    @pytest.mark.parametrize("with_optimizer", [True, False])
    def test_a_run_goes_on_with_its_adapters(
        self, folders: dict[str, Path], with_optimizer: bool
    ) -> None:
        found = self.read(folders["adapted"], with_optimizer=with_optimizer)
        adapted, model, are_new = found
        assert not are_new
        wanted = initial(ADAPTED, 7)
        for name, value in (adapted | model).items():
            np.testing.assert_array_equal(value[: len(wanted[name])], wanted[name])

    def test_a_checkpoint_of_the_model_gets_new_ones(self, folders: dict[str, Path]) -> None:
        adapted, model, are_new = self.read(folders["base"], with_optimizer=False)
        assert are_new
        wanted, own = (initial(ADAPTED, seed) for seed in (7, 123))
        for name, value in model.items():
            np.testing.assert_array_equal(value[: len(wanted[name])], wanted[name])
        for name, value in adapted.items():
            np.testing.assert_array_equal(value, own[name])

    def test_what_cannot_go_on_is_refused(self, folders: dict[str, Path]) -> None:
        with pytest.raises(WorkerFailure, match=r"no adapters to go on with .*--finetune"):
            pool_of(2).run(loaded, ADAPTED, str(folders["base"]))
        other = replace(ADAPTED, lora_targets=("q_proj", "lm_head"))
        with pytest.raises(WorkerFailure, match=r"there is no .*lm_head\.lora_A"):
            pool_of(2).run(partial(loaded, with_optimizer=False), other, str(folders["adapted"]))
        for with_optimizer in (True, False):
            load = partial(loaded, with_optimizer=with_optimizer)
            with pytest.raises(WorkerFailure, match=r"has adapters but .* export-hf --merge"):
                pool_of(2).run(load, BASE, str(folders["adapted"]))
