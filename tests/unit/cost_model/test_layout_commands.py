"""``recommend-layout`` and ``estimate``, end to end."""

import argparse
import contextlib
import functools
import io
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.advise import command as advise
from megatron.hydraulis.cost_model import ProfileCostModel, layouts
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.model_arguments import (
    LATENT_SIZES_TEXT,
    add_model_arguments,
    given_layers,
    shape_of,
)
from megatron.hydraulis.library.planning import Planning
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.strategy.notation import parse_scheme
from tests.unit.flags.argument_command import parse

EXAMPLES = Path(__file__).parents[3] / "examples"
LLAMA_13B = [
    *("--num-layers", "40", "--hidden-size", "5120", "--num-attention-heads", "40"),
    *("--ffn-hidden-size", "13824", "--swiglu", "--untie-embeddings-and-output-weights"),
    *("--padded-vocab-size", "128000"),
]
LLAMA_32B = [
    *("--num-layers", "60", "--hidden-size", "6656", "--num-attention-heads", "64"),
    *("--kv-channels", "104", "--ffn-hidden-size", "17920", "--swiglu"),
    *("--untie-embeddings-and-output-weights", "--vocab-size", "30522"),
    *("--make-vocab-size-divisible-by", "128"),
]
JOB = ["--device", "a100-80g", "--num-ranks", "64", "--seq-length", "2048"]


QWEN3_30B_A3B = [
    *("--num-layers", "48", "--hidden-size", "2048", "--num-attention-heads", "32"),
    *("--group-query-attention", "--num-query-groups", "4", "--kv-channels", "128"),
    *("--ffn-hidden-size", "6144", "--swiglu", "--untie-embeddings-and-output-weights"),
    *("--padded-vocab-size", "151936"),
]
EXPERTS = [
    *("--num-experts", "128", "--moe-ffn-hidden-size", "768", "--moe-router-topk", "8"),
    *("--moe-layer-freq", "[0]*2+[1]*46", "--moe-shared-expert-intermediate-size", "512"),
]


def estimated(
    *flags: str, capsys: pytest.CaptureFixture[str], model: Sequence[str] = LLAMA_13B
) -> dict[str, Any]:
    """The JSON that ``estimate`` prints, of tp8 on 8 H100 if the flags say nothing else."""
    job = ["--device", "H100", "--schemes", "tp8", "--num-ranks", "8", "--json"]
    assert main(["estimate", *model, *job, *flags]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_commands_and_training_describe_experts_by_the_same_flags(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    shape = shape_of(parser.parse_args([*QWEN3_30B_A3B, *EXPERTS]))
    flags = (*QWEN3_30B_A3B, *EXPERTS, "--disable-bias-linear")
    assert shape == parse(tmp_path, *flags, num_ranks=4).shape
    assert (shape.num_expert_layers, shape.experts_per_token) == (46, 8)
    assert shape.num_first_mlp_layers == 2
    of_defaults = shape_of(parser.parse_args([*QWEN3_30B_A3B, "--num-experts", "4"]))
    assert of_defaults.num_expert_layers == 48
    assert (of_defaults.experts_per_token, of_defaults.expert_ffn_hidden_size) == (2, 6144)


def test_commands_and_training_describe_latents_by_the_same_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    sizes = [
        *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--padded-vocab-size", "512", "--multi-latent-attention"),
    ]
    for latents in ([], ["--swiglu"], ["--q-lora-rank", "24", "--v-head-dim", "48"]):
        shape = shape_of(parser.parse_args([*sizes, *latents]))
        assert shape == parse(tmp_path, *sizes, *latents, num_ranks=4).shape
    assert (shape.kv_channels, shape.value_channels, shape.q_lora_rank) == (128 + 64, 48, 24)
    sizes += ["--kv-channels", "8"]
    assert shape_of(parser.parse_args([*sizes, *latents])) == shape
    assert f"--kv-channels: {LATENT_SIZES_TEXT}" in capsys.readouterr().err
    resolved = parse(tmp_path, *sizes, *latents, num_ranks=4)
    assert resolved.shape == shape
    assert ("--kv-channels", LATENT_SIZES_TEXT) in resolved.taken


@functools.cache
def recommended(*flags: str) -> dict[str, Any]:
    """A search takes seconds."""
    batch = ["--global-batch-size", "2048", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["recommend-layout", *LLAMA_13B, *JOB, *batch, *flags]) == 0
    content: dict[str, Any] = json.loads(output.getvalue())
    return content


def test_ranked_layouts_fit_and_come_fastest_first() -> None:
    content = recommended()
    times = [row["predicted_step_time_s"] for row in content["ranked"]]
    assert times == sorted(times)
    assert all(row["predicted_fits"] for row in content["ranked"])
    assert not any(row["predicted_fits"] for row in content["rejected"])
    first = content["ranked"][0]
    assert first["recompute"] is None
    for row in content["ranked"] + content["rejected"]:
        assert sum(row["time_s"].values()) == pytest.approx(row["predicted_step_time_s"])


def test_each_rejected_layout_names_its_rule() -> None:
    content = recommended()
    rules = {
        (row["micro_batch_size"], row["tp"], row["pp"], row["recompute"]): row["rule"]
        for row in content["ranked"]
        if not row["sequence_parallel"]
    }
    assert rules[1, 2, 1, "full"] == "recompute_s"
    assert rules[4, 8, 1, None] == "tensor_parallel_s"
    assert rules[1, 8, 1, None] == "tensor_parallel_s"
    assert rules[4, 2, 4, None] in ("bubble_s", "imbalance_s")
    assert {row["rule"] for row in content["rejected"]} == {"memory"}
    assert all(" GB" in row["why"] for row in content["rejected"])
    refused = recommended("--global-batch-size", "7")["refused"]
    assert any("7 sequences are not a multiple of 64 replicas" in row["why"] for row in refused)
    divisions = [row["why"] for row in refused if row["rule"] == "division"]
    assert any("64 stages but the model has 40" in why for why in divisions)


def test_layouts_of_a_model_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    model = [*QWEN3_30B_A3B, *EXPERTS, "--device", "h100"]
    of_job = ["--num-ranks", "16", "--seq-length", "4096", "--global-batch-size", "64"]
    assert main(["recommend-layout", *model, *of_job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["ranked"][0]
    # As usual for such a model: experts over the ranks of a node, hardly any tp.
    assert (first["ep"], first["tp"] <= 2) == (8, True)
    assert any(row["ep"] > row["tp"] and row["pp"] > 1 for row in found["ranked"])
    assert all(row["sequence_parallel"] for row in found["ranked"] if row["tp"] > 1)
    threes = [
        *("--num-experts", "6", "--moe-router-topk", "2"),
        *("--num-ranks", "6", "--global-batch-size", "6"),
    ]
    assert main(["recommend-layout", *model, *of_job, *threes]) == 0
    assert "--expert-tensor-parallel-size 1" in capsys.readouterr().out
    assert main(["recommend-layout", *model, *of_job, *threes, "--json"]) == 0
    refused = json.loads(capsys.readouterr().out)["refused"]
    whys = [row["why"] for row in refused if row["ep"] == 3]
    assert any("an ep above tp·cp is tp times a power of two" in why for why in whys)


@pytest.mark.parametrize("has_file", [False, True])
def test_readable_tables(
    has_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--global-batch-size", "2048", "--top", "3"]
    file = shutil.copy(EXAMPLES / "model_llama32b.json", tmp_path / "my model.json")
    windows = ["--window-size", "1024,0", "--window-attn-skip-freq", "[1,0]*20"]
    model = ["--model", str(file)] if has_file else [*LLAMA_13B, *windows]
    layers = "--qk-layernorm --no-rope-fusion --softmax-type learnable --moe-aux-loss-coeff 0.1"
    flags += layers.split()
    precision = ["--lr", "1e-4"] if has_file else ["--fp32"]
    assert main(["recommend-layout", *model, *JOB, *flags, *precision]) == 0
    text = capsys.readouterr().out
    assert "fastest; most goes to" in text
    assert "out of memory" in text
    assert "Layouts have no cp" in " ".join(text.split())
    *lines, following = text.splitlines()
    assert max(map(len, lines)) <= 100
    sizes = "--seq-length 2048 --global-batch-tokens 4194304 "
    assert following.startswith(f"next: hydraulis advise --lengths CORPUS.idx {sizes}")
    assert "2,048 rows of 2,048 tokens, as in Megatron; here --global-batch-tokens 4194304" in text
    parser = argparse.ArgumentParser()
    advise.add_arguments(parser)
    namespace = parser.parse_args(shlex.split(following)[3:])
    given = argparse.ArgumentParser()
    layouts.add_arguments(given)
    typed = given.parse_args([*model, *JOB, *flags])
    assert (shape := shape_of(namespace)) == shape_of(typed)
    assert given_layers(namespace, shape) == given_layers(typed, shape)
    assert namespace.fp32


def test_an_estimate_is_a_cost_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    pool = ["--device", "a800-80g", "--pool", str(EXAMPLES / "pool_64_ranks.json")]
    assert main(["estimate", *LLAMA_32B, *pool, "--out", str(out), "--json"]) == 0
    profile = ProfileCostModel.read(out)
    assert profile.to_json() == json.loads(capsys.readouterr().out)
    assert "not measured" in profile.source
    assert profile.num_ranks == 64
    measured = ProfileCostModel.read(EXAMPLES / "cost_profile_llama32b_a800.json")
    assert measured.model is not None
    assert profile.model == replace(measured.model, recompute="none")
    # Of other widths the estimate takes the cheaper exchange, the shipped profile a ring.
    for row in (row for row in profile.schemes if row.scheme.cp == 1):
        lengths = [8192, 4096, 2048, 2048]
        estimate = row.coefficients.time_ms(lengths)
        assert estimate == pytest.approx(
            measured.coefficients(row.scheme).time_ms(lengths), rel=0.15
        )
    batch = ["--lengths", str(EXAMPLES / "lengths_instance_b.json")]
    assert main(["plan", *batch, "--cost-profile", str(out), *pool[-2:]]) == 0


def test_schemes_may_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "h100", "--num-ranks", "16", "--schemes", "tp8pp2", "tp8", "tp8"]
    assert main(["estimate", *LLAMA_32B, *flags, "--seq-length", "4096"]) == 0
    assert " --seq-length 4096 --cost-profile PROFILE " in capsys.readouterr().out
    content = estimated(*flags, capsys=capsys, model=LLAMA_32B)
    profile = ProfileCostModel.from_json(content, what="output")
    assert [row.scheme for row in profile.schemes] == [Scheme(tp=8, pp=2), Scheme(tp=8)]


def test_all_schemes_that_fit_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--device", "h100-80g", "--num-ranks", "16", "--json"]
    assert main(["estimate", *LLAMA_32B, *job]) == 0
    content = json.loads(capsys.readouterr().out)
    profile = ProfileCostModel.from_json(content, what="output")
    assert profile.device == "h100"
    schemes = {row.scheme for row in profile.schemes}
    assert {Scheme(tp=8), Scheme(tp=8, cp=2), Scheme(tp=4, pp=4)} <= schemes
    assert all(row.max_tokens > 0 and row.scheme.num_ranks <= 16 for row in profile.schemes)
    assert Scheme() not in schemes, "one rank does not hold 32B parameters"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("estimate --num-ranks 1", "1 ranks .* none of 1 .* tp1 needs .* of 69.0 GB"),
        ("estimate --num-ranks 16 --schemes tp1 tp2", "16 ranks .* none of 2 .* tp2 needs 124"),
        (
            "advise --lengths examples/lengths_instance_b.json --global-batch-size 8 --num-ranks 1",
            "on 1 ranks of h100 none of 1 does: tp1 needs .* GB of 69.0 GB",
        ),
    ],
)
def test_an_estimate_that_nothing_fits_is_an_error(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    assert main([*command.split(), *LLAMA_32B, "--device", "h100", "--out", str(out)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_the_table_of_all_schemes_has_the_best_replicas_of_each_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ["estimate", *LLAMA_32B, "--device", "h100", "--num-ranks", "64"]
    assert main(job) == 0
    text = capsys.readouterr().out
    assert main([*job, "--json"]) == 0
    content = capsys.readouterr().out
    profile = ProfileCostModel.from_json(json.loads(content), what="output")
    shown = [parse_scheme(name, label="") for name in re.findall(r"│ (\w+) +│", text)]
    assert f"{len(profile.schemes) - len(shown)} other schemes fit" in text
    replicas = [row for row in profile.schemes if row.scheme.fs in (1, row.scheme.cp)]
    assert len(replicas) < len(profile.schemes), "no groups of cp8~fs"
    for size in {row.scheme.num_ranks for row in replicas}:
        of_size = [row for row in replicas if row.scheme.num_ranks == size]
        of_size.sort(
            key=lambda row: row.coefficients.time_of_sums_ms(0, row.max_tokens) / row.max_tokens
        )
        best = {row.scheme for row in of_size[:3]}
        assert best == {scheme for scheme in shown if scheme.num_ranks == size}


LAUNCH_OPTIONS = (
    "--normalization RMSNorm --disable-bias-linear --bf16 --qk-layernorm --recompute-activations "
    "--micro-batch-size 1 --tensor-model-parallel-size 2 --lr 1e-4"
)


def test_options_of_a_launch_script_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["estimate", *LLAMA_13B, "--device", "h100", "--schemes", "tp4", "--num-ranks", "8"]
    assert main([*job, "--json", *LAUNCH_OPTIONS.split()]) == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    ignored = "--normalization RMSNorm, --disable-bias-linear, --tensor-model-parallel-size 2, "
    assert line.startswith(f"options without effect here: {ignored}")
    assert "--lr 1e-4" in line
    assert main([*job, "--json", "--qk-layernorm", "--recompute-granularity", "selective"]) == 0
    assert capsys.readouterr() == (out, "precision: bf16, assumed; --bf16 or --fp32 gives it\n")
    for typed, problem in (
        ("--fp16", "--fp16 is not honoured"),
        ("--lr -1", "--lr must be at least 0"),
        ("--cp-comm-type p2p a2a", "takes 1 of auto, p2p, all_gather, a2a for all layers but was"),
        ("--recompute-activations --recompute-modules all", "moe_act but names all"),
        # What training alone reads is checked as there.
        (
            "--num-experts 4 --disable-bias-linear --moe-router-num-groups 3 "
            "--moe-router-group-topk 1",
            "--num-experts 4 is not a multiple of --moe-router-num-groups 3",
        ),
    ):
        assert main([*job, *typed.split()]) == 2
        assert problem in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*job, "--bf16", "--rank-per-node", "8"])
    assert "did you mean --ranks-per-node instead of --rank-per-node?" in capsys.readouterr().err


def test_experts_with_biases_cost_the_same_with_options_of_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Training refuses them, with or without other options.
    experts = ("--num-layers", "8", "--num-experts", "4", "--bf16")
    assert estimated(*experts, capsys=capsys) == estimated(*experts, "--lr", "1", capsys=capsys)


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            "--bf16 --mock-data --strategy tp8 --global-batch-tokens 8192 --run-dir x",
            "without effect here: --strategy tp8, --global-batch-tokens 8192, --run-dir x, "
            "--mock-data (training refuses it)",
        ),
        ("--bf16 --vocab-size 100 --no-such 1 --ignore-unknown-options", ", --no-such 1"),
        (
            "--bf16 --recompute-activations --recompute-modules moe_act",
            "--recompute-modules moe_act: without effect, as there are no experts",
        ),
        (
            "--bf16 --recompute-activations --recompute-modules layernorm",
            "--recompute-modules layernorm: its activations are kept, which takes more memory; "
            "only layers of Transformer Engine",
        ),
        ("--bf16 --v-head-dim 8", "--v-head-dim: without effect, as there is no --multi-latent-"),
        (
            "--bf16 --moe-ffn-hidden-size 8 --moe-grouped-gemm",
            "--moe-ffn-hidden-size, --moe-grouped-gemm: without effect, as there is no --num-exp",
        ),
        ("--bf16 --num-query-groups 8", "--num-query-groups: without effect, as there is no --gro"),
        (
            "--bf16 --window-attn-skip-freq 2 --glu-linear-offset 1",
            "--window-attn-skip-freq: without effect, as there is no --window-size",
        ),
    ],
)
def test_options_without_effect_are_named(
    flags: str, lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    as_without = estimated("--bf16", capsys=capsys)
    if "--glu" in flags:
        as_without = estimated("--glu-linear-offset", "1", capsys=capsys)
    job = ["--device", "H100", "--schemes", "tp8", "--num-ranks", "8", "--json"]
    assert main(["estimate", *LLAMA_13B, *job, *flags.split()]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == as_without
    assert lines in err
    assert "precision" not in err


@pytest.mark.parametrize(
    ("flags", "dtype", "line"),
    [
        ("", "bf16", "precision: bf16, assumed"),
        ("--bf16 --lr 1e-4", "bf16", ""),
        ("--fp32", "fp32", ""),
        ("--lr 1e-4", "fp32", "precision: fp32, as in training with these options"),
        ("--norm-epsilon 1 --disable-bias-linear", "bf16", "precision: bf16, assumed"),
    ],
)
def test_the_precision_is_that_of_training(
    flags: str, dtype: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "profile.json")
    job = ["--device", "h100", "--schemes", "tp8", "--num-ranks", "8", "--out", out]
    assert main(["estimate", *LLAMA_13B, *job, *flags.split()]) == 0
    err = capsys.readouterr().err
    assert line in err
    assert ("precision" in err) == bool(line)
    profile = ProfileCostModel.read(out)
    assert profile.model is not None
    assert profile.model.dtype == dtype
    other = "--bf16" if dtype == "fp32" else "--fp32"
    argv = ["plan", "--lengths", str(EXAMPLES / "lengths_instance_b.json"), "--cost-profile", out]
    strategies = [{"name": "tp8", "replicas": "tp8"}]
    pool = {"num_ranks": 8, "ranks_per_node": 8, "strategies": strategies}
    (tmp_path / "pool.json").write_text(json.dumps(pool))
    argv += ["--strategy-pool", str(tmp_path / "pool.json")]
    assert main([*argv, other]) == 2
    assert f"with dtype {dtype} instead of {other[2:]}" in capsys.readouterr().err
    # Of the profile, where options of training do not say it.
    assert main([*argv, "--lr", "1e-4"]) == 0
    differs = f"precision: {dtype}, as the cost profile; training without --bf16 is fp32"
    assert (differs in capsys.readouterr().err) == (dtype == "bf16")


@pytest.mark.parametrize("flags", ["--moe-permute-fusion", "--moe-grouped-gemm"])
def test_experts_take_layers_of_transformer_engine_as_in_training(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [*QWEN3_30B_A3B, *EXPERTS, "--bf16"]

    def limit(*more: str) -> int:
        job = ("--schemes", "tp2cp4ep8", "--num-ranks", "16")
        (row,) = estimated(*job, *more, capsys=capsys, model=model)["schemes"]
        return int(row["max_tokens"])

    local, te = limit(), limit("--transformer-impl", "transformer_engine")
    assert limit(flags, "--transformer-impl", "local") == limit(flags, "--spec", "a", "b") == local
    assert limit(flags) != local
    assert (limit(flags) == te) == (flags == "--moe-permute-fusion")


def test_recomputation_takes_longer_and_holds_more(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--num-ranks", "64", "--schemes", "tp4pp2")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    without, with_it = (
        estimated(*job, *more.split(), capsys=capsys, model=LLAMA_32B)["schemes"][0]
        for more in ("", full)
    )
    assert with_it["b_ms_per_token"] > without["b_ms_per_token"]
    assert with_it["max_tokens"] > without["max_tokens"]


def test_layers_of_transformer_engine_hold_other_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    local, te = (
        estimated("--transformer-impl", name, capsys=capsys)["schemes"][0]["max_tokens"]
        for name in ("local", "transformer_engine")
    )
    assert te != local
    assert te == pytest.approx(local, rel=0.05)


def test_the_table_names_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "h200", "--num-ranks", "8", "--schemes", "tp8", "tp1"]
    assert main(["estimate", *LLAMA_32B, *flags]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert text.count("data sheet") >= 3


def test_all_groups_of_a_splitting_width_are_estimated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--num-ranks", "64", "--schemes", "tp8cp4~", "tp8cp2")
    rows = estimated(*flags, capsys=capsys, model=LLAMA_32B)["schemes"]
    assert [(row["tp"], row["cp"]) for row in rows] == [(8, 4), (8, 2), (8, 1)]


ON_8_H100 = "--device h100 --num-ranks 8 --schemes tp8"
ESTIMATE_13B, ESTIMATE_32B, ESTIMATE_EXPERTS = (
    f"estimate {ON_8_H100} {' '.join(model)}"
    for model in (LLAMA_13B, LLAMA_32B, [*QWEN3_30B_A3B, "--num-experts", "4"])
)
SKIP_FREQ = "--window-size 7,0 --window-attn-skip-freq"
OF_32B = f"estimate {' '.join(LLAMA_32B)}"
LAYOUTS = f"recommend-layout {' '.join(LLAMA_13B)} --seq-length 2048 --global-batch-size 8"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{LAYOUTS} --device h100 --num-ranks 64 --ranks-per-node 7", "7 ranks each but 64 ranks"),
        (f"{LAYOUTS} --device a100-40g --num-ranks 1", "must fit in 40.0 GB of a100-40g"),
        (f"{ESTIMATE_32B} --schemes tp3", "tp must divide the attention heads"),
        (f"{ESTIMATE_32B} --schemes 2*tp8", r"without copies and ranks.*'2\*tp8'"),
        (f"{OF_32B} --device h100 --schemes tp8", "without --strategy-pool needs --num-ranks"),
        (f"{ESTIMATE_32B} --ranks-per-node 0", "-node must be at least 1 but is 0"),
        (f"{ESTIMATE_32B} --schemes tp8pp2", "a replica has 16 ranks but the job 8"),
        (
            f"{OF_32B} --device h100 --pool {EXAMPLES / 'pool_64_ranks.json'} --num-ranks 64",
            "--strategy-pool gives the ranks",
        ),
        (f"{ESTIMATE_32B} --recompute-granularity full", "method"),
        (f"estimate {ON_8_H100} --model m.json --swiglu", "m.json describes .* but --swiglu"),
        (f"estimate {ON_8_H100} --model nowhere.json", "nowhere.json"),
        (f"estimate {ON_8_H100}", "--num-layers, .*, --padded-vocab-size are missing"),
        (f"estimate {ON_8_H100} {' '.join(LLAMA_13B[:-2])}", "--padded-vocab-size is missing"),
        (f"estimate {ON_8_H100} {' '.join(LLAMA_13B[2:])}", "--num-layers is missing"),
        (f"{ESTIMATE_13B} --num-attention-heads 63", "not a multiple of 63 heads"),
        (
            f"{ESTIMATE_13B} --group-query-attention --num-query-groups 7",
            "40 heads .* 7 query groups",
        ),
        (f"{ESTIMATE_13B} --make-vocab-size-divisible-by 0", "at least 1 but is 0"),
        (
            f"{ESTIMATE_EXPERTS} --multi-latent-attention",  # which has query groups
            "heads 32 heads but --group-query-attention shares them; remove one of the two",
        ),
        (f"{ESTIMATE_EXPERTS} --moe-layer-freq [0,1]", "48 layers but lists 2 values"),
        (f"{ESTIMATE_EXPERTS} --moe-layer-freq [0]*48", "1 layer .* 0 for all 48"),
        (f"{ESTIMATE_EXPERTS} --moe-router-topk 5", "experts_per_token 5"),
        (f"{ESTIMATE_13B} {SKIP_FREQ} [1,0]*2", "40 layers but lists 4 values"),
        (f"{ESTIMATE_13B} {SKIP_FREQ} [1,2]*20", "lists 40 values, 1, 2 among them"),
        (f"{ESTIMATE_13B} {SKIP_FREQ} 0", "--window-attn-skip-freq counts layers from 1 but is 0"),
        (f"{ESTIMATE_13B} --window-size 7,1", "is 7,1; write N,0"),
        (f"{ESTIMATE_13B} --window-size (7,0,0)", "is 7,0,0; write N,0"),
    ],
)
def test_flags_that_are_refused(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_model_is_described_by_a_file_or_by_flags(capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--model", str(EXAMPLES / "model_llama32b.json")]
    jobs = {
        "estimate": ["--device", "a800-80g", "--num-ranks", "16", "--schemes", "tp8pp2", "--json"],
        "recommend-layout": [*JOB, "--global-batch-size", "64", "--json"],
    }
    for command, job in jobs.items():
        printed = []
        for model in (file, LLAMA_32B):
            assert main([command, *model, *job]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ("--window-size 7,0 --window-attn-skip-freq [1,0]*20", (20, 8)),
        ("--window-size 7,0 --window-attn-skip-freq ([1]*3+[0])*10", (30, 8)),
        ("--window-size 7,0 --window-attn-skip-freq 4", (30, 8)),
        ("--window-size (7,0)", (40, 8)),
        ("--window-size 7,0 --window-attn-skip-freq 1", (0, 0)),
        ("--window-size -1,0", (0, 0)),
    ],
)
def test_windows_as_in_training(
    flags: str, window: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    option, _, rest = flags.partition(" ")
    value, *more = rest.split()
    model = estimated(f"{option}={value}", *more, capsys=capsys)["model"]
    found = model.get("num_windowed_layers", 0), model.get("window_tokens", 0)
    assert found == window


@pytest.mark.parametrize("text", ["[x]", "[1", "x", "[__import__('os')]", "[[1]]*2"])
def test_patterns_are_lists_of_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        estimated("--window-size", "7,0", "--window-attn-skip-freq", text, capsys=capsys)
    assert "--window-attn-skip-freq" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        *("--qk-layernorm", "--softmax-type off-by-one", "--softmax-type learnable"),
        *("--apply-layernorm-1p", "--apply-layernorm-1p --transformer-impl transformer_engine"),
    ],
)
def test_limits_of_variants_are_those_of_training(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = (
        "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --swiglu"
    )
    device = device_constants("h100")
    job = f"--device {device.name} --schemes tp2 --num-ranks 8"
    argv = f"{model} {flags} --vocab-size 32000"
    assert main(["estimate", *argv.split(), *job.split(), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["schemes"]
    resolved = parse(tmp_path, *argv.split(), "--disable-bias-linear", "--bf16")
    # Without CUDA the flag falls back to local layers.
    if "transformer_engine" in flags:
        resolved.args.transformer_impl = "transformer_engine"
        resolved.args.apply_rope_fusion = True
    in_training = Planning.of(resolved, device, None).cost_model
    assert isinstance(in_training, AnalyticCostModel)
    alone = replace(in_training, pool=None, cp_comm_type="auto")
    assert row["max_tokens"] == alone.max_tokens(Scheme(tp=2))
    assert row["max_tokens"] <= replace(
        alone, qk_norms=False, softmax_type="vanilla", has_wide_norms=False
    ).max_tokens(Scheme(tp=2))


@pytest.mark.parametrize("flag", ["--glu-linear-offset=1", "--activation-func-clamp-value=7"])
def test_a_gate_with_settings_keeps_more(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    fused, separate = (
        estimated(*more, capsys=capsys)["schemes"][0]["max_tokens"] for more in ((), (flag,))
    )
    assert separate < 0.85 * fused
