"""Public argument sets of others start as they are, or are refused for features not built."""

import argparse
import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from megatron.training.arguments import moe_freq_type, no_rope_freq_type, tuple_type

from megatron.hydraulis.__main__ import COMMANDS, Command, _without_launch_options
from megatron.hydraulis.command_line import CommandParser
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.model_arguments import (
    TE_LAYERS,
    given_settings,
    job_precision,
    shape_of,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.flags.defaults import chosen_layers
from megatron.hydraulis.flags.honoured import HONOURED
from megatron.hydraulis.library.planning import analytic_cost_model
from megatron.hydraulis.loop.job import Job, UserHooks
from megatron.hydraulis.ranges import RANGES
from tests.support import tiny_corpus
from tests.support.launch_arguments import SETS, header_of, options_of
from tests.unit.flags.argument_command import base_command, flag_parser, parse, write_corpus

OURS = {field.name for field in dataclasses.fields(HydraulisConfig)}
PLANNING = [command for command in COMMANDS if command.takes_launch_options]
ESTIMATE = next(command for command in PLANNING if command.name == "estimate")
REFUSED_FOR = (
    "--fp8-format",
    "--fp16",
    "--hybrid-layer-pattern",
    "--is-hybrid-model",
    "--spec",
)
"""Features that are not built, or need a package that is not there."""
KERNELS_OF_EXPERTS = {
    "--moe-grouped-gemm": "moe_grouped_gemm",
    "--moe-permute-fusion": "moe_permute_fusion",
}
ON_H100 = "--device h100 --transformer-impl transformer_engine --max-tokens-per-micro-batch 4096"
MODEL_ONLY = (
    "--seq-length 4096 --max-position-embeddings 4096 --train-iters 100 --lr 1e-4 "
    "--global-batch-size 64"
)
"""What a set asks to be added that describes a model alone."""


def _words_of(name: str) -> list[str]:
    return [word for option in options_of(name) for word in option]


def _parse_set(name: str, corpus: str, *more: str) -> Resolved:
    header = header_of(name)
    num_ranks = int(next(line.split()[2] for line in header if line.startswith("# ranks")))
    argv = _words_of(name)
    if any("model arguments only" in line for line in header):
        argv += MODEL_ONLY.split()
    data = f"--data-path {corpus} --tokenizer-type NullTokenizer --vocab-size 32000"
    argv += [*data.split(), "--ignore-unknown-options", "--dry-run", *more]
    return parse_arguments(argv, num_ranks=num_ranks, rank=0, flag_parser=flag_parser())


STARTING = {
    *("llmjp_v3_1.8b", "llmjp_v3_172b", "llmjp_v4_8b_decay", "llmjp_v4_train_1.3b"),
    *("modelopt_Llama-3.1-8B-Instruct", "modelopt_Qwen2.5-7B-Instruct", "modelopt_Qwen3-8B"),
    *("modelopt_DeepSeek-R1", "modelopt_gpt-oss-20b"),
    *("pai_llama3_1_8b", "pai_mistral_7b", "pai_qwen2_5_7b", "pai_qwen2_7b"),
    *("llmjp_v4_32b_a3.8b", "llmjp_v4_332b_moe", "pai_qwen3_30b_a3b"),
    *("slime_kimi-k2", "slime_moonlight", "slime_qwen3-30B-A3B", "slime_qwen3-8B"),
    *("pai_deepseek_v2", "pai_moonlight", "swiss_llama3_70b"),
}


def _dry_run(resolved: Resolved) -> None:
    Job(resolved, UserHooks(), has_cuda=False).print_description()


def test_argument_sets_of_others_start_or_are_refused_for_named_features(tmp_path: Path) -> None:
    """Large models too, whose dry run needs no machine that could train them, nor kernels for
    experts."""
    largest_batch = 2048
    corpus = tiny_corpus.write_corpus(tmp_path / "corpus", [4] * (largest_batch + 100))
    starting, with_kernels = set(), set()
    for name in SETS:
        try:
            _dry_run(_parse_set(name, corpus))
            starting.add(name)
            if any([option] in options_of(name) for option in KERNELS_OF_EXPERTS):
                named = _parse_set(name, corpus, *ON_H100.split())
                _dry_run(named)
                args = named.args
                assert not any("CPU" in str(difference) for difference in named.differences)
                for option, dest in KERNELS_OF_EXPERTS.items():
                    assert getattr(args, dest) == ([option] in options_of(name)), name
                assert args.transformer_impl == TE_LAYERS
                with_kernels.add(name)
        except ConfigurationError as error:
            lines = [line.strip() for line in str(error).splitlines()]
            assert any(line.startswith(REFUSED_FOR) for line in lines), name
    assert len(SETS) == 28
    assert starting == STARTING
    assert len(with_kernels) == 7


def test_a_dry_run_without_gpu_is_for_the_device_of_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"tp": 1, "cp": 1, "pp": 1, "a_ms_per_token2": 1e-6, "b_ms_per_token": 1, "c_ms": 1}
    profile = {"source": "s", "date": "2026-01-01", "schemes": [row | {"max_tokens": 512}]}
    corpus = tiny_corpus.write_corpus(tmp_path / "real")
    predicted_ms = []
    for device, named in (("h100", ()), ("cpu", ()), ("cpu", ("--device", "h100"))):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(profile | {"device": device}))
        typed = ("--dry-run", "--cost-profile", str(path), "--data-path", corpus)
        _dry_run(parse(tmp_path, *typed, "--hidden-size", "1024", *named))
        (text,) = re.findall(r"regrouping and optimizer (\S+) ms", capsys.readouterr().out)
        predicted_ms.append(float(text))
    assert predicted_ms[0] == predicted_ms[2] < predicted_ms[1] / 10
    path.write_text(json.dumps(profile | {"device": "h100", "schemes": [row | {"max_tokens": 50}]}))
    with pytest.raises(ConfigurationError, match=r"trains 96 tokens but no replica .* than 50 "):
        _dry_run(parse(tmp_path, *typed))


def _given_to(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The options of a set, parsed by a planning command."""
    monkeypatch.setattr("megatron.hydraulis.flags.parser.FlagParser", flag_parser)
    parser = CommandParser()
    parser.accept = _without_launch_options
    importlib.import_module(command.module).add_arguments(parser)
    for action in parser._actions:
        action.required = False
    return parser.parse_args(
        [*_words_of(name), "--ignore-unknown-options", "--vocab-size", "32000"]
    )


@pytest.mark.parametrize("name", sorted(STARTING))
def test_estimate_gives_a_set_the_meaning_that_it_has_in_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = _parse_set(name, write_corpus(tmp_path))
    in_training = analytic_cost_model(resolved, device_constants("h100"))
    namespace = _given_to(ESTIMATE, name, monkeypatch)
    shape = shape_of(namespace)
    assert shape == resolved.shape
    has_te_layers = given_settings(namespace, shape)["has_te_layers"]
    # Where there is CUDA; here training has local layers.
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    flags = flag_parser().parse([*_words_of(name), "--ignore-unknown-options"])
    layers = chosen_layers(flags, flags.args.transformer_impl, has_cuda=True)
    assert has_te_layers == (layers == TE_LAYERS)
    namespace.transformer_impl = "local"
    settings = given_settings(namespace, shape)
    settings["precision"] = job_precision(namespace)
    assert settings == {field: getattr(in_training, field) for field in settings}


@pytest.mark.parametrize("command", PLANNING, ids=lambda command: command.name)
def test_every_planning_command_takes_a_set(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = _given_to(command, "pai_qwen3_30b_a3b", monkeypatch)
    assert namespace.launch_options
    assert namespace.bf16
    assert namespace.moe_router_topk == 8
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("options without effect here: ")
    assert "--micro-batch-size" in line
    assert "--bf16" not in line


def test_options_of_training_differ_from_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And from those that training refuses, or that mean the batches of a command."""
    monkeypatch.setattr("megatron.hydraulis.flags.parser.FlagParser", flag_parser)
    for typed, training_words, launch_options in (
        ("--seed 3 --mock-data --bf16 --use-checkpoint-args --lr 1", "--bf16 --lr 1 FLAGS", True),
        ("--norm-epsilon 1 --recompute-granularity full --cp-comm-type p2p", None, False),
    ):
        others, found = _without_launch_options(typed.split(), typed.split())
        assert others == []
        assert found == {
            "training_words": (training_words or f"{typed} FLAGS").split(),
            "training_seq_length": None,
            "launch_options": launch_options,
        }


@pytest.mark.parametrize("name", sorted(STARTING))
def test_what_a_set_says_of_the_model_reaches_the_model(name: str, tmp_path: Path) -> None:
    typed = {option: values for option, *values in options_of(name)}
    args = _parse_set(name, write_corpus(tmp_path)).args
    uses_rope = "--use-rotary-position-embeddings" in typed
    default = "rope" if uses_rope else "learned_absolute"
    assert args.position_embedding_type == typed.get("--position-embedding-type", [default])[0]
    for option, dest, convert in (
        ("--rotary-base", "rotary_base", int),
        ("--rotary-percent", "rotary_percent", float),
        ("--num-layers", "num_layers", int),
        ("--hidden-size", "hidden_size", int),
        ("--ffn-hidden-size", "ffn_hidden_size", int),
        ("--num-query-groups", "num_query_groups", int),
        ("--kv-channels", "kv_channels", int),
        ("--normalization", "normalization", str),
        ("--norm-epsilon", "layernorm_epsilon", float),
        ("--init-method-std", "init_method_std", float),
        ("--adam-beta2", "adam_beta2", float),
        ("--clip-grad", "clip_grad", float),
        ("--lr", "lr", float),
        ("--min-lr", "min_lr", float),
    ):
        if option in typed:
            assert getattr(args, dest) == convert(typed[option][0]), option
    assert args.use_rope_scaling == ("--use-rope-scaling" in typed)
    assert args.swiglu == ("--swiglu" in typed)
    assert args.add_bias_linear == ("--disable-bias-linear" not in typed)
    assert args.qk_layernorm == ("--qk-layernorm" in typed)


def test_kernels_for_experts_give_way_to_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Transformer Engine is not installed, or nothing on this machine could run it."""
    typed = (
        "--num-experts 4 --disable-bias-linear --moe-grouped-gemm --moe-permute-fusion "
        "--moe-token-dispatcher-type flex --moe-enable-deepep"
    )
    for has_cuda, why in (
        (True, "layers are not Transformer Engine's"),
        (False, "the device is a CPU"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=has_cuda: found)
        resolved = parse(tmp_path, *typed.split())
        args, taken = resolved.args, dict(resolved.taken)
        assert args.moe_token_dispatcher_type == "alltoall"
        assert (args.transformer_impl, args.apply_rope_fusion) == ("local", False)
        assert (args.moe_grouped_gemm, args.moe_permute_fusion) == (False, False)
        assert taken["--moe-token-dispatcher-type flex"] == "run as alltoall, with the same result"
        assert taken["--moe-grouped-gemm"] == taken["--moe-permute-fusion"]
        assert why in taken["--moe-grouped-gemm"]
        assert "plain collectives" in taken["--moe-enable-deepep"]


def test_a_dry_run_is_for_the_device_that_it_names(tmp_path: Path) -> None:
    """Layers of Transformer Engine, too, which need not be installed where the dry run is."""
    typed = (
        "--dry-run --device h100-80g --cost-profile FILE --transformer-impl transformer_engine "
        "--distributed-backend nccl --position-embedding-type rope"
    )
    resolved = parse(tmp_path, *typed.split())
    assert resolved.args.transformer_impl == "transformer_engine"
    assert resolved.args.apply_rope_fusion
    ((option, why),) = resolved.taken
    assert option == "--device h100-80g"
    assert "those of --cost-profile" in why
    assert not any("CPU" in str(difference) for difference in resolved.differences)


def test_what_was_taken_is_listed_with_what_happens_instead(tmp_path: Path) -> None:
    resolved = parse(
        tmp_path,
        *("--micro-batch-size", "4", "--use-distributed-optimizer", "--save-interval", "5"),
        *("--exp-avg-dtype", "bf16", "--distributed-backend", "nccl"),
    )
    taken = dict(resolved.taken)
    for typed, instead in (
        ("--micro-batch-size 4", "--max-tokens-per-micro-batch"),
        ("--exp-avg-dtype bf16", "fp32"),
        ("--save-interval 5", "only with --save"),
        ("--distributed-backend nccl", "gloo"),
    ):
        assert instead in taken.pop(typed)
    assert taken == {}
    assert resolved.args.use_distributed_optimizer


def test_sizes_of_one_layout_yield_to_a_strategy_and_stand_for_one_alone(tmp_path: Path) -> None:
    sizes = (
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--context-parallel-size", "2"),
    )
    assert [s.name for s in parse(tmp_path, *sizes).pool.strategies] == ["tp2cp2pp2"]
    with_strategy = parse(tmp_path, *sizes, "--strategy", "4*tp2")
    assert [s.name for s in with_strategy.pool.strategies] == ["4*tp2"]
    assert len(with_strategy.taken) == 3
    taken = dict(with_strategy.taken)
    assert taken["--tensor-model-parallel-size 2"] == "--strategy 4*tp2 wins: its tp is 2"


def test_every_default_that_differs_from_upstreams_is_listed(tmp_path: Path) -> None:
    """Over the whole parser: what parsing leaves and training gets differ only where we say so."""
    nothing_given = flag_parser()._parser.parse_args([])
    resolved = parse(tmp_path)
    given = {
        action.dest
        for action in flag_parser()._parser._actions
        if set(action.option_strings) & resolved.explicit
    }
    derived = {  # by upstream's checks, from other settings
        *("ffn_hidden_size", "kv_channels", "padded_vocab_size", "eval_global_batch_size"),
        *("add_qkv_bias", "recompute_activations", "split"),
        *("start_weight_decay", "end_weight_decay", "accumulate_allreduce_grads_in_fp32"),
        "expert_tensor_parallel_size",
    }
    listed = {d.typed.removeprefix("no ").split()[0] for d in resolved.differences}
    derived |= {"eval_iters"}  # none without --eval-interval
    missing = []
    for action in flag_parser()._parser._actions:
        dest = action.dest
        if dest in OURS or dest in given | derived or dest == "help":
            continue
        before, after = getattr(nothing_given, dest), getattr(resolved.args, dest, None)
        names = {
            option
            for a in flag_parser()._parser._actions
            if a.dest == dest
            for option in a.option_strings
        }
        if before != after and action.option_strings[0] in HONOURED and not names & listed:
            missing.append((action.option_strings[0], before, after))
    assert missing == []


def test_users_see_only_options_that_they_gave(tmp_path: Path) -> None:
    """Not the numbers that stand in for intervals, nor defaults of options that they gave."""
    resolved = parse(tmp_path, "--num-workers", "4", "--save", "x")
    assert [typed for typed, _ in resolved.taken] == ["--num-workers 4"]
    differences = [str(each) for each in resolved.differences]
    assert not any("--num-workers" in each for each in differences)
    assert "no --eval-interval: no evaluation during training" in differences
    assert "no --save-interval: one checkpoint, at the end" in differences
    assert not any("save-interval 1" in each or "eval-interval 1" in each for each in differences)


def test_gradients_in_bf16_are_added_in_another_way(tmp_path: Path) -> None:
    given = parse(tmp_path, "--bf16", "--grad-reduce-in-bf16")
    (bf16,) = (each.why for each in given.differences if each.typed == "--grad-reduce-in-bf16")
    assert "added in fp32" in bf16
    (taken,) = parse(tmp_path, "--grad-reduce-in-bf16").taken
    assert taken == ("--grad-reduce-in-bf16", "it has an effect only with --bf16")


def test_no_mlp_is_recomputed_in_a_model_with_experts(tmp_path: Path) -> None:
    typed = "--num-experts 4 --disable-bias-linear --moe-layer-freq [1,0]*2 --recompute-activations"
    resolved = parse(tmp_path, *typed.split(), "--recompute-modules", "core_attn", "mlp")
    assert resolved.args.recompute_modules == ["core_attn"]
    assert "--recompute-modules mlp" in dict(resolved.taken)


@pytest.mark.parametrize(("layers", "kept"), [("local", ["layernorm", "moe_act"]), ("te", [])])
def test_norms_and_experts_activations_are_recomputed_with_transformer_engine(
    layers: str, kept: list[str], tmp_path: Path
) -> None:
    typed = "--num-experts 4 --disable-bias-linear --recompute-activations --bf16 --dry-run"
    typed += " --device h100"
    if layers == "te":
        typed += " --transformer-impl transformer_engine --moe-grouped-gemm"
    modules = ["core_attn", "layernorm", "moe_act", "moe"]
    resolved = parse(tmp_path, *typed.split(), "--recompute-modules", *modules)
    assert resolved.args.recompute_modules == [m for m in modules[:3] if m not in kept]
    named = [option for option, _ in resolved.taken if option.startswith("--recompute-modules")]
    assert named == [f"--recompute-modules {module}" for module in (*kept, "moe")]


def test_latent_attention_rotates_whatever_the_position_embedding(tmp_path: Path) -> None:
    typed = ("--rotary-base", "5000", "--rotary-percent", "0.5")
    assert len(parse(tmp_path, *typed).taken) == 2
    latent = ("--multi-latent-attention", *typed)
    assert not parse(tmp_path, *latent).taken
    resolved = parse(tmp_path, *latent, "--position-embedding-type", "rope", "--no-rope-freq", "2")
    ((option, why),) = resolved.taken
    assert option == "--no-rope-freq 2"
    assert "without effect" in why


def test_dropout_that_is_not_given_is_among_the_differences(tmp_path: Path) -> None:
    lines = [str(d) for d in parse(tmp_path).differences if d.changes_update]
    head = "--hidden-dropout 0.0 (Megatron: --hidden-dropout 0.1): "
    assert any(line.startswith(head) for line in lines)
    given = parse(tmp_path, "--hidden-dropout", "0", "--attention-dropout", "0")
    assert not any("dropout" in d.typed for d in given.differences if d.changes_update)


def test_the_global_batch_is_compared_with_upstreams(tmp_path: Path) -> None:
    text = parse(tmp_path).sizes.text(50.0, 128)
    assert re.match("8 seq.* 400 tokens; .* 8 rows of 128 .*--global-batch-tokens 1024", text)
    by_tokens = parse(tmp_path, "--global-batch-tokens", "1024", without=("--global-batch-size",))
    text = by_tokens.sizes.text(50.0, 128)
    assert re.match("1,024 tokens, about 20 sequences; .*--global-batch-size 8", text)


_VALUES = ("-1", "0", "nan", "inf", "100000000000000000000")


def test_every_number_has_a_range_and_those_outside_are_refused(tmp_path: Path) -> None:
    """Over the whole parser: a number is refused by its range, or training may begin with it."""
    actions = [
        action
        for action in flag_parser()._parser._actions
        if action.type in (int, float, tuple_type, moe_freq_type, no_rope_freq_type)
        and (action.option_strings[0] in HONOURED or action.dest in OURS)
    ]
    without_range = [a.option_strings[0] for a in actions if a.option_strings[0] not in RANGES]
    assert without_range == []
    for action in actions:
        option = action.option_strings[0]
        pair = ",0" if action.type is tuple_type else ""
        for value in _VALUES:
            number = _number(value, is_integer=action.type is not float)
            is_inside = number is not None and RANGES[option].problem(option, number) is None
            problem = _problem_with(tmp_path, option, value + pair)
            if problem is None:
                assert is_inside, (option, value)
            else:
                assert option in problem or is_inside, (option, value, problem)


def _number(text: str, *, is_integer: bool) -> float | None:
    try:
        return int(text) if is_integer else float(text)
    except ValueError:
        return None


def _problem_with(folder: Path, option: str, value: str) -> str | None:
    """The error of a command line with this value of one option; None if it is accepted."""
    command = base_command(folder, without=(option,))
    try:
        parse_arguments([*command, option, value], num_ranks=1, rank=0, flag_parser=flag_parser())
    except ConfigurationError as error:
        return str(error)
    return None
