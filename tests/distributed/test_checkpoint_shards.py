"""Canonical shards as Megatron's tensors: any layout of ranks reads the files of any other."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.hydraulis.checkpoint.inspect import inspect_folder
from megatron.hydraulis.checkpoint.manifest import Manifest
from megatron.hydraulis.checkpoint.names import StoredModel
from tests.support.checkpoints import (
    NUM_STEPS,
    differing_keys,
    fill_moments,
    load_and_save,
    make_engine,
    save_engine,
    save_new,
    saved_state,
    whole_tensors,
)
from tests.support.gloo_pool import pool_of
from tests.support.models import SmallModel

pytestmark = pytest.mark.distributed

LAST = "iter_0000003"
MODELS = {
    "fp32": SmallModel(num_heads=8, num_groups=4, dtype=torch.float32, qk_layernorm=True),
    "tied bf16 with biases": SmallModel(
        num_heads=8, num_groups=4, dtype=torch.bfloat16, tied=True, bias=True, num_layers=3
    ),
    "learned positions": SmallModel(
        num_layers=3, dtype=torch.float32, swiglu=False, position_embedding="learned_absolute"
    ),
    "first layer frozen": SmallModel(
        num_heads=8,
        num_groups=4,
        num_layers=3,
        dtype=torch.bfloat16,
        frozen=("embedding.", "decoder.layers.0."),
    ),
    "experts with biases": SmallModel(
        num_heads=8,
        num_groups=4,
        num_layers=3,
        dtype=torch.bfloat16,
        variant=(
            ("num_moe_experts", 4),
            ("moe_router_score_function", "sigmoid"),
            ("moe_router_load_balancing_type", "none"),
            ("moe_router_enable_expert_bias", True),
            ("moe_layer_freq", (0, 1, 1)),
        ),
    ),
}

POOLS = (("tp4", "tp2+pp2"), ("tp2+tp1", "pp2+tp1"), ("tp1+pp3", "tp2+2*tp1"))
"""Of the jobs that save, load and load again."""
WITH_EP = (("cp4ep4", "tp2cp2ep2"), ("cp2ep2+tp1", "tp2ep2+tp1"), ("tp1+pp3", "tp2cp2ep4"))

EARLIER = SmallModel(
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=8,
    num_heads=2,
    num_groups=2,
    vocab_size=13,
    padded_vocab_size=16,
    dtype=torch.float32,
)


@pytest.mark.parametrize("name", MODELS)
def test_other_pools_and_other_numbers_of_ranks_hold_the_same_state(
    name: str, tmp_path: Path
) -> None:
    model, pools = MODELS[name], WITH_EP if name == "experts with biases" else POOLS
    pool_of(4).run(save_new, model, pools[0], str(tmp_path / "four"))
    source = tmp_path / "four" / LAST
    expected = whole_tensors(source)
    assert not any(torch.isnan(tensor).any() for tensor in expected.values())
    if name == "experts with biases":
        biases = [key for key in expected if key.endswith("mlp.router.expert_bias")]
        assert [expected[key].flatten().tolist() for key in biases] == [
            [5.0, 6.0, 7.0, 8.0],
            [9.0, 10.0, 11.0, 12.0],
        ]
        assert {expected[key].dtype for key in biases} == {torch.float32}
    steps = pool_of(3).run(load_and_save, model, pools[1], str(source), str(tmp_path / "three"))
    assert steps == [NUM_STEPS] * 3
    assert differing_keys(expected, whole_tensors(tmp_path / "three" / LAST)) == {}
    # Other owners, more atoms than tp ranks need.
    again = tmp_path / "three" / LAST
    options = {"num_atoms": 4, "owners_for": "tp1+pp3"}

    pool_of(4).run(load_with, model, pools[2], str(again), str(tmp_path / "again"), options)
    assert differing_keys(expected, whole_tensors(tmp_path / "again" / LAST)) == {}


def load_with(
    model: SmallModel,
    strategies: tuple[str, ...],
    source: str,
    root: str,
    options: dict[str, object],
) -> int:
    return load_and_save(model, strategies, source, root, **options)


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Written in fp32 by two ranks with torch 2.13 and this project as of commit ddf4a78."""
    with tarfile.open(Path(__file__).with_name("earlier_checkpoint.tar.xz")) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    (inspected,) = inspect_folder(tmp_path / "earlier").checkpoints
    assert (inspected.problems, inspected.num_ranks) == ((), 2)
    source = tmp_path / "earlier" / LAST
    steps = pool_of(3).run(load_and_save, EARLIER, ("tp2+tp1",), str(source), str(tmp_path / "now"))
    assert steps == [NUM_STEPS] * 3
    assert differing_keys(whole_tensors(source), whole_tensors(tmp_path / "now" / LAST)) == {}


def test_files_of_an_earlier_attempt_are_not_part_of_a_save(tmp_path: Path) -> None:
    left = tmp_path / ".saving-iter_0000003" / "__7_0.distcp"
    left.parent.mkdir()
    left.write_bytes(b"of a rank that there is no more")
    pool_of(2).run(save_new, EARLIER, ("tp2",), str(tmp_path))
    names = {path.name for path in (tmp_path / LAST).iterdir()}
    assert names == set(Manifest.read(tmp_path / LAST).files) | {"hydraulis.json"}
    assert left.name not in names


def test_keys_shapes_and_dtypes_are_megatrons(tmp_path: Path) -> None:
    model = MODELS["tied bf16 with biases"]
    pool_of(2).run(save_new, model, ("tp2",), str(tmp_path))
    found = whole_tensors(tmp_path / LAST)
    parameters = {key for key in found if not key.startswith("optimizer.")}
    assert "output_layer.weight" not in parameters  # tied
    assert found["embedding.word_embeddings.weight"].shape == (64, 32)
    # gate and up in sequence, after an axis of layers
    assert found["decoder.layers.mlp.linear_fc1.weight"].shape == (3, 2 * 48, 32)
    assert found["decoder.layers.self_attention.linear_proj.weight"].shape == (3, 32, 32)
    for key in parameters:
        assert found[key].dtype == torch.bfloat16
        master = found[f"optimizer.state.param.{key}"]
        assert master.dtype == torch.float32
        assert torch.equal(found[key], master.to(torch.bfloat16))
        for moment in ("exp_avg", "exp_avg_sq"):
            assert found[f"optimizer.state.{moment}.{key}"].shape == found[key].shape


def test_an_fp32_parameter_has_no_separate_master_weight_in_the_file(tmp_path: Path) -> None:
    model = SmallModel(num_layers=2, hidden_size=128, ffn_hidden_size=256, dtype=torch.float32)
    pool_of(2).run(save_new, model, ("2*tp1",), str(tmp_path))
    tensors = whole_tensors(tmp_path / LAST)
    num_bytes = 4 * sum(t.numel() for key, t in tensors.items() if "optimizer." not in key)
    stored = Manifest.read(tmp_path / LAST).num_bytes
    assert 3 * num_bytes < stored < 3.2 * num_bytes  # parameters and two moments


def test_a_fork_writes_the_state_at_the_time_of_the_fork(tmp_path: Path) -> None:
    model = MODELS["fp32"]
    pool_of(2).run(save_new, model, ("tp2",), str(tmp_path / "in_line"))
    pool_of(2).run(save_then_change, model, str(tmp_path / "asynchronous"))
    expected, found = (whole_tensors(tmp_path / way / LAST) for way in ("in_line", "asynchronous"))
    assert differing_keys(expected, found) == {}
    manifest = Manifest.read(tmp_path / "asynchronous" / LAST)
    assert manifest.problems(tmp_path / "asynchronous" / LAST) == []


def save_then_change(model: SmallModel, root: str) -> None:
    engine = make_engine(model.definition(), ("tp2",))
    saver = save_engine(engine, Path(root), iteration=2, asynchronous=True)
    fill_moments(engine)
    saver.save(saved_state(engine, 3))  # waits for the first
    for flat in (engine.shards.parameters, engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq):
        flat.fill_(-1.0)
    while saver.is_saving:
        saver.poll()
    saver.finish()


def test_names_do_not_depend_on_the_layers_that_run() -> None:
    assert pool_of(1).run(compare_names) == [None]


def compare_names() -> None:
    """On a rank: names of local layers, and the extra states of Transformer Engine's."""
    definition = MODELS["fp32"].definition()
    others = replace(definition, built_layer_spec=ModuleSpec(module=torch.nn.Identity))
    stored = StoredModel.of(others)
    assert stored == StoredModel.of(definition)
    num_layers = definition.transformer.num_layers
    modules = ["linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"]
    asked = {
        f"decoder.layers.{place}._extra_state/shard_{layer}_{num_layers}"
        for place in (*(f"self_attention.{m}" for m in modules), "mlp.linear_fc1", "mlp.linear_fc2")
        for layer in range(num_layers)
    }
    found = stored.objects
    assert asked | {"decoder.final_layernorm._extra_state/shard_0_1"} <= set(found)
    assert len(found) == len(set(found))
