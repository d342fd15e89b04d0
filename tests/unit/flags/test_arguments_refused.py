"""What becomes of upstream's options that are not honoured: they are taken, or refused by name."""

import argparse
import re

import pytest

from megatron.hydraulis.errors import ConfigurationError, Problems
from megatron.hydraulis.flags.honoured import HONOURED
from megatron.hydraulis.flags.options import (
    FORMER_OPTIONS,
    Refused,
    Row,
    Taken,
    refusal,
    refusals,
    row_of,
)
from megatron.hydraulis.flags.parser import ParsedFlags
from tests.unit.flags.argument_command import flag_parser


def _actions() -> list[argparse.Action]:
    """Upstream's actions, without our own and --help."""
    upstream = flag_parser().upstream_options
    return [
        action for action in flag_parser()._parser._actions if action.option_strings[0] in upstream
    ]


def _row(option: str) -> Row:
    action = next(a for a in flag_parser()._parser._actions if option in a.option_strings)
    return row_of(action.option_strings[0], flag_parser().upstream_options.get(option, ""))


def _typed(action: argparse.Action, option: str) -> list[str]:
    """The option with values of the right kind, other than its default where one is known."""
    if action.nargs == 0:
        return [option]
    count = action.nargs if isinstance(action.nargs, int) else 1
    value = {"--cuda-graph-scope": "attn", "--cuda-graph-modules": "attn"}.get(option, "1")
    if str(action.default).removesuffix(".0") == value:
        value = "2"
    if action.choices:
        value = next(str(c) for c in action.choices if c != action.default)
    if action.metavar == "NAME":
        value = next(c.name for c in action.choices or () if c != action.default)
    return [option, *[value] * count]


def _needs(row: object) -> list[str]:
    """What has to be given for a refused option to be refused."""
    return [row.need.flag, "2"] if isinstance(row, Refused) and row.need is not None else []


def _parse(*typed: str) -> ParsedFlags:
    problems = Problems()
    flags = flag_parser().parse(typed, problems)
    problems.raise_any()
    return flags


def test_every_option_of_upstream_is_in_a_row_of_its_own_words() -> None:
    """No option may be refused for want of a row: the reason would say nothing."""
    in_no_row = refusals()[-1]
    assert [
        action.option_strings[0]
        for action in _actions()
        if _row(action.option_strings[0]) is in_no_row
        and action.option_strings[0] not in ("--yaml-cfg", "--enable-msc")
    ] == []


def test_the_table_of_honoured_options_names_options_of_upstream_only() -> None:
    assert set(HONOURED) <= {action.option_strings[0] for action in _actions()}


def test_every_refused_option_is_refused_by_the_name_it_was_given() -> None:
    ignored = []
    for action in _actions():
        for option in action.option_strings:
            if not isinstance(_row(option), Refused):
                continue
            problems = Problems()
            flag_parser().parse([*_typed(action, option), *_needs(_row(option))], problems)
            with pytest.raises(ConfigurationError) as caught:
                problems.raise_any()
            if not str(caught.value).startswith(f"{option} is not honoured: "):
                ignored.append(option)
    assert ignored == []


def test_every_taken_option_is_listed_and_changes_no_argument() -> None:
    nothing = vars(flag_parser()._parser.parse_args([]))
    wrong = []
    for action in _actions():
        option = action.option_strings[0]
        row = _row(option)
        if not isinstance(row, Taken) or row.only is not None:
            continue
        flags = _parse(*_typed(action, option))
        if vars(flags.args) != nothing or [what for _, what in flags.taken] != [row.instead]:
            wrong.append(option)
    assert wrong == []


@pytest.mark.parametrize(
    ("typed", "family", "says"),
    [
        ("--emulate-device p.json", "emulation", "torchrun -m benchmarks.emulated_training"),
        ("--emulate-scale 0.5", "emulation", "torchrun -m benchmarks.emulated_training"),
        ("--iterations-to-skip 3", "skipped data", "every iteration trains"),
        ("--use-kitchen-attention", "attention of Kitchen", "--core-attention chooses"),
        ("--perform-rl-step", "RL", "reinforcement"),
        ("--checkpoint-activations", "former names", "--recompute-granularity"),
        ("--encoder-seq-length 8", "former names", "--seq-length"),
        ("--fp8-format hybrid", "8- and 4-bit arithmetic", "--bf16"),
        ("--fp4-format e2m1", "8- and 4-bit arithmetic", "--bf16"),
        ("--moe-expert-capacity-factor 1", "capacity of experts", "packing"),
        ("--moe-input-jitter-eps 0.1", "random routing", "random"),
        ("--moe-latent-size 8", "variants of experts", "every strategy"),
        ("--is-hybrid-model", "other hybrid models", "--hybrid-layer-pattern"),
        ("--mtp-detach-heads", "variants of multi-token prediction", "own weights"),
        ("--max-seqlen-per-dp-cp-rank 8", "layout of the job", "--strategy"),
        ("--use-checkpoint-args", "checkpoints", "--finetune"),
        ("--fp16", "half precision with loss scaling", "--bf16"),
        ("--freeze-all-layers", "other optimizers", "AdamW"),
        ("--use-megatron-fsdp", "fully sharded data parallelism", "as in cp8fs"),
        ("--init-method-xavier-uniform", "initialisation", "--seed"),
        ("--mock-data", "other data", "--data-path"),
        ("--logits-load-dir d", "distillation", "distillation"),
        ("--skip-train", "evaluation", "--train-iters equal to its iteration"),
        ("--error-injection-rate 1", "injected faults", "healthy"),
        ("--batch-invariant-mode", "determinism", "speed"),
        ("--openai-gelu", "model variants", "every strategy"),
        ("--yaml-cfg file", "others", "does not act on it"),
    ],
)
def test_refusal_names_option_reason_and_fix(typed: str, family: str, says: str) -> None:
    option, *values = typed.split()
    row = row_of(option, "") if option in FORMER_OPTIONS else _row(option)
    with pytest.raises(ConfigurationError) as caught:
        _parse(option, *values, *_needs(row))
    message = str(caught.value)
    assert message.startswith(f"{option} is not honoured: ")
    assert says in message
    assert "; " in message
    if _needs(row):
        what = f"it has an effect only with {_needs(row)[0]}"
        assert _parse(option, *values).taken == ((typed, what),)
    assert isinstance(row, Refused)
    assert row.name == family


def test_every_row_refuses_an_option_of_this_upstream_or_a_former_one_of_ours() -> None:
    rows = {_row(action.option_strings[0]) for action in _actions()}
    rows |= {row_of(option, "") for option in FORMER_OPTIONS}
    assert set(refusals()) <= rows


def test_patterns_take_the_options_of_this_upstream_and_no_others() -> None:
    """Patterns would also take options of a later upstream: count what they take of this one."""
    taken = [option for option, row in flag_parser().rows.items() if isinstance(row, Taken)]
    assert len(taken) == 488


@pytest.mark.parametrize(
    "typed", ["--num-experts 0", "--linear-attention-freq 0", "--mtp-num-layers 0"]
)
def test_a_refused_option_with_the_value_that_switches_it_off_is_taken(typed: str) -> None:
    assert _parse(*typed.split()).taken == ((typed, "the feature is off, as by default"),)


@pytest.mark.parametrize(
    ("typed", "num_experts", "taken"),
    [
        (
            "--num-experts 4 --moe-router-topk 1 --num-experts 0",
            None,
            {
                "--num-experts 0": "the feature is off, as by default",
                "--moe-router-topk 1": "it has an effect only with --num-experts",
            },
        ),
        ("--num-experts 0 --num-experts 4", 4, {}),
        (
            "--mtp-num-layers 4 --mtp-num-layers 0",
            None,
            {"--mtp-num-layers 0": "the feature is off, as by default"},
        ),
    ],
)
def test_the_last_value_decides_whether_a_feature_is_off(
    typed: str, num_experts: int | None, taken: dict[str, str]
) -> None:
    flags = _parse(*typed.split())
    assert flags.args.num_experts == num_experts
    assert dict(flags.taken) == taken


def test_an_option_in_no_row_is_refused() -> None:
    row = row_of("--from-a-later-upstream", "new group")
    assert isinstance(row, Refused)
    assert "--from-a-later-upstream is not honoured: " in refusal("--from-a-later-upstream", row)


def test_all_that_is_wrong_is_said_at_once_in_the_order_of_the_command_line() -> None:
    typed = (
        "--linear-attention-freq 4 --lr fast --adam-eps -1 --num-layer 3 --attention-dropout 0.1 "
        "--sliding-window 8 --swiglu true"
    )
    with pytest.raises(ConfigurationError) as caught:
        _parse(*typed.split())
    first, *lines = str(caught.value).split("\n  ")
    assert first == "7 problems with these flags:"
    says = [
        "--num-layer is unknown .* mean --num-layers.*--ignore-unknown-options",
        "--sliding-window is unknown .* use --window-size.*--ignore-unknown-options",
        "--linear-attention-freq is not honoured: .*; remove",
        "--lr fast: invalid float value: 'fast'; correct",
        "--adam-eps must be above 0 but is -1.0; give",
        "--attention-dropout 0.1 is not honoured: ",
        "'true' after --swiglu belongs to no option, .*; quote",
    ]
    assert all(re.match(words, line) for words, line in zip(says, lines, strict=True))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["extra", "--lr", "1"], "'extra' belongs to no option, as it stands before the first;"),
        (["--wandb-exp-name", "my", "new", "run"], "'new' 'run' after .* my .* 1 value; quote"),
        (["--lr", "1", " "], "' ' after --lr 1 belongs to .* remove the blank after a backslash"),
    ],
)
def test_words_of_no_option_are_quoted(words: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        _parse(*words)


def test_unknown_options_are_left_out_and_listed_when_asked_for() -> None:
    flags = _parse("--ignore-unknown-options", "--sliding-window", "8", "--use-mpi", "--lr", "1")
    assert flags.unknown == (("--sliding-window 8", "--window-size"), ("--use-mpi", ""))
    assert flags.args.lr == 1.0


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--hidden-dropout 0.1", "; use 0"),
        ("--attention-dropout 0.1", "; use 0"),
        ("--optimizer sgd", "; use adam"),
        ("--position-embedding-type mrope", "; use rope, yarn, learned_absolute or none"),
        ("--tokenizer-type MultimodalTokenizer", "; use GPT2BPETokenizer"),
        ("--transformer-impl inference_optimized", "; use local or transformer_engine"),
        ("--dataloader-type external", "; use single or cyclic"),
        ("--vocab-extra-ids 5", "; use 0"),
    ],
)
def test_other_values_of_an_option_are_refused(typed: str, fix: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _parse(*typed.split())
    assert str(caught.value).startswith(f"{typed} is not honoured: ")
    assert fix in str(caught.value)


@pytest.mark.parametrize("balancing", ["sinkhorn", "global_aux_loss"])
def test_balancing_by_sequence_is_named_where_another_depends_on_packing(balancing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{balancing} is not .* use seq_aux_loss"):
        _parse("--num-experts", "4", "--moe-router-load-balancing-type", balancing)
