"""The written and printed configuration."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.models.gpt import GPTModelBuilder
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.flags import describe as description_module
from megatron.hydraulis.flags.arguments import Resolved, gpt_model_config
from megatron.hydraulis.flags.describe import (
    format_description,
    num_parameters_of,
    num_parameters_of_rank,
)
from megatron.hydraulis.flags.honoured import HONOURED
from megatron.hydraulis.library.building import HydraulisModelConfig, model_config, model_definition
from megatron.hydraulis.library.planning import Planning
from megatron.hydraulis.runtime.catalogue import catalogue
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.transfer.canonical import ParameterSpec
from tests.support.gloo_pool import pool_of
from tests.unit.flags.argument_command import parse

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def two_fake_ranks() -> Iterator[ProcessGroupCollection]:
    """Groups of rank 0 of a tensor-parallel pair, without communication."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        pair, alone = dist.new_group([0, 1]), dist.new_group([0])
        names = [
            "pp",
            "cp",
            "embd",
            "pos_embd",
            "dp",
            "dp_cp",
            "ep",
            "expt_tp",
            "tp_ep",
            "tp_ep_pp",
            "expt_dp",
        ]
        groups = dict.fromkeys(names, alone) | dict.fromkeys(("tp", "mp", "tp_cp"), pair)
        yield ProcessGroupCollection(**groups)
    finally:
        dist.destroy_process_group()


def describe(resolved: Resolved) -> dict[str, Any]:
    """As the program does on a CPU."""
    planning = Planning.of(resolved, device_constants("cpu"), None)
    return description_module.describe(
        resolved,
        planning.pool.strategies,
        planning.limits,
        cost_model=planning.source,
        left_out=planning.left_out,
    )


_LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --disable-bias-linear"
)


@pytest.mark.parametrize(
    "typed",
    [
        "",
        _LLAMA,
        f"{_LLAMA} --qk-layernorm --untie-embeddings-and-output-weights",
        "--disable-bias-linear --add-qkv-bias --qk-layernorm --kv-channels 24",
    ],
)
def test_parameters_of_a_rank_are_those_of_upstreams_model(
    typed: str, two_fake_ranks: ProcessGroupCollection, tmp_path: Path
) -> None:
    resolved = parse(tmp_path, *typed.split(), "--strategy", "tp2pp2:3,1", num_ranks=4)
    config = gpt_model_config(resolved.args)
    config.transformer.tensor_model_parallel_size = 2
    config.transformer.use_cpu_initialization = True
    config.transformer.init_model_with_meta_device = True
    replica = resolved.pool.strategies[0].replicas[0]
    for stage, num_layers in enumerate((3, 1)):
        config.transformer.num_layers = num_layers
        with torch.device("meta"):
            model = GPTModelBuilder(config).build_model(
                two_fake_ranks, pre_process=stage == 0, post_process=stage == 1
            )
        expected = sum(parameter.numel() for parameter in model.parameters())
        for tp in range(2):
            rank = replica.rank_at(stage, 0, tp)
            counted = num_parameters_of_rank(resolved.args, resolved.shape, replica, rank)
            assert counted == expected


def _specs(definition: ModelDefinition) -> list[ParameterSpec]:
    return [entry.spec for entry in catalogue(definition, expert_parallel=True)]


_GROUPED = "--group-query-attention --num-query-groups 2"
_BIASES = "--glu-linear-offset 1"
_NUM_BIASES = 4 * (128 + 64) + 2 * (2 * 128 + 64) + 2 * (4 + 4 * (2 * 24 + 64))
"""Of attention, the layers without experts and those with router and four experts."""
_LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 4 --qk-pos-emb-head-dim 6 "
    "--v-head-dim 8 --qk-layernorm"
)


@pytest.mark.parametrize(
    ("attention", "num_more", "ep"),
    [
        (_GROUPED, 0, ""),
        (_GROUPED, 0, "ep2"),
        (f"{_GROUPED} {_BIASES}", _NUM_BIASES, ""),
        (f"{_GROUPED} {_BIASES}", _NUM_BIASES, "ep2"),
        (_LATENT, 4 * 16, ""),
        (f"{_LATENT} --q-lora-rank 12", 4 * (16 + 12), "ep2"),
        (f"{_GROUPED} --mtp-num-layers 2", 2 * 64, "ep2"),
    ],
)
def test_parameters_of_a_rank_with_experts_are_those_of_the_catalogue(
    attention: str, num_more: int, ep: str, tmp_path: Path
) -> None:
    typed = (
        f"{_LLAMA.replace(_GROUPED, attention)} --num-experts 4 --moe-ffn-hidden-size 24 "
        "--moe-layer-freq [0,1,0,1] "
    )
    if _BIASES in attention:
        typed = typed.replace("--disable-bias-linear", "")
    else:
        typed += "--moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate"
    resolved = parse(tmp_path, *typed.split(), "--strategy", f"tp2{ep}pp2:3,1", num_ranks=4)
    shape = resolved.shape
    num_gates = 2 * shape.hidden_size if shape.shared_expert_ffn_hidden_size else 0
    assert num_parameters_of(resolved) == shape.num_parameters + num_gates + num_more
    definition = model_definition(model_config(resolved, "sdpa", HydraulisModelConfig))
    specs: list[ParameterSpec] = pool_of(1).run(_specs, definition)[0]
    replica = resolved.pool.strategies[0].replicas[0]
    predictions = {"prediction 0", "prediction 1"}
    stages = (
        {"embedding", "layer 0", "layer 1", "layer 2"},
        {"layer 3", "embedding", "output"} | predictions,
    )
    for stage, units in enumerate(stages):
        rank = replica.rank_at(stage, 0, 1)
        role = definition.roles_of(resolved.pool.strategies[0])[rank]
        assert role is not None
        expected = sum(
            math.prod(spec.local_shape(cut[0]))
            for spec in specs
            if spec.unit.name in units and (cut := role.cut_of(spec)) is not None
        )
        assert num_parameters_of_rank(resolved.args, resolved.shape, replica, rank) == expected


def test_a_rank_outside_the_replica_has_no_parameters_there(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--strategy", "tp2+2*idle", num_ranks=4)
    with pytest.raises(ValueError, match="rank 3 is not in the replica"):
        num_parameters_of_rank(
            resolved.args, resolved.shape, resolved.pool.strategies[0].replicas[0], 3
        )


def test_description_survives_json_and_is_the_same_on_every_rank(tmp_path: Path) -> None:
    typed = ["--strategy", "tp2pp2:1,3+2*tp1+2*idle", "--bf16"]
    description = describe(parse(tmp_path, *typed, rank=0))
    assert json.loads(json.dumps(description)) == description
    assert describe(parse(tmp_path, *typed, rank=7)) == description


def test_description_holds_strategy_model_and_flags(tmp_path: Path) -> None:
    description = describe(
        parse(tmp_path, "--strategy", "tp2pp2:1,3+2*tp1+2*idle", "--plan-dir", "plans")
    )
    (strategy,) = description["strategies"]
    assert strategy["name"] == strategy["strategy"] == "tp2pp2:1,3+2*tp1+2*idle"
    assert description["num_ranks"] == 8
    assert strategy["idle_ranks"] == [6, 7]
    replica, single, _ = strategy["replicas"]
    assert replica["ranks"] == [0, 1, 2, 3]
    assert replica["layers_per_stage"] == [1, 3]
    assert len(replica["num_parameters_per_rank"]) == 4
    model = description["model"]
    assert (model["vocab_size_unpadded"], model["vocab_size"]) == (200, 256)
    assert single["num_parameters_per_rank"] == {"4": model["num_parameters"]}
    assert description["hydraulis"]["plan_dir"] == "plans"
    assert description["hydraulis"]["sequence_parallel"] is True
    assert "--plan-dir" in description["explicit_options"]
    assert description["settings"]["hidden_size"] == 64
    # Upstream turns --recompute-activations into --recompute-granularity and forgets it.
    both = {"--recompute-activations", "--no-yarn-correction-range-round-to-int"}
    assert len(description["settings"]) == len(HONOURED.keys() - both)
    assert "linear_attention_freq" in description["upstream_defaults"]
    assert description["settings"].keys().isdisjoint(description["upstream_defaults"])


def test_text_names_every_stage_with_ranks_and_parameters(tmp_path: Path) -> None:
    description = describe(parse(tmp_path, "--strategy", "tp2pp2:1,3+2*tp1+2*idle"))
    lines = format_description(description).splitlines()
    assert lines[0].split() == ["ranks", "8", "(8", "a", "node)"]
    assert lines[1].split() == ["strategy", "tp2pp2:1,3+2*tp1+2*idle,", "idle:", "6-7"]
    replica, single, _ = description["strategies"][0]["replicas"]
    of_rank = replica["num_parameters_per_rank"]
    rows = [line.split() for line in lines[3:7]]
    limit = f"{replica['max_tokens_per_micro_batch']:,}"
    assert replica["max_tokens_per_micro_batch"] > 0
    assert rows[0] == ["0", "tp2pp2:1,3", "0", "0-1", "1", f"{of_rank['0']:,}", limit]
    assert rows[1] == ["1", "2-3", "3", f"{of_rank['2']:,}"]
    assert rows[2][:5] == ["1", "tp1", "0", "4", "4"]
    overhead_ms = description["strategies"][0]["overhead_ms"]
    assert overhead_ms > 0.0
    assert f"  regrouping and optimizer {overhead_ms:.1f} ms an iteration, predicted" in lines
    assert rows[2][6] == f"{single['max_tokens_per_micro_batch']:,}"
    # The job's, regrouping's, tp and pp; the line also says what they are assumed to take.
    assert description["most_communicators_of_a_rank"] == 4
    (groups,) = (line for line in lines if line.startswith("groups "))
    assert "up to 4 communicators; NCCL's are assumed to take 0.3 GB each" in groups
    settings = lines[lines.index(next(line for line in lines if line.startswith("settings "))) :]
    assert "  --strategy tp2pp2:1,3+2*tp1+2*idle" in settings
    assert len(settings) == 1 + len(description["given"]), "only what was given"


def test_text_names_the_experts_of_a_rank(tmp_path: Path) -> None:
    typed = "--num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 48 --swiglu"
    strategy = ("--strategy", "tp2+tp2ep2+tp1+pp2")
    text = format_description(describe(parse(tmp_path, *typed.split(), *strategy, num_ranks=7)))
    lines = text.splitlines()
    column = lines[2].index("experts a rank")
    assert [line[column:] for line in lines[3:8]] == ["1/2 of each", "2 of 4", "all", "all", ""]
    assert "256, 4 experts of ffn 48 in 4 layers, 2 a token: " in text


def test_what_to_check_first_comes_first_and_a_warning_once(tmp_path: Path) -> None:
    typed = ("--num-workers", "4", "--rampup-batch-size", "2", "2", "12")
    lines = format_description(describe(parse(tmp_path, *typed))).splitlines()
    headings = [line.split()[0] for line in lines if not line.startswith(" ")]
    first = [
        "ranks",
        "strategy",
        "cost",
        "precision",
        "layers",
        "groups",
        "warning",
        "differs",
        "taken",
    ]
    assert headings == [*first, "model", "run", "settings"]
    assert "precision    fp32, as no --bf16" in lines
    assert "layers       --transformer-impl local" in lines
    assert sum("--hidden-dropout" in line for line in lines) == 1


def test_the_written_configuration_has_numbers_only_where_the_user_gave_them(
    tmp_path: Path,
) -> None:
    given = describe(parse(tmp_path, "--save", "x"))["settings"]
    assert (given["save_interval"], given["eval_interval"], given["lr_decay_iters"]) == (None,) * 3
    typed = ("--train-samples", "99", "--global-batch-tokens", "256")
    without = ("--train-iters", "--global-batch-size")
    resolved = parse(tmp_path, *typed, without=without)
    resolved.args.train_iters = 136  # as upstream's loop sets it
    settings = describe(resolved)["settings"]
    assert (settings["train_iters"], settings["global_batch_size"]) == (None, None)


def test_there_is_no_advice_on_transfers_without_a_limit_of_the_cost_model(tmp_path: Path) -> None:
    """--max-tokens-per-micro-batch lets a model train that by the cost model does not fit."""
    typed = ("--vocab-size", "2000000000", "--max-tokens-per-micro-batch", "128")
    planning = Planning.of(parse(tmp_path, *typed), device_constants("cpu"), None)
    assert planning.bf16_advice(1000.0) is None


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ("", 0),
        ("--moe-router-pre-softmax --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001", 4),
        ("--moe-router-score-function sigmoid --moe-aux-loss-coeff 0", 1),
    ],
)
def test_memory_counts_the_scores_that_the_router_keeps(
    flags: str, number: int, tmp_path: Path
) -> None:
    typed = f"{_LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 {flags}"
    resolved = parse(tmp_path, *typed.split())
    planning = Planning.of(resolved, device_constants("cpu"), None)
    cost_model = planning.limits.cost_model
    assert isinstance(cost_model, AnalyticCostModel)
    assert cost_model.num_score_tensors == number
