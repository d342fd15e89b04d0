"""Command lines become one checked configuration, equal on every rank."""

import contextlib
import dataclasses
import io
import re
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import global_vars

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint.manifest import model_differences, model_of
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.config import HydraulisConfig, default_run_dir, option_of
from megatron.hydraulis.flags.honoured import HONOURED
from megatron.hydraulis.lora import Lora
from tests.unit.flags.argument_command import base_command, flag_parser, parse, write_corpus

pytestmark = pytest.mark.usefixtures("plain_environment")

EXPERTS = "--num-experts 4 --disable-bias-linear"

# The parser


def test_our_flags_do_not_collide_with_upstreams() -> None:
    ours = {field.name for field in dataclasses.fields(HydraulisConfig)}
    upstream = flag_parser().upstream_options
    assert len(upstream) > 800
    assert {option_of(name) for name in ours}.isdisjoint(upstream)
    dests = [action.dest for action in flag_parser()._parser._actions]
    assert all(dests.count(name) == 1 for name in ours)


@pytest.fixture(scope="module")
def shown_help() -> str:
    """--help without line breaks within words."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setenv("COLUMNS", "1000")
        with pytest.raises(SystemExit) as caught:
            flag_parser().parse(["--help"])
    assert caught.value.code == 0
    return shown.getvalue()


def test_help_shows_our_flags_then_those_that_are_honoured_and_no_others(shown_help: str) -> None:
    def place(option: str) -> int:
        found = re.search(rf"\n  {re.escape(option)}[ ,\n]", shown_help)
        assert found is not None, option
        return found.start()

    ours = [place(option_of(each.name)) for each in dataclasses.fields(HydraulisConfig)]
    theirs = [place(option) for option in HONOURED]
    assert max(ours) < min(theirs)
    assert "--linear-attention-freq" not in shown_help


def test_help_describes_our_behaviour_and_the_accepted_values(shown_help: str) -> None:
    shown = " ".join(shown_help.split())
    for text in (
        "--transformer-impl {local,transformer_engine} ",
        "Layers of megatron-core, or with CUDA of Transformer Engine; only local, "
        "transformer_engine.",
        "Cp of every replica, without --strategy and --strategy-pool.",
        "On wherever tp > 1, unless --no-sequence-parallel.",
        "State sharded over all ranks: always so.",
        "Global batches of an evaluation, 100 if only --eval-interval is given;",
        "--global-batch-size N Sequences of a global batch; packing makes",
        "--exit-signal NAME ",
    ):
        assert text in shown


def test_help_of_every_number_of_ours_states_its_unit() -> None:
    texts = {
        action.dest: action.help or ""
        for action in flag_parser()._parser._actions
        if action.option_strings[0] not in flag_parser().upstream_options
    }
    numbers = [f.name for f in dataclasses.fields(HydraulisConfig) if f.type in (int, int | None)]
    assert len(numbers) == 11
    units = ("(tokens)", "(ranks)", "(layers)", "(checkpoints)", "(iterations)", "(rows of A)")
    for name in numbers:
        assert any(unit in texts[name] for unit in units), name


def test_the_last_value_of_a_repeated_flag_wins(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--strategy", "8*tp1", "--seed", "1", "--seed=2", "--strategy=4*tp2")
    assert resolved.args.seed == 2
    assert _strategies(resolved) == ["4*tp2"]


@pytest.mark.parametrize(
    ("typed", "wish"),
    [
        ((), True),
        (("--no-sequence-parallel",), False),
        (("--no-sequence-parallel", "--sequence-parallel"), True),
        (("--sequence-parallel", "--no-sequence-parallel"), False),
    ],
)
def test_the_last_of_the_two_sequence_parallel_flags_wins(
    typed: tuple[str, ...], wish: bool, tmp_path: Path
) -> None:
    resolved = parse(tmp_path, *typed, "--tensor-model-parallel-size", "2")
    assert resolved.hydraulis.sequence_parallel is wish
    assert resolved.args.sequence_parallel is False


def test_explicit_holds_the_options_as_typed(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--bf16", "--min-lr=0", "--run-dir", "d")
    typed = {word for word in base_command(tmp_path) if word.startswith("--")}
    assert resolved.explicit == typed | {"--bf16", "--min-lr", "--run-dir"}


# Our flags


def test_defaults_of_ours(tmp_path: Path) -> None:
    hydraulis = parse(tmp_path).hydraulis
    assert hydraulis == HydraulisConfig()
    assert hydraulis.long_sequences == "split"
    assert hydraulis.max_tokens_per_micro_batch is None
    assert hydraulis.run_dir == Path("runs/latest")


def test_our_values_are_not_among_upstreams_arguments(tmp_path: Path) -> None:
    resolved = parse(
        tmp_path,
        *["--strategy", "4*tp2", "--long-sequences", "drop", "--global-batch-tokens", "4096"],
        *["--max-tokens-per-micro-batch", "512", "--run-dir", "r", "--plan-dir", "p", "--dry-run"],
        *["--skip-nan-iterations", "--ranks-per-node", "4", "--num-ranks", "8"],
        num_ranks=1,
        without=("--global-batch-size",),
    )
    assert resolved.hydraulis == HydraulisConfig(
        strategy="4*tp2",
        long_sequences="drop",
        global_batch_tokens=4096,
        max_tokens_per_micro_batch=512,
        run_dir=Path("r"),
        plan_dir=Path("p"),
        dry_run=True,
        skip_nan_iterations=True,
        ranks_per_node=4,
        num_ranks=8,
    )
    for field in dataclasses.fields(HydraulisConfig):
        assert not hasattr(resolved.args, field.name)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "latest"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "latest"),
        ({"TORCHELASTIC_RUN_ID": "7f3a"}, "7f3a"),
        ({"TORCHELASTIC_RUN_ID": "7f3a", "SLURM_JOB_ID": "1234"}, "1234"),
        # What differs between ranks must not enter the name.
        ({"RANK": "3", "LOCAL_RANK": "1"}, "latest"),
    ],
)
def test_default_run_dir_is_named_by_the_launcher(environment: dict[str, str], name: str) -> None:
    assert default_run_dir(environment) == Path("runs") / name


@pytest.mark.parametrize(
    "name", ["global_batch_tokens", "max_tokens_per_micro_batch", "ranks_per_node"]
)
def test_numbers_of_ours_are_positive(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{option_of(name)} must be at least 1 but is 0"):
        parse(tmp_path, option_of(name), "0", without=("--global-batch-size",))


# What upstream sees


def test_upstream_sees_one_data_parallel_group(tmp_path: Path) -> None:
    # 7 sequences could not be distributed over two or more data-parallel ranks.
    resolved = parse(
        tmp_path, "--strategy", "tp2pp2+2*tp2", "--global-batch-size", "7", num_ranks=8, rank=3
    )
    args = resolved.args
    assert (args.data_parallel_size, args.micro_batch_size, args.global_batch_size) == (1, 1, 7)
    sizes = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    assert sizes == (1, 1, 1)
    assert (args.world_size, args.rank) == (8, 3)


def test_the_environment_of_a_launcher_does_not_affect_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    args = parse(tmp_path, num_ranks=2, rank=1).args
    assert (args.world_size, args.rank) == (2, 1)


def test_parsing_does_not_change_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(tmp_path, "--run-dir", str(tmp_path / "run"))
    assert not torch.distributed.is_initialized()
    assert global_vars._GLOBAL_ARGS is None
    assert global_vars._GLOBAL_TOKENIZER is None
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_ranks_differ_only_in_their_rank(tmp_path: Path) -> None:
    first, last = parse(tmp_path, rank=0), parse(tmp_path, rank=7)
    differing = {key for key in vars(first.args) if vars(first.args)[key] != vars(last.args)[key]}
    assert differing == {"rank"}
    assert (first.hydraulis, first.pool) == (last.hydraulis, last.pool)


def test_upstream_takes_the_arguments(tmp_path: Path) -> None:
    # The last rank would open TensorBoard's writer.
    resolved = parse(tmp_path, "--global-batch-size", "6", num_ranks=2, rank=0)
    try:
        global_vars.set_global_variables(resolved.args)
        assert global_vars.get_args() is resolved.args
        assert global_vars.get_tokenizer().vocab_size == 200
        assert get_current_global_batch_size() == 6
    finally:
        global_vars.unset_global_variables()


def test_defaults_that_we_set(tmp_path: Path) -> None:
    args = parse(tmp_path, "--run-dir", "somewhere").args
    assert args.log_interval == 1
    assert args.log_throughput is True
    assert (args.hidden_dropout, args.attention_dropout) == (0.0, 0.0)
    assert args.calculate_per_token_loss is True
    assert args.max_position_embeddings == 128
    assert args.tensorboard_dir == "somewhere/tensorboard"
    assert args.wandb_save_dir == "somewhere/wandb"
    # Never reached in 10 iterations, and nothing is evaluated after them.
    assert args.eval_interval == 11
    assert args.eval_iters == 0


def test_evaluation_keeps_upstreams_length_if_an_interval_is_given(tmp_path: Path) -> None:
    args = parse(tmp_path, "--eval-interval", "5").args
    assert (args.eval_interval, args.eval_iters) == (5, 100)


def test_defaults_without_cuda(tmp_path: Path) -> None:
    args = parse(tmp_path, "--swiglu", "--position-embedding-type", "rope").args
    assert args.distributed_backend == "gloo"
    assert args.transformer_impl == "local"
    assert args.no_persist_layer_norm is True
    assert args.disable_jit_fuser is True
    assert args.num_workers == 0
    fusions = (
        args.apply_rope_fusion,
        args.gradient_accumulation_fusion,
        args.masked_softmax_fusion,
        args.bias_swiglu_fusion,
        args.bias_gelu_fusion,
        args.bias_dropout_fusion,
    )
    assert fusions == (False,) * 6


def test_defaults_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = parse(tmp_path).args
    assert args.distributed_backend == "nccl"
    assert args.bias_gelu_fusion is True
    assert args.disable_jit_fuser is False
    assert args.gradient_accumulation_fusion is False


def _only_te(name: str, package: str | None = None) -> object:
    return object() if name == "transformer_engine" else None


def test_layers_of_transformer_engine_add_to_gradients_and_rotate_without_apex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megatron.hydraulis.flags.checks.importlib.util.find_spec", _only_te)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", _only_te)
    layers = ("--transformer-impl", "transformer_engine", "--position-embedding-type", "rope")
    args = parse(tmp_path, *layers).args
    assert args.gradient_accumulation_fusion is True
    assert args.apply_rope_fusion is True
    assert parse(tmp_path, *layers, "--no-rope-fusion").args.apply_rope_fusion is False


def test_grouped_products_of_experts_select_transformer_engine_unless_layers_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("megatron.hydraulis.flags.checks.importlib.util.find_spec", _only_te)
    experts = ("--num-experts", "4", "--disable-bias-linear")
    grouped = (*experts, "--moe-grouped-gemm")
    for typed, layers in (
        (experts, "local"),
        (grouped, "transformer_engine"),
        ((*grouped, "--transformer-impl", "local"), "local"),
    ):
        args = parse(tmp_path, *typed).args
        assert args.transformer_impl == layers
        assert args.moe_grouped_gemm == (layers == "transformer_engine")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_dry_run_for_a_gpu_elsewhere_takes_its_layers_though_this_machine_lacks_them(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("megatron.hydraulis.flags.checks.importlib.util.find_spec", lambda *_: None)
    experts = ("--num-experts", "4", "--disable-bias-linear", "--moe-grouped-gemm", "--dry-run")
    for device, layers in (("h100-80g", "transformer_engine"), ("cpu", "local")):
        args = parse(tmp_path, *experts, "--device", device).args
        assert args.transformer_impl == layers
        assert args.moe_grouped_gemm == (layers == "transformer_engine")


# Strategy and batch


def _strategies(resolved: Resolved) -> list[str]:
    return [str(strategy) for strategy in resolved.pool.strategies]


def test_a_dry_run_on_one_process_has_the_ranks_of_its_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    pool = parse(tmp_path, "--dry-run", "--strategy", "tp2+2*tp1+idle", num_ranks=1).pool
    assert (pool.num_ranks, pool.ranks_per_node) == (5, 5)
    with pytest.raises(StrategyError, match="use 4 ranks but the job has 1"):
        parse(tmp_path, "--strategy", "tp2+2*tp1", num_ranks=1)


@pytest.mark.parametrize(
    ("typed", "num_ranks", "strategy"),
    [
        ("", 4, "4*tp1"),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8, "2*tp2pp2"),
        ("--pipeline-model-parallel-size 4", 4, "pp4"),
        (f"{EXPERTS} --expert-model-parallel-size 4", 8, "2*cp4~ep4"),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            4,
            "2*tp2ep2",
        ),
        (
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
            8,
            "2*tp2cp2~ep4",
        ),
        ("--expert-model-parallel-size 4", 4, "4*tp1"),
        ("--strategy tp2+2*tp1", 4, "tp2+2*tp1"),
        ("--strategy tp2@0,3+pp2:3,1@1,2", 4, "tp2@0,3+pp2:3,1@1,2"),
        ("--strategy tp2+2*idle", 4, "tp2+2*idle"),
    ],
)
def test_strategy(typed: str, num_ranks: int, strategy: str, tmp_path: Path) -> None:
    resolved = parse(tmp_path, *typed.split(), num_ranks=num_ranks)
    assert _strategies(resolved) == [strategy]
    assert resolved.pool.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("variable", "typed", "num_ranks", "ranks_per_node"),
    [
        (None, "", 8, 8),
        ("4", "", 8, 4),
        ("4", "--ranks-per-node 2", 8, 2),
        ("1", "--dry-run --num-ranks 16", 1, 8),
        ("1", "--dry-run --num-ranks 5", 1, 5),
        ("6", "", 12, 6),
        ("1", "--dry-run --num-ranks 16 --ranks-per-node 4", 1, 4),
    ],
)
def test_ranks_per_node(
    variable: str | None,
    typed: str,
    num_ranks: int,
    ranks_per_node: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    resolved = parse(tmp_path, *typed.split(), num_ranks=num_ranks)
    assert resolved.pool.ranks_per_node == ranks_per_node
    assert resolved.args.world_size == resolved.pool.num_ranks


@pytest.mark.parametrize(("num_ranks", "example"), [(12, 4), (10, 2), (15, 5), (13, None)])
def test_a_job_that_does_not_fill_nodes_of_8_says_how_large_its_nodes_are(
    num_ranks: int, example: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In training and in commands."""
    fix = r"give --ranks-per-node \(in Python ranks_per_node\)"
    fix += f", for example {example}, or" if example else " or"
    rule = f"{num_ranks} ranks do not fill such nodes; {fix} another"
    typed = ("--num-ranks", str(num_ranks))
    with pytest.raises(StrategyError, match=rule):
        parse(tmp_path, "--dry-run", *typed, num_ranks=1)
    model = ("--model", "examples/model_llama32b.json", "--device", "h100", "--schemes", "tp1")
    assert main(["estimate", *model, *typed]) == 2
    assert re.search(rule, capsys.readouterr().err)


def test_a_token_budget_counts_as_one_sequence_to_upstream(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--global-batch-tokens", "4096", without=("--global-batch-size",))
    assert resolved.args.global_batch_size == 1


def _shape_of(resolved: Resolved) -> tuple[int, ...]:
    shape = resolved.shape
    return (shape.num_query_groups, shape.kv_channels, shape.ffn_hidden_size, shape.vocab_size)


def test_shape_of_the_model(tmp_path: Path) -> None:
    plain = parse(tmp_path)
    assert _shape_of(plain) == (4, 16, 256, 256)
    assert plain.shape.tied_embeddings
    assert not plain.shape.gated_mlp
    other = parse(
        tmp_path,
        *["--group-query-attention", "--num-query-groups", "2", "--kv-channels", "8", "--swiglu"],
        *["--ffn-hidden-size", "96", "--untie-embeddings-and-output-weights"],
    )
    assert _shape_of(other) == (2, 8, 96, 256)
    assert not other.shape.tied_embeddings
    assert other.shape.gated_mlp


def test_blends_with_and_without_weights(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path, "one"), write_corpus(tmp_path, "two")
    for blend in (["0.3", one, "0.7", two], [one, two]):
        assert parse(tmp_path, "--data-path", *blend).args.data_path == blend


def test_adapters_are_resolved_and_described_for_checkpoints(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--lora-rank", "8", "--lora-targets", "linear_qkv", "up_proj")
    assert resolved.frozen.lora == Lora(8, 32.0, ("q_proj", "k_proj", "v_proj", "up_proj"))
    assert resolved.frozen.lora.arguments.items() <= model_of(resolved.args).items()
    (difference,) = model_differences(
        model_of(resolved.args),
        model_of(parse(tmp_path, "--lora-rank=8", *_TARGETS, "--lora-alpha", "4").args),
    )
    assert difference == "lora_alpha is 32.0 there and 4.0 here"
    assert not model_differences(model_of(parse(tmp_path).args), model_of(resolved.args))


_TARGETS = ("--lora-targets", "q_proj", "k_proj", "v_proj", "up_proj")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (_TARGETS, r"--lora-targets describes adapters but .* add --lora-rank N"),
        (("--lora-alpha", "3"), "--lora-alpha describes adapters"),
        (("--lora-rank", "0"), "--lora-rank must be at least 1"),
        (("--lora-rank", "2", "--lora-targets", "gate_proj"), "have 'gate_proj', which it lacks"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    tmp_path: Path, extra: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(tmp_path, *extra)
