"""No option of upstream's is ignored: what is not honoured is refused by name."""

import argparse

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.options import _FAMILIES, FORMER_OPTIONS, HONOURED, family_of, refusal
from tests.unit.argument_command import flag_parser


def _actions() -> list[argparse.Action]:
    """Upstream's actions that are not honoured, our own and --help left out."""
    upstream = flag_parser().upstream_options
    return [
        action
        for action in flag_parser()._parser._actions
        if action.option_strings[0] in upstream and action.option_strings[0] not in HONOURED
    ]


def _num_values(action: argparse.Action) -> int:
    if isinstance(action.nargs, int):
        return action.nargs
    return 1


def test_upstream_has_hundreds_of_options_that_are_refused() -> None:
    assert len(_actions()) > 500


def test_every_option_that_is_not_honoured_is_refused_by_the_name_it_was_given() -> None:
    ignored = []
    for action in _actions():
        for option in action.option_strings:
            try:
                flag_parser().parse([option, *["1"] * _num_values(action)])
            except ConfigurationError as error:
                if str(error).startswith(f"{option} is not honoured: "):
                    continue
            ignored.append(option)
    assert ignored == []


@pytest.mark.parametrize(
    ("typed", "family", "says"),
    [
        ("--emulate-device p.json", "emulation", "torchrun -m benchmarks.emulated_training"),
        ("--emulate-scale 0.5", "emulation", "torchrun -m benchmarks.emulated_training"),
        ("--micro-batch-size 2", "micro-batches", "--max-tokens-per-micro-batch"),
        ("--no-check-for-nan-in-loss-and-grad", "checks for NaN", "use --skip-nan-iterations"),
        ("--rampup-batch-size 1 1 1", "changing batch size", "--global-batch-size"),
        ("--train-samples 100", "training by samples", "--train-iters"),
        ("--perform-rl-step", "RL", "reinforcement"),
        ("--grpo-group-size 2", "RL", "reinforcement"),
        ("--flash-decode", "inference", "trains"),
        ("--checkpoint-activations", "recompute", "use --recompute-granularity"),
        ("--distribute-saved-activations", "recompute", "single strategy"),
        ("--cpu-offloading-num-layers 1", "offloading", "host"),
        ("--cuda-graph-impl local", "CUDA graphs", "shapes differ"),
        ("--fp8-format hybrid", "8- and 4-bit arithmetic", "--bf16"),
        ("--fp4-format e2m1", "8- and 4-bit arithmetic", "--bf16"),
        ("--num-experts 8", "experts", "without experts"),
        ("--expert-model-parallel-size 2", "experts", "without experts"),
        ("--multi-latent-attention", "multi-latent attention", "latent"),
        ("--q-lora-rank 8", "multi-latent attention", "latent"),
        ("--attention-backend flash", "other attention", "packed sequences"),
        ("--hybrid-layer-pattern M*", "state-space and hybrid models", "one kind of layer"),
        ("--use-rotary-position-embeddings", "older names", "--position-embedding-type"),
        ("--mtp-num-layers 1", "multi-token prediction", "one token"),
        ("--encoder-seq-length 8", "encoders", "--seq-length"),
        ("--img-h 8", "vision", "text"),
        ("--num-layers-per-virtual-pipeline-stage 1", "virtual pipeline", "--strategy"),
        ("--decoder-first-pipeline-num-layers 1", "pipeline layout", "'pp2:5,3'"),
        ("--max-seqlen-per-dp-cp-rank 8", "context parallelism", "name cp in --strategy"),
        ("--no-save-optim", "checkpoints", "use --save"),
        ("--ckpt-fully-parallel-load", "checkpoints", "use --save"),
        ("--fp16", "half precision with loss scaling", "--bf16"),
        ("--muon-momentum 0.9", "other optimizers", "AdamW"),
        ("--overlap-grad-reduce", "data-parallel wrappers", "canonical shards"),
        ("--use-megatron-fsdp", "data-parallel wrappers", "canonical shards"),
        ("--tp-comm-overlap", "tensor-parallel overlap", "overlap"),
        ("--use-tp-pp-dp-mapping", "process groups", "--strategy"),
        ("--init-method-xavier-uniform", "initialisation", "--seed"),
        ("--mock-data", "upstream's data sets", "--data-path"),
        ("--chat-template x", "tokenizer", "prepared data"),
        ("--sft", "fine-tuning", "fine-tuning"),
        ("--skip-train", "evaluation", "--eval-iters"),
        ("--inprocess-restart", "fault tolerance", "restart"),
        ("--profile", "profiling", "profiler"),
        ("--log-params-norm", "logging", "metrics.jsonl"),
        ("--squared-relu", "model variants", "every strategy"),
        ("--yaml-cfg file", "others", "does not act on it"),
    ],
)
def test_refusal_names_option_reason_and_fix(typed: str, family: str, says: str) -> None:
    option, *values = typed.split()
    with pytest.raises(ConfigurationError) as caught:
        flag_parser().parse([option, *values])
    message = str(caught.value)
    assert message.startswith(f"{option} is not honoured: ")
    assert says in message
    assert "; " in message
    assert family_of(option, flag_parser().upstream_options.get(option, "")).name == family


def test_every_family_refuses_an_option_of_this_upstream_or_a_former_one_of_ours() -> None:
    in_use = {
        family_of(option, group).name
        for option, group in flag_parser().upstream_options.items()
        if any(option in action.option_strings for action in _actions())
    }
    in_use |= {family_of(option, "").name for option in FORMER_OPTIONS}
    assert {family.name for family in _FAMILIES} <= in_use


def test_an_option_of_no_family_is_refused_too() -> None:
    assert refusal("--from-a-later-upstream", "new group").startswith(
        "--from-a-later-upstream is not honoured: "
    )


def test_several_refused_options_are_named_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        flag_parser().parse(["--num-experts", "4", "--lr", "1", "--ict-load=x", "--ict-load", "y"])
    first, *lines = str(caught.value).split("\n  ")
    assert first == "2 options are not honoured:"
    assert [line.split()[0] for line in lines] == ["--num-experts", "--ict-load"]


def test_an_option_given_its_default_value_is_given() -> None:
    with pytest.raises(ConfigurationError, match="--expert-model-parallel-size is not honoured"):
        flag_parser().parse(["--expert-model-parallel-size", "1"])


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--hidden-dropout 0.1", "; use 0"),
        ("--attention-dropout 0.1", "; use 0"),
        ("--optimizer sgd", "; use adam"),
        ("--context-parallel-size 2", "use 1, and name cp in --strategy"),
        ("--num-workers 2", "; use 0"),
        ("--position-embedding-type yarn", "; use rope, learned_absolute or none"),
        ("--tokenizer-type SFTTokenizer", "; use GPT2BPETokenizer"),
        ("--transformer-impl inference_optimized", "; use local or transformer_engine"),
    ],
)
def test_other_values_of_an_honoured_option_are_refused(typed: str, fix: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        flag_parser().parse(typed.split())
    assert str(caught.value).startswith(f"{typed} is not honoured: ")
    assert fix in str(caught.value)
