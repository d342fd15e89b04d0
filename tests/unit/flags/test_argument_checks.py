"""Bad input gives one clear error with rule, numbers and fix, before any rank waits for another."""

import argparse
import contextlib
import dataclasses
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.utils import get_blend_from_list

from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.flags import checks
from megatron.hydraulis.flags.checks import check_spec
from megatron.hydraulis.flags.config import HydraulisConfig, option_of
from megatron.hydraulis.flags.honoured import HONOURED
from tests.unit.flags.argument_command import base_command, flag_parser, parse, write_corpus

pytestmark = pytest.mark.usefixtures("plain_environment")

_TOKENS = ("--global-batch-size",)
_ITERATIONS = ("--train-iters",)
_EXPERTS = "--num-experts 4 --disable-bias-linear"
_HYBRID = "--swiglu --hybrid-layer-pattern"
_BAD_INPUT = [
    (f"{_HYBRID} G-M-", ["layers of the kinds *, +, -, E, G", "'G-M-' has M"]),
    (f"{_HYBRID} *-*-/*-", ["layers of the kinds *, +, -, E, G", "'*-*-/*-' has /"]),
    (f"{_HYBRID} G-x-", ["--hybrid-layer-pattern G-x-", "'x' is not a valid layer symbol"]),
    (f"{_HYBRID} |", ["'|' has none"]),
    (f"{_HYBRID} GE*-", ["kind E are those", "is GE*- and --num-experts is not given"]),
    (f"{_HYBRID} G-*- {_EXPERTS}", ["kind E are those", "is G-*- and --num-experts 4"]),
    (f"{_HYBRID} GE*- {_EXPERTS} --moe-layer-freq 2", ["remove --moe-layer-freq"]),
    (f"{_HYBRID} G-*-G-", ["has 6 layers but --num-layers is 4", "remove --num-layers"]),
    ("--hybrid-layer-pattern G-*-", ["gated delta nets have SiLU", "--swiglu is missing"]),
    (f"{_HYBRID} *-*- --use-rope-scaling --position-embedding-type rope", ["--use-rope-scaling"]),
    (f"{_HYBRID} +-+-", ["kind + are those of --multi-latent-attention", "is not given"]),
    (f"{_HYBRID} *-*- --multi-latent-attention", ["kind + are those of", "is *-*-"]),
    (f"{_HYBRID} *-*- --lora-rank 8", ["--lora-rank is given with --hybrid-layer-pattern"]),
    (
        f"{_HYBRID} G-*- --linear-num-key-heads 6 --linear-num-value-heads 9",
        ["--linear-num-value-heads 9", "--linear-num-key-heads 6", "use 3 heads"],
    ),
    (
        f"{_HYBRID} G-*- --linear-num-key-heads 2 --strategy tp2cp2+4*tp1",
        ["scheme tp2cp2 has groups of tp 2 and cp 2", "-key-heads is 2", "divides 2"],
    ),
    ("--swiglu --squared-relu", ["one activation", "--swiglu and --squared-relu give 2"]),
    ("--window-size 8,1", ["--window-size", "none after it", "is 8,1", "write N,0"]),
    ("--window-size 8", ["--window-size", "is 8;", "write N,0"]),
    ("--window-size 8,0 --window-attn-skip-freq 0", ["skip-freq counts", "but is 0"]),
    ("--window-size 8,0 --window-attn-skip-freq [1,0]*3", ["--num-layers 4", "lists 6 values"]),
    ("--position-embedding-type rope --no-rope-freq 3", ["-freq 3 divides", "--num-layers is 4"]),
    ("--no-rope-freq x", ["--no-rope-freq x: this is no value", "write N, or a list as ([0]"]),
    ("--window-size x", ["--window-size x: this is no value of the option; write N,0"]),
    (
        "--multi-latent-attention --position-embedding-type rope --rotary-interleaved",
        ["latent attention pairs the channels", "remove --rotary-interleaved"],
    ),
    ("--dry-run --data-path a b 2 c", ["--data-path a b 2 c: a blend gives a weight to every"]),
    ("--strategy 3*tp2", ["3 replicas use 6 ranks but the job has 8", "2*idle"]),
    ("--strategy 5*tp2", ["5 replicas use 10 ranks but the job has 8", "start 10 ranks"]),
    (f"{_EXPERTS} --strategy ep3", ["ep3 has ep 3 and the model 4", "use an ep that divides 4"]),
    (f"{_EXPERTS} --strategy cp3ep3", ["ep 3 and the model 4", "use an ep that divides 4"]),
    (f"{_EXPERTS} --strategy ep4", ["tp·cp = 1 ranks a stage and ep 4", "or cp4ep4"]),
    ("--tensor-model-parallel-size 3", ["3 ranks do not fill the job's 8", "change the deg"]),
    ("--strategy tp8", ["tp must divide the attention heads", "8", "4", "use a tp that"]),
    (
        "--strategy 2*tp4 --group-query-attention --num-query-groups 2",
        ["tp must divide the query groups", "tp 4", "is 2", "use a tp that divides 2"],
    ),
    ("--strategy 2*tp4 --ffn-hidden-size 90", ["divide the ffn hidden size", "tp 4", "is 90"]),
    (
        "--strategy 2*tp4 --hidden-size 66 --kv-channels 16",
        ["divide the hidden size", "tp 4", "is 66"],
    ),
    ("--strategy 2*tp4 --padded-vocab-size 202", ["padded vocabulary", "tp 4", "is 202", "204"]),
    ("--strategy pp8", ["8 stages but the model has 4 layers", "use at most pp4"]),
    ("--strategy 8*tq1", ["'8*tq1'", "write for example"]),
    (
        "--recompute-activations --recompute-granularity full --recompute-method block",
        ["--recompute-activations", "selective", "is full", "give one of them"],
    ),
    ("--recompute-granularity full", ["has None and 0", "give --recompute-method uniform"]),
    ("--recompute-granularity full --recompute-method block", ["has block and 0", "num-layers"]),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
        ["--recompute-num-layers must be at least 1 but is 0"],
    ),
    ("--recompute-activations --recompute-modules mlq", ["moe_act but names mlq"]),
    ("--recompute-activations --recompute-modules mlp", ["MLP without biases", "--disable-bias"]),
    ("--num-ranks 8", ["--num-ranks has an effect only with --dry-run", "give --dry-run"]),
    ("--dry-run --num-ranks 4", ["--num-ranks 4", "8 were started", "start one process"]),
    ("--ranks-per-node 3", ["nodes have 3 ranks", "8 ranks", "start 9 ranks"]),
    ("--ranks-per-node 9", ["--ranks-per-node is 9", "the job has 8", "at most 8"]),
    ("--keep-last 3", ["--keep-last has an effect only with --save", "give --save"]),
    ("--deterministic-mode --plan-time-limit 2", ["clock", "--plan-time-limit 2", "give one"]),
    ("--plan-time-limit 16 --distributed-timeout-minutes 1", ["at most 15 s", "is 16", "raise"]),
    ("--load-fallback", ["--load-fallback has an effect only with --load"]),
    ("--refit-drift 0.2", ["--refit-drift is not honoured", "use --report-drift 0.1"]),
    ("--max-skipped-in-a-row 3", ["only with --skip-nan-iterations, which is missing"]),
    ("--null-tokenizer-eod-id 200", ["is 200", "--vocab-size 200", "at most 199"]),
    ("--null-tokenizer-pad-id 1000", ["is 1000", "--vocab-size 200", "at most 199"]),
    ("--global-batch-tokens 512", ["--global-batch-size 8", "512", "give one of them"]),
    ("--train-samples 80", ["--train-iters 10 and --train-samples 80 both end training"]),
    (
        "--lr-decay-samples 80 --rampup-batch-size 4 4 8 --lr-warmup-samples 4",
        [
            "--train-iters 10",
            "--lr-decay-samples 80, --lr-warmup-samples 4 samples; give --train-s",
        ],
    ),
    ("--rampup-batch-size 4 -1 8", ["--rampup-batch-size must be at least 0 but is -1"]),
    ("--decoupled-lr 1e-4 --min-lr 5e-4", ["--decoupled-lr 0.0001 to --decoupled-min-lr 0.0005"]),
    ("--max-tokens-per-micro-batch 100", ["128 tokens", "is 100", "--seq-length 100 or less"]),
    ("--hidden-size 62", ["62 is not a multiple of --num-attention-heads 4", "--kv-channels"]),
    ("--max-position-embeddings 64", ["is 64", "--seq-length 128", "or leave it out"]),
    ("--min-lr 0.1", ["--lr 0.001", "--min-lr 0.1", "change one"]),
    ("--lr-warmup-init 0.1", ["--lr 0.001", "--lr-warmup-init is 0.1", "at most 0.001"]),
    ("--lr-warmup-iters 10", ["after 10 iterations", "shorten the warm-up"]),
    ("--lr-warmup-fraction 1.0", ["after 10 iterations", "shorten the warm-up"]),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", ["fraction 0.1", "-iters 2", "give one"]),
    ("--lr-decay-style WSD", ["is missing", "give --lr-wsd-decay-iters"]),
    ("--weight-decay 0.3 --start-weight-decay 0.1", ["-decay 0.3", "is 0.1", "incr-style linear"]),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.1",
        ["--start-weight-decay 0.1", "--end-weight-decay None", "give both"],
    ),
    ("--data-path nowhere", ["there is no nowhere.idx", "correct the prefix"]),
    ("--data-path 1 nowhere 2 nothing", ["there is no nowhere.idx", "--data-path nowhere"]),
    ("--data-path one nowhere 2 nothing", ["a weight to every prefix or to none", "write"]),
    ("--train-data-path x", ["both name the training corpus", "give one of them"]),
    ("--valid-data-path x", ["--data-path is cut by --split", "give --train-data-path"]),
    ("--exit-signal-handler --exit-signal SIGKILL", ["SIGKILL cannot be caught", "SIGTERM"]),
    ("--position-embedding-type rope --kv-channels 15", ["pairs of channels", "has 15"]),
    ("--position-embedding-type rope --rotary-percent 0.1", ["0.1 of 16 channels", "0.125"]),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", ["-iters 11", "10 iterations", "most 10"]),
    ("--exit-signal-handler --exit-signal SIGNONE", ["--exit-signal", "'SIGNONE'", "SIGTERM"]),
    ("--exit-signal-handler --exit-signal 15", ["--exit-signal takes", "'15'", "SIGUSR1"]),
    ("--run-dir=", ["--run-dir has an empty value", "leave it out"]),
    ("--save a\x1b[2Jb", [r"no control characters but is 'a\x1b[2Jb'", "another name"]),
    ("--seed 4294967296", ["--seed must be at most 4,294,967,295 but is 4294967296"]),
    (f"{_EXPERTS} --moe-router-topk 5", ["topk is 5 and --num-experts 4", "at most 4"]),
    (f"{_EXPERTS} --moe-router-topk 1", ["the softmax over", "add --moe-router-pre-softmax"]),
    (f"{_EXPERTS} --moe-router-group-topk 1", ["--moe-router-num-groups is missing"]),
    (f"{_EXPERTS} --moe-router-num-groups 4", ["--moe-router-group-topk is missing"]),
    (f"{_EXPERTS} --moe-router-enable-expert-bias", ["-function is softmax", "give sigmoid"]),
    (
        f"{_EXPERTS} --moe-router-num-groups 3 --moe-router-group-topk 1",
        ["--num-experts 4 is not a multiple of --moe-router-num-groups 3", "that divides 4"],
    ),
    (
        f"{_EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 2 --moe-router-topk 3",
        ["--moe-router-topk 3 are chosen from --moe-router-group-topk 2", "2 experts each"],
    ),
    (f"{_EXPERTS} --moe-aux-loss-coeff 0.1 0.2", ["--moe-aux-loss-coeff has 2 values"]),
    (f"{_EXPERTS} --moe-layer-freq [1,0]", ["each of --num-layers 4", "lists 2 values"]),
    (f"{_EXPERTS} --moe-layer-freq abc", ["--moe-layer-freq abc: ", "write N, or a list"]),
    (f"{_EXPERTS} --moe-layer-freq [0]*4", ["at least 1 layer", "all 4; write a 1 for a layer"]),
    (
        "--multi-latent-attention --group-query-attention --num-query-groups 2",
        ["makes keys for each of --num-attention-heads 4 heads", "remove one"],
    ),
    ("--multi-latent-attention --qk-pos-emb-head-dim 5", ["a head has 5", "give an even --qk"]),
    ("--multi-latent-attention --v-head-dim 0", ["--v-head-dim must be at least 1 but is 0"]),
    (
        "--multi-latent-attention --position-embedding-type yarn",
        ["latent attention has YaRN by --rope-type", "--rope-type yarn"],
    ),
    (
        "--num-experts 4 --moe-shared-expert-intermediate-size 8",
        ["shared experts have no biases", "--disable-bias-linear"],
    ),
    (f"{_EXPERTS} --moe-router-score-function sqrtsoftplus", ["not honoured", "use softmax or"]),
    (f"{_EXPERTS} --expert-model-parallel-size 8", ["is 8 and --num-experts 4", "that divides 4"]),
    (
        f"{_EXPERTS} --expert-model-parallel-size 4 --expert-tensor-parallel-size 3",
        ["--expert-model-parallel-size 4 times --expert-tensor-parallel-size 3", "divides 8"],
    ),
    (
        f"{_EXPERTS} --context-parallel-size 3 --expert-model-parallel-size 2",
        ["strategy of cp3 alone: replicas of 3 ranks do not fill the job's 8", "start 6"],
    ),
    ("--spec one", ["1 values: one", "write --spec package.module name"]),
    ("--spec no.such name", ["cannot be imported", "PYTHONPATH"]),
    ("--spec math no_such", ["the module has no no_such", "name a layer spec"]),
    ("--padded-vocab-size 100", ["200 tokens", "--padded-vocab-size is 100", "200 or more"]),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file nowhere.json", ["nowhere.json", "correct"]),
    ("--tokenizer-type TikTokenizer", ["--tokenizer-model, which is missing"]),
]
"""What is typed beside a complete command line -> what the error says."""
_BAD_SAMPLES = [
    ("--lr-warmup-iters 2", ["80 counts samples and --lr-warmup-iters 2 iterations"]),
    ("--lr-warmup-samples 40 --lr-decay-samples 40", ["after 40 samples", "samples is 40"]),
    ("--lr-decay-style WSD", ["a number of samples that is missing; give --lr-wsd-decay-samples"]),
    ("--rampup-batch-size 2 4 16", ["2 sequences by 4", "give for example --global-batch-size 6"]),
    ("--rampup-batch-size 8 2 16", ["--global-batch-size 8", "--global-batch-size 10"]),
    ("--rampup-batch-size 2 0 16", ["--rampup-batch-size 2 0 16", "at least 1"]),
    (
        "--rampup-batch-size 2 2 16 --step-batch-size-schedule 0:2,1K:8",
        ["both let the global batch grow"],
    ),
    ("--step-batch-size-schedule 0:2,1K:4", ["4 sequences", "--global-batch-size is 8"]),
    ("--step-batch-size-schedule 0:4,1K:2", ["'0:4,1K:2'", "4 sequences from 0", "ascending"]),
    ("--step-batch-size-schedule 1K:2", ["must have threshold 0, got 7", "with 0 first"]),
    ("--step-batch-size-schedule 0:x", ["--step-batch-size-schedule '0:x'", "float: 'X'"]),
]
"""The same beside --train-samples 80 instead of --train-iters."""
_BAD_WITHOUT = [
    ("", _TOKENS, ["the global batch has no size", "--global-batch-tokens"]),
    ("--train-samples 7", _ITERATIONS, ["--train-samples is 7", "8 sequences; give more samples"]),
    (
        "--train-samples 80 --rampup-batch-size 2 2 16 --global-batch-tokens 1000",
        (*_ITERATIONS, *_TOKENS),
        ["samples of 128 tokens", "--global-batch-tokens 1000; give for example", "768"],
    ),
    ("--global-batch-tokens 100", _TOKENS, ["128 tokens", "is 100", "128 or more"]),
    ("", ("--lr",), ["a flag without a default is missing; give --lr"]),
    ("", ("--lr", "--train-iters"), ["2 flags", "give --train-iters, --lr"]),
    ("", ("--tokenizer-type",), ["--tokenizer-type", "NullTokenizer --vocab-size N"]),
    ("", ("--data-path",), ["there is no training corpus", "give --data-path"]),
    ("", ("--vocab-size",), ["NullTokenizer is made from --vocab-size, which is missing"]),
]
"""The same, without these options of the command line."""


@pytest.mark.parametrize(
    ("typed", "without", "says"),
    [
        *((typed, (), says) for typed, says in _BAD_INPUT),
        *((f"--train-samples 80 {typed}", _ITERATIONS, says) for typed, says in _BAD_SAMPLES),
        *_BAD_WITHOUT,
    ],
)
def test_bad_input_gives_one_line_with_rule_numbers_and_fix(
    typed: str, without: tuple[str, ...], says: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, *typed.split(), without=without)
    message = str(caught.value)
    for part in says:
        assert part in message
    assert "\n" not in message
    assert "; " in message


def test_a_balancing_loss_of_rows_becomes_that_of_sequences_with_a_warning(tmp_path: Path) -> None:
    typed = f"{_EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff"
    warned = [each for each in parse(tmp_path, *typed.split(), "0.01").differences if each.warns]
    assert [str(each) for each in warned if "balancing loss is that of each sequence" in each.why]
    silent = [each for each in parse(tmp_path, *typed.split(), "0").differences if each.warns]
    assert not any("balancing" in each.why for each in silent)


def test_a_factor_of_positions_that_megatron_drops_is_a_warning(tmp_path: Path) -> None:
    for factor, says in (("32", ["to continue its training, give 8"]), ("8", [])):
        typed = f"--position-embedding-type rope --use-rope-scaling --rope-scaling-factor {factor}"
        warned = [each for each in parse(tmp_path, *typed.split()).differences if each.warns]
        found = [each for each in warned if "rope" in each.typed]
        assert len(found) == len(says)
        assert all(text in str(each) for text, each in zip(says, found, strict=True))


def test_data_of_sft_are_files_of_json_lines(tmp_path: Path) -> None:
    data = dict.fromkeys(checks.DATA_PATHS) | {"data_path": [f"{write_corpus(tmp_path)}.bin"]}
    with pytest.raises(ConfigurationError, match=r"--sft are files of JSON lines .* correct"):
        checks.check_data_files(Namespace(sft=True, **data))


def test_experts_that_a_strategy_cannot_cut_are_refused(tmp_path: Path) -> None:
    typed = [*_EXPERTS.split(), "--strategy", "2*tp2"]
    with pytest.raises(StrategyError, match="ffn hidden size of an expert is 9; use a tp that"):
        parse(tmp_path, *typed, "--moe-ffn-hidden-size", "9", num_ranks=4)


@pytest.mark.parametrize(
    ("typed", "what"),
    [(_EXPERTS, "routers need"), ("--multi-latent-attention", "projections to latents need")],
)
def test_what_tp_ranks_hold_completely_needs_sequence_parallelism(
    typed: str, what: str, tmp_path: Path
) -> None:
    typed_words = (*typed.split(), "--no-sequence-parallel", "--strategy")
    with pytest.raises(ConfigurationError, match=f"{what}.*multiple 2; remove --no-sequence"):
        parse(tmp_path, *typed_words, "2*tp2", num_ranks=4)
    parse(tmp_path, *typed_words, "4*tp1", num_ranks=4)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--position-embedding-type learned_absolute", "learned_absolute; use rope or none"),
        ("--position-embedding-type rope --lora-rank 2", "--lora-rank is 2 and --mtp-num-layers 1"),
        ("--position-embedding-type rope --strategy 2*cp2fs", "'2*cp2fs' has fs; leave fs out"),
    ],
)
def test_what_does_not_go_with_multi_token_prediction_is_refused(
    typed: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, "--mtp-num-layers", "1", *typed.split(), num_ranks=4)
    assert says.replace("'", "") in str(caught.value).replace("'", "")


def test_gloo_on_a_machine_with_cuda_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="set CUDA_VISIBLE_DEVICES= to train on the CPU"):
        parse(tmp_path, "--distributed-backend", "gloo")


def refusing(error: Exception) -> Callable[[object], None]:
    def refuse(args: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("function", "upstreams", "reason"),
    [
        ("validate_args", refusing(AssertionError("too\nmany   layers")), "too many layers"),
        ("validate_args", refusing(ValueError("no such thing")), "no such thing"),
        # An assertion without a message shows its condition.
        ("validate_args", lambda _: get_blend_from_list(["one", "x", "2", "y"]), "all(is_none)"),
        ("gpt_model_config", refusing(ValueError("rotary")), "rotary"),
    ],
)
def test_an_error_of_upstream_becomes_one_line(
    function: str, upstreams: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"megatron.hydraulis.flags.arguments.{function}", upstreams)
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, "--position-embedding-type", "rope", "--rotary-interleaved")
    assert str(caught.value) == f"Megatron refuses these flags: {reason}; change the flags it names"


def test_the_whole_command_line_is_checked_at_once(tmp_path: Path) -> None:
    """From the words to the pool; nothing is said of what depends on a wrong or missing flag."""
    typed = (
        "--lr-warmup-iters -1 --adam-eps nan --no-such-option --linear-attention-freq 8 "
        "--plan-ahead -2 --strategy 2*tp8 --elastic --regroup-owners-for x --keep-last 3 "
        "--min-lr 1 --clip-grad -1 --exit-signal-handler --exit-signal SIGKILL --data-path nowhere "
        "--padded-vocab-size 100"
    )
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, *typed.split(), num_ranks=8, without=("--train-iters", "--data-path"))
    first, *lines = str(caught.value).splitlines()
    says = [
        "--no-such-option is unknown",
        "--lr-warmup-iters must be at least 0",
        "--adam-eps must be a number",
        "--linear-attention-freq is not honoured",
        "--plan-ahead must be at least 0",
        "--clip-grad must be at least 0",
        "a flag without a default is missing; give --train-iters",
        "--keep-last has an effect only with",
        "--regroup-owners-for has an effect only with --strategy-pool",
        "SIGKILL cannot be caught",
        "--min-lr 1.0, which must lie between",
        "there is no nowhere.idx",
        "--padded-vocab-size is 100",
    ]
    assert first == f"{len(says)} problems with these flags:"
    for line, words in zip(lines, says, strict=True):
        assert words in line


def test_what_strategy_and_model_make_wrong_is_listed_with_the_rest(tmp_path: Path) -> None:
    typed = "--strategy 2*tp4 --keep-last 3 --ffn-hidden-size 90 --cp-comm-type no_such"
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, *typed.split())
    kept, width, exchange = str(caught.value).splitlines()[1:]
    assert "only with --save" in kept
    assert "tp must divide the ffn hidden size" in width
    assert "--cp-comm-type takes 1 of" in exchange


def test_contradictory_flags_hide_no_other_problem(tmp_path: Path) -> None:
    typed = (
        "--num-ranks 8 --strategy 3*tp2 --strategy-pool x.json --min-lr 1 "
        "--group-query-attention --num-query-groups 3"
    )
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, *typed.split())
    ranks, pools, strategy, groups, rate = str(caught.value).splitlines()[1:]
    assert "both say which strategies the run uses" in pools
    assert "--num-ranks has an effect only with --dry-run" in ranks
    assert "strategy '3*tp2'" in strategy
    assert "--num-attention-heads 4 is not a multiple of --num-query-groups 3" in groups
    assert "--min-lr 1.0, which must lie between" in rate


@pytest.mark.parametrize(
    "wrong",
    [
        *("--seq-length 0", "--num-layers -1", "--hidden-size x", "--num-query-groups 0"),
        *("--global-batch-size 0", "--train-iters 0", "--lr nan", "--seed 0", "--vocab-size x"),
        *("--num-attention-heads 0", "--max-tokens-per-micro-batch 0", "--ranks-per-node 0"),
        *("--lr-decay-style x", "--tokenizer-type x", "--position-embedding-type x"),
        *("--eval-interval 0", "--log-interval 0", "--save-interval 0", "--plan-ahead -1"),
        *("--distributed-backend x", "--transformer-impl x", "--recompute-granularity x"),
        *("--cp-comm-type x", "--kv-channels 0", "--ffn-hidden-size 0", "--min-lr -1"),
        *("--tensor-model-parallel-size 0", "--exit-signal x", "--long-sequences x"),
    ],
)
def test_a_wrong_value_alone_gives_one_line(wrong: str, tmp_path: Path) -> None:
    extra = ("--group-query-attention", "--save", str(tmp_path / "save"), "--exit-signal-handler")
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, *extra, *wrong.split())
    assert "\n" not in str(caught.value)
    assert wrong.split()[0] in str(caught.value)


def test_no_honoured_option_with_a_wrong_value_ends_in_a_traceback(tmp_path: Path) -> None:
    ours = [option_of(field.name) for field in dataclasses.fields(HydraulisConfig)]
    refused: dict[str, str] = {}
    for option in (*HONOURED, *ours):
        for typed in (option, f"{option} bogus"):
            try:
                parse(tmp_path, *typed.split())
            except ConfigurationError as error:
                refused[typed] = str(error)
    assert refused.keys() > {"--save", "--swiglu bogus", "--sequence-parallel bogus"}
    assert not [error for error in refused.values() if "\n" in error]


def test_what_is_no_layer_spec_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="builtin_function_or_method"):
        check_spec(argparse.Namespace(spec=["os", "system"]))
    with pytest.raises(ConfigurationError, match="of type str"):
        check_spec(argparse.Namespace(spec=["os", "sep"]))
    check_spec(
        argparse.Namespace(
            spec=["megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"]
        )
    )


@pytest.mark.parametrize("check", [*checks.SHAPE_CHECKS, *checks.SETTINGS_CHECKS])
def test_every_check_declares_what_it_reads(
    check: Callable[[Namespace], None], tmp_path: Path
) -> None:
    read: set[str] = set()

    class Recording(Namespace):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    experts = ("--num-experts", "8", "--moe-router-topk", "2", "--disable-bias-linear")
    positions = ("--max-position-embeddings", "128")
    for flags in ((), experts, ("--recompute-activations",), ("--lr-decay-style", "WSD")):
        args = flag_parser().parse([*base_command(tmp_path), *positions, *flags]).args
        with contextlib.suppress(ConfigurationError):
            check(Recording(**vars(args)))
    declared = {**checks.SHAPE_CHECKS, **checks.SETTINGS_CHECKS}[check].split()
    assert read
    assert read <= set(declared)
    assert not set(declared) - set(vars(args))
