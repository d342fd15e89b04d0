"""Every honoured option has one row here: its value, and what must change by it."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.hydraulis.errors import ConfigurationError, Problems
from megatron.hydraulis.flags.arguments import Resolved, gpt_model_config
from megatron.hydraulis.flags.honoured import HONOURED
from tests.unit.flags.argument_command import flag_parser, parse, write_corpus

# A layer spec of a user, for --spec.
user_layer_spec = ModuleSpec(module=object)


@dataclass(frozen=True)
class Row:
    typed: str
    """What follows the option; '{dir}' stands for a folder with corpus 'other' and a file."""
    where: str
    """args, hydraulis, strategy, vocabulary, sizes or model (upstream's model configuration).

    With the attribute after a point, unless it has the option's name.
    """
    value: Any
    also: str = ""
    """Flags that are given with and without the option."""
    always: bool = False
    """Whether the value holds without the option as well."""
    cuda: bool = False
    """Whether the default differs from the value only on a machine with CUDA."""
    without: tuple[str, ...] = ()
    """Flags of the base command line that do not go with the option."""


def _args(typed: str, value: Any, **more: Any) -> Row:
    return Row(typed, "args", value, **more)


def _model(typed: str, value: Any, **more: Any) -> Row:
    return Row(typed, "model", value, **more)


def _experts(typed: str, value: Any, also: str = "") -> Row:
    return _model(typed, value, also=f"{_EXPERTS} {also}".strip())


def _latents(typed: str, value: Any) -> Row:
    return _model(typed, value, also="--multi-latent-attention")


def _recurrent(typed: str, value: Any) -> Row:
    return _model(typed, value, also=f"--hybrid-layer-pattern G-*- {_GATED}")


_GATED = "--swiglu"
_ROPE = "--position-embedding-type rope"
_YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"
_EXPERTS = "--num-experts 8 --disable-bias-linear"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_CHANGING_DECAY = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
_SENTENCE_PIECE = "--tokenizer-type SentencePieceTokenizer --tokenizer-model {dir}/file"
_HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {dir}/file"
_TIK = "--tokenizer-type TikTokenizer --tokenizer-model {dir}/file"
_BPE = "--tokenizer-type GPT2BPETokenizer --vocab-file {dir}/file --merge-file {dir}/file"
_CHAT = "--tokenizer-type SFTTokenizer --tokenizer-model {dir}/file --data-path {dir}/other.jsonl"
_WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 2"

_BY_SAMPLES: dict[str, Any] = {"also": "--train-samples 80", "without": ("--train-iters",)}
_BY_PART: dict[str, Any] = {
    "also": "--train-data-path {dir}/other",
    "without": ("--data-path",),
}

ROWS: dict[str, Row] = {
    # model
    "--num-layers": _model("6", 6),
    "--hybrid-layer-pattern": Row("G-|*-", "args.hybrid_layer_pattern", "G-*-", also=_GATED),
    "--linear-conv-kernel-dim": _recurrent("3", 3),
    "--linear-key-head-dim": _recurrent("24", 24),
    "--linear-value-head-dim": _recurrent("24", 24),
    "--linear-num-key-heads": _recurrent("8", 8),
    "--linear-num-value-heads": _recurrent("48", 48),
    "--hidden-size": _model("32", 32),
    "--ffn-hidden-size": _model("96", 96),
    "--num-attention-heads": _model("8", 8),
    "--kv-channels": _model("24", 24),
    "--group-query-attention": Row("", "model.num_query_groups", 1),
    "--num-query-groups": _model("2", 2, also="--group-query-attention"),
    "--max-position-embeddings": Row("256", "model.seq_length", 256),
    "--position-embedding-type": _model("none", "none"),
    "--use-rotary-position-embeddings": Row("", "model.position_embedding_type", "rope"),
    "--no-position-embedding": Row("", "args.add_position_embedding", False, also=_ROPE),
    "--attention-backend": Row("unfused", "hydraulis.core_attention", "sdpa"),
    "--rotary-base": _model("5000", 5000, also=_ROPE),
    "--rotary-percent": _model("0.5", 0.5, also=_ROPE),
    "--rotary-interleaved": _model("", True, also=_ROPE),
    "--rotary-seq-len-interpolation-factor": Row(
        "2", "model.seq_len_interpolation_factor", 2, also=_ROPE
    ),
    "--use-rope-scaling": Row("", "model.rope_scaling", True, also=_ROPE),
    "--rope-scaling-factor": _model("4", 4.0, also=f"{_ROPE} --use-rope-scaling"),
    "--yarn-original-max-position-embeddings": _model("64", 64, also=_YARN),
    "--yarn-beta-fast": _model("16", 16.0, also=_YARN),
    "--yarn-beta-slow": _model("2", 2.0, also=_YARN),
    "--yarn-correction-range-round-to-int": _model("", True, also=_YARN, always=True),
    "--no-yarn-correction-range-round-to-int": Row(
        "", "model.yarn_correction_range_round_to_int", False, also=_YARN
    ),
    "--normalization": _model("RMSNorm", "RMSNorm"),
    "--norm-epsilon": Row("1e-6", "model.layernorm_epsilon", 1e-6),
    "--swiglu": Row("", "model.gated_linear_unit", True),
    "--disable-bias-linear": Row("", "model.add_bias_linear", False),
    "--add-qkv-bias": _model("", True, also="--disable-bias-linear"),
    "--qk-layernorm": _model("", True),
    "--apply-layernorm-1p": Row("", "model.layernorm_zero_centered_gamma", True),
    "--squared-relu": Row("", "model.activation_func", squared_relu),
    "--quick-geglu": Row("", "model.activation_func", quick_gelu),
    "--glu-linear-offset": _model("1", 1.0, also="--swiglu"),
    "--activation-func-clamp-value": _model("7", 7.0, also="--quick-geglu"),
    "--window-size": _model("6,0", (6, 0)),
    "--window-attn-skip-freq": _model("2", 2, also="--window-size 6,0"),
    "--softmax-type": _model("learnable", "learnable"),
    "--mtp-num-layers": _model("2", 2, also=_ROPE),
    "--mtp-loss-scaling-factor": _model("0.3", 0.3, also=f"{_ROPE} --mtp-num-layers 1"),
    "--attention-output-gate": _model("", True),
    "--no-rope-freq": _model("2", [0, 1, 0, 1], also=_ROPE),
    "--untie-embeddings-and-output-weights": Row(
        "", "model.share_embeddings_and_output_weights", False
    ),
    "--init-method-std": _model("0.01", 0.01),
    "--make-vocab-size-divisible-by": Row("48", "model.vocab_size", 240),
    "--hidden-dropout": _model("0", 0.0, always=True),
    "--attention-dropout": _model("0", 0.0, always=True),
    "--recompute-granularity": _model("selective", "selective"),
    "--recompute-activations": Row("", "model.recompute_granularity", "selective"),
    "--recompute-method": _model("block", "block", also=_FULL),
    "--recompute-num-layers": _model("2", 2, also=_FULL),
    "--recompute-modules": _model(
        "mlp", ["mlp"], also="--recompute-activations --disable-bias-linear"
    ),
    "--spec": Row(f"{__name__} user_layer_spec", "model.transformer_layer_spec", user_layer_spec),
    "--transformer-impl": _args("local", "local", always=True),
    "--use-mcore-models": Row("", "args.deprecated_use_mcore_models", True),
    "--no-masked-softmax-fusion": Row("", "model.masked_softmax_fusion", False, cuda=True),
    "--no-bias-gelu-fusion": Row("", "model.bias_activation_fusion", False, cuda=True),
    "--no-bias-swiglu-fusion": Row(
        "", "model.bias_activation_fusion", False, also="--swiglu", cuda=True
    ),
    "--no-bias-dropout-fusion": Row("", "model.bias_dropout_fusion", False, cuda=True),
    "--no-rope-fusion": Row("", "args.apply_rope_fusion", False, also=_ROPE, always=True),
    "--no-persist-layer-norm": Row("", "model.persist_layer_norm", False, always=True),
    "--no-gradient-accumulation-fusion": Row(
        "", "model.gradient_accumulation_fusion", False, cuda=True
    ),
    "--disable-jit-fuser": _args("", True, cuda=True),
    # latent attention
    "--multi-latent-attention": _model("", True),
    "--q-lora-rank": _latents("24", 24),
    "--kv-lora-rank": _latents("24", 24),
    "--qk-head-dim": _latents("24", 24),
    "--qk-pos-emb-head-dim": _latents("24", 24),
    "--v-head-dim": _latents("24", 24),
    "--rope-type": _latents("rope", "rope"),
    "--rotary-scaling-factor": _latents("40", 40.0),
    "--mscale": _latents("0.7", 0.7),
    "--mscale-all-dim": _latents("0.7", 0.7),
    # experts
    "--num-experts": Row("4", "model.num_moe_experts", 4, also="--disable-bias-linear"),
    "--moe-layer-freq": _experts("([0]+[1]*3)", [0, 1, 1, 1]),
    "--moe-ffn-hidden-size": _experts("24", 24),
    "--moe-router-topk": _experts("3", 3),
    "--moe-router-score-function": _experts("sigmoid", "sigmoid"),
    "--moe-router-pre-softmax": _experts("", True),
    "--moe-router-num-groups": _experts("4", 4, "--moe-router-group-topk 2"),
    "--moe-router-group-topk": _experts("2", 2, "--moe-router-num-groups 4"),
    "--moe-router-topk-scaling-factor": _experts("2.5", 2.5),
    "--moe-router-dtype": _experts("fp64", "fp64"),
    "--moe-router-load-balancing-type": _experts("none", "none"),
    "--moe-aux-loss-coeff": _experts("0.01", 0.01),
    "--moe-z-loss-coeff": _experts("0.001", 0.001),
    "--moe-router-enable-expert-bias": _experts("", True, "--moe-router-score-function sigmoid"),
    "--moe-router-bias-update-rate": _experts(
        "0.01", 0.01, "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ),
    "--moe-shared-expert-intermediate-size": _experts("24", 24),
    "--moe-shared-expert-gate": _experts("", True, "--moe-shared-expert-intermediate-size 24"),
    "--moe-token-dispatcher-type": _experts("alltoall", "alltoall"),
    # Without CUDA the plain path runs instead.
    "--moe-grouped-gemm": _args("", False, also=_EXPERTS, always=True),
    "--moe-permute-fusion": _args("", False, also=_EXPERTS, always=True),
    "--expert-model-parallel-size": Row("4", "strategy", "2*cp4~ep4", also=_EXPERTS),
    "--expert-tensor-parallel-size": Row("4", "strategy", "2*cp4~ep4", also=_EXPERTS),
    # batch and loop
    "--global-batch-size": _args("7", 7),
    "--rampup-batch-size": Row(
        "2 2 12", "sizes.steps", ((0, 2), (4, 4), (8, 6), (12, 8)), **_BY_SAMPLES
    ),
    "--step-batch-size-schedule": Row(
        "0:4,1K:8", "sizes.steps", ((0, 4), (1000 // 128, 8)), **_BY_SAMPLES
    ),
    "--seq-length": _args("96", 96),
    "--train-iters": _args("12", 12),
    "--train-samples": _args("96", 96, **_BY_SAMPLES),
    "--seed": _args("7", 7),
    "--calculate-per-token-loss": _model("", True, always=True),
    "--reset-position-ids": _args("", True, always=True),
    "--reset-attention-mask": _args("", True, always=True),
    "--exit-interval": _args("5", 5),
    "--exit-duration-in-mins": _args("9", 9),
    "--exit-signal-handler": _args("", True),
    "--exit-signal": _args("SIGUSR1", signal.SIGUSR1, also="--exit-signal-handler"),
    "--eval-interval": _args("4", 4),
    "--eval-iters": _args("3", 3),
    "--start-eval-at-iter": _args("8", 8, also="--eval-interval 4"),
    "--eval-global-batch-size": Row(
        "4", "evaluation_sizes.steps", ((0, 4),), also="--eval-interval 4"
    ),
    "--manual-gc": _args("", True),
    "--manual-gc-interval": _args("5", 5, also="--manual-gc"),
    "--no-manual-gc-eval": Row("", "args.manual_gc_eval", False, also="--manual-gc"),
    # optimizer and schedules
    "--optimizer": _args("adam", "adam", always=True),
    "--lr": _args("0.02", 0.02),
    "--min-lr": _args("1e-4", 1e-4),
    "--decoupled-lr": _args("0.02", 0.02),
    "--decoupled-min-lr": _args("1e-4", 1e-4, also="--decoupled-lr 0.1"),
    "--lr-decay-style": _args("cosine", "cosine"),
    "--lr-decay-iters": _args("8", 8),
    "--lr-warmup-iters": _args("3", 3),
    "--lr-decay-samples": _args("40", 40, **_BY_SAMPLES),
    "--lr-warmup-samples": _args("8", 8, **_BY_SAMPLES),
    "--lr-wsd-decay-samples": _args(
        "9",
        9,
        also="--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 7",
        without=("--train-iters",),
    ),
    "--lr-warmup-fraction": _args("0.1", 0.1),
    "--lr-warmup-init": _args("1e-5", 1e-5),
    "--lr-wsd-decay-style": _args("linear", "linear", also=_WSD),
    "--lr-wsd-decay-iters": _args("3", 3, also=_WSD),
    "--weight-decay": Row("0.2", "args.end_weight_decay", 0.2),
    "--start-weight-decay": _args("0.2", 0.2, also=_CHANGING_DECAY),
    "--end-weight-decay": _args("0.4", 0.4, also=_CHANGING_DECAY),
    "--weight-decay-incr-style": _args("cosine", "cosine", also=_CHANGING_DECAY),
    "--clip-grad": _args("0.5", 0.5),
    "--apply-wd-to-qk-layernorm": _args("", True, also="--qk-layernorm"),
    "--no-weight-decay-cond-type": Row(
        "apply_wd_to_qk_layernorm", "args.apply_wd_to_qk_layernorm", True, also="--qk-layernorm"
    ),
    "--adam-beta1": _args("0.8", 0.8),
    "--adam-beta2": _args("0.95", 0.95),
    "--adam-eps": _args("1e-5", 1e-5),
    "--use-distributed-optimizer": _args("", True, always=True),
    "--grad-reduce-in-bf16": _args("", True, also="--bf16"),
    "--bf16": Row("", "model.params_dtype", torch.bfloat16),
    "--accumulate-allreduce-grads-in-fp32": _args("", True, always=True),
    # checkpoints
    "--save": _args("{dir} --save-interval 2", "{dir}"),
    "--save-interval": _args("3", 3, also="--save {dir} --save-interval 2"),
    "--async-save": _args("", True, also="--save {dir} --save-interval 2"),
    "--load": _args("{dir}", "{dir}"),
    "--ckpt-step": _args("4", 4, also="--load {dir}"),
    "--no-load-optim": _args("", True, also="--load {dir}"),
    "--finetune": _args("", True, also="--load {dir}"),
    "--exit-on-missing-checkpoint": _args("", True, also="--load {dir}"),
    "--dist-ckpt-optim-fully-reshardable": _args("", True, always=True),
    "--override-opt_param-scheduler": _args("", True, also="--load {dir}"),
    "--use-checkpoint-opt_param-scheduler": _args("", True, also="--load {dir}"),
    # parallelism
    "--tensor-model-parallel-size": Row("2", "strategy", "4*tp2"),
    "--pipeline-model-parallel-size": Row("2", "strategy", "4*pp2"),
    "--context-parallel-size": Row("2", "strategy", "4*cp2"),
    "--cp-comm-type": _model("a2a", "a2a"),
    "--sequence-parallel": Row("", "hydraulis", True, also="--no-sequence-parallel"),
    "--deterministic-mode": _args("", True),
    "--distributed-backend": _args("gloo", "gloo", always=True),
    "--distributed-timeout-minutes": _args("3", 3),
    # data
    "--data-path": _args("{dir}/other", ["{dir}/other"]),
    "--split": _args("8,1,1", "8,1,1"),
    "--train-data-path": _args("{dir}/other", ["{dir}/other"], without=("--data-path",)),
    "--valid-data-path": _args("{dir}/other", ["{dir}/other"], **_BY_PART),
    "--test-data-path": _args("{dir}/other", ["{dir}/other"], **_BY_PART),
    "--tokenizer-type": _args(
        "HuggingFaceTokenizer", "HuggingFaceTokenizer", also="--tokenizer-model {dir}/file"
    ),
    "--tokenizer-model": _args("{dir}/file2", "{dir}/file2", also=_HUGGING_FACE),
    "--vocab-file": _args("{dir}/file2", "{dir}/file2", also=_BPE),
    "--merge-file": _args("{dir}/file2", "{dir}/file2", also=_BPE),
    "--vocab-size": Row("300", "vocabulary.padded_size", 384),
    "--padded-vocab-size": Row("264", "vocabulary.padded_size", 264),
    "--tokenizer-metadata": Row("{dir}/file", "args.metadata_path", "{dir}/file"),
    "--tokenizer-special-tokens": Row("<a> <b>", "args.special_tokens", ["<a>", "<b>"]),
    "--tiktoken-pattern": _args("v2", "v2", also=_TIK),
    "--tiktoken-num-special-tokens": _args("50", 50, also=_TIK),
    "--tokenizer-sentencepiece-legacy": _args("", True, also=_SENTENCE_PIECE),
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": Row(
        "", "args.tokenizer_sentencepiece_ignore_extra_whitespaces", False, also=_SENTENCE_PIECE
    ),
    "--tokenizer-hf-no-use-fast": _args("", True, also=_HUGGING_FACE),
    "--tokenizer-hf-no-include-special-tokens": _args("", True, also=_HUGGING_FACE),
    "--trust-remote-code": _args("", True, also=_HUGGING_FACE),
    "--sft": _args("", True, also=_CHAT),
    "--sft-tokenizer-prompt-format": _args("identity", "identity", also=f"--sft {_CHAT}"),
    "--null-tokenizer-eod-id": _args("3", 3),
    "--null-tokenizer-pad-id": _args("4", 4),
    # logging
    "--log-interval": _args("2", 2),
    "--log-throughput": _args("", True, always=True),
    "--timing-log-level": _args("2", 2),
    "--timing-log-option": _args("max", "max"),
    "--logging-level": _args("30", 30),
    "--tensorboard-dir": _args("{dir}", "{dir}"),
    "--tensorboard-log-interval": _args("3", 3),
    "--tensorboard-queue-size": _args("5", 5),
    "--log-timers-to-tensorboard": _args("", True),
    "--no-log-loss-scale-to-tensorboard": Row("", "args.log_loss_scale_to_tensorboard", False),
    "--log-validation-ppl-to-tensorboard": _args("", True),
    "--log-world-size-to-tensorboard": _args("", True),
    "--wandb-project": _args("p", "p"),
    "--wandb-exp-name": _args("n", "n", also="--wandb-project p"),
    "--wandb-save-dir": _args("{dir}", "{dir}", also="--wandb-project p"),
    "--wandb-entity": _args("e", "e", also="--wandb-project p"),
    "--no-one-logger": Row("", "args.enable_one_logger", False, always=True),
}


def test_a_row_for_every_honoured_option_and_for_no_other() -> None:
    assert set(ROWS) == set(HONOURED)


def test_an_option_with_few_values_lists_them_in_the_help_and_gives_the_reason_in_the_error() -> (
    None
):
    restricted = [honoured for honoured in HONOURED.values() if honoured.only is not None]
    assert restricted
    assert all("; use " in honoured.otherwise for honoured in restricted)
    assert all("; only " in honoured.help_text for honoured in restricted)


class _Tokenizer:
    """Replaces any tokenizer: the rows check the values that reach upstream, not their effect."""

    vocab_size = 150


def _read(resolved: Resolved, option: str, where: str) -> Any:
    if where == "strategy":
        return str(resolved.pool.strategies[0])
    holder, _, attribute = where.partition(".")
    found = gpt_model_config(resolved.args) if holder == "model" else getattr(resolved, holder)
    return getattr(found, attribute or option.removeprefix("--").replace("-", "_"))


def _fill(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_fill(item, folder) for item in value]
    return value.replace("{dir}", str(folder)) if isinstance(value, str) else value


@pytest.mark.parametrize("option", ROWS)
@pytest.mark.usefixtures("plain_environment")
def test_honoured(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[option]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: row.cuda)
    # The installed packages do not matter here.
    monkeypatch.setattr(
        "megatron.hydraulis.flags.checks.importlib.util.find_spec", lambda name: object()
    )
    if row.where.startswith("args"):
        monkeypatch.setattr(
            "megatron.hydraulis.flags.defaults.build_tokenizer", lambda args: _Tokenizer()
        )
    for name in ("other", "other.jsonl"):
        write_corpus(tmp_path, name)
    for name in ("file", "file2", "other.jsonl"):
        (tmp_path / name).touch()
    also = _fill(row.also, tmp_path).split()
    typed = [option, *_fill(row.typed, tmp_path).split()]
    value = _fill(row.value, tmp_path)

    with_option = parse(tmp_path, *also, *typed, without=row.without)
    assert option in with_option.explicit
    assert _read(with_option, option, row.where) == value

    if option == "--train-data-path":
        assert with_option.args.data_path is None
        return
    if option in ("--moe-router-num-groups", "--moe-router-group-topk"):
        with pytest.raises(ConfigurationError, match=f"{option} is missing"):
            parse(tmp_path, *also)
        return
    without_option = parse(tmp_path, *also, without=row.without)
    assert (_read(without_option, option, row.where) == value) is row.always


@pytest.mark.parametrize(
    "option", [option for option, honoured in HONOURED.items() if honoured.need is not None]
)
def test_an_option_without_what_gives_it_an_effect_is_taken(option: str, tmp_path: Path) -> None:
    need = HONOURED[option].need
    assert need is not None
    against = {
        "--make-vocab-size-divisible-by": "--padded-vocab-size 256",
        "--null-tokenizer-eod-id": "--tokenizer-type HuggingFaceTokenizer",
        "--null-tokenizer-pad-id": "--tokenizer-type HuggingFaceTokenizer",
    }
    problems = Problems()
    typed = [option, *ROWS[option].typed.split()]
    flags = flag_parser().parse([*typed, *against.get(option, "").split()], problems)
    problems.raise_any()
    assert flags.taken == ((" ".join(typed), f"it has an effect only with {need.flag}"),)
    assert option not in flags.explicit
    dest = flag_parser()._actions[option].dest
    assert getattr(flags.args, dest) == flag_parser()._parser.get_default(dest)
