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
    """args.*, hydraulis.*, strategy, vocabulary.* or model.* (upstream's model configuration)."""
    value: Any
    also: str = ""
    """Flags that are given with and without the option."""
    always: bool = False
    """Whether the value holds without the option as well."""
    cuda: bool = False
    """Whether the default differs from the value only on a machine with CUDA."""
    without: tuple[str, ...] = ()
    """Flags of the base command line that do not go with the option."""


def _args(typed: str, attribute: str, value: Any, **more: Any) -> Row:
    return Row(typed, f"args.{attribute}", value, **more)


def _model(typed: str, attribute: str, value: Any, **more: Any) -> Row:
    return Row(typed, f"model.{attribute}", value, **more)


def _experts(typed: str, attribute: str, value: Any, also: str = "") -> Row:
    return _model(typed, attribute, value, also=f"{_EXPERTS} {also}".strip())


def _latents(typed: str, attribute: str, value: Any) -> Row:
    return _model(typed, attribute, value, also="--multi-latent-attention")


_ROPE = "--position-embedding-type rope"
_EXPERTS = "--num-experts 8 --disable-bias-linear"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_CHANGING_DECAY = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
_SENTENCE_PIECE = "--tokenizer-type SentencePieceTokenizer --tokenizer-model {dir}/file"
_HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {dir}/file"
_TIK = "--tokenizer-type TikTokenizer --tokenizer-model {dir}/file"
_BPE = "--tokenizer-type GPT2BPETokenizer --vocab-file {dir}/file --merge-file {dir}/file"
_CHAT = "--tokenizer-type SFTTokenizer --tokenizer-model {dir}/file --data-path {dir}/other.jsonl"

_BY_SAMPLES: dict[str, Any] = {"also": "--train-samples 80", "without": ("--train-iters",)}

ROWS: dict[str, Row] = {
    # model
    "--num-layers": _model("6", "num_layers", 6),
    "--hidden-size": _model("32", "hidden_size", 32),
    "--ffn-hidden-size": _model("96", "ffn_hidden_size", 96),
    "--num-attention-heads": _model("8", "num_attention_heads", 8),
    "--kv-channels": _model("24", "kv_channels", 24),
    "--group-query-attention": _model("", "num_query_groups", 1),
    "--num-query-groups": _model("2", "num_query_groups", 2, also="--group-query-attention"),
    "--max-position-embeddings": _model("256", "seq_length", 256),
    "--position-embedding-type": _model("none", "position_embedding_type", "none"),
    "--use-rotary-position-embeddings": _model("", "position_embedding_type", "rope"),
    "--no-position-embedding": _args("", "add_position_embedding", False, also=_ROPE),
    "--attention-backend": Row("unfused", "hydraulis.core_attention", "sdpa"),
    "--rotary-base": _model("5000", "rotary_base", 5000, also=_ROPE),
    "--rotary-percent": _model("0.5", "rotary_percent", 0.5, also=_ROPE),
    "--rotary-interleaved": _model("", "rotary_interleaved", True, also=_ROPE),
    "--rotary-seq-len-interpolation-factor": _model(
        "2", "seq_len_interpolation_factor", 2, also=_ROPE
    ),
    "--use-rope-scaling": _model("", "rope_scaling", True, also=_ROPE),
    "--rope-scaling-factor": _model(
        "4", "rope_scaling_factor", 4.0, also=f"{_ROPE} --use-rope-scaling"
    ),
    "--normalization": _model("RMSNorm", "normalization", "RMSNorm"),
    "--norm-epsilon": _model("1e-6", "layernorm_epsilon", 1e-6),
    "--swiglu": _model("", "gated_linear_unit", True),
    "--disable-bias-linear": _model("", "add_bias_linear", False),
    "--add-qkv-bias": _model("", "add_qkv_bias", True, also="--disable-bias-linear"),
    "--qk-layernorm": _model("", "qk_layernorm", True),
    "--apply-layernorm-1p": _model("", "layernorm_zero_centered_gamma", True),
    "--squared-relu": _model("", "activation_func", squared_relu),
    "--quick-geglu": _model("", "activation_func", quick_gelu),
    "--glu-linear-offset": _model("1", "glu_linear_offset", 1.0, also="--swiglu"),
    "--activation-func-clamp-value": _model(
        "7", "activation_func_clamp_value", 7.0, also="--quick-geglu"
    ),
    "--window-size": _model("6,0", "window_size", (6, 0)),
    "--window-attn-skip-freq": _model("2", "window_attn_skip_freq", 2, also="--window-size 6,0"),
    "--softmax-type": _model("learnable", "softmax_type", "learnable"),
    "--attention-output-gate": _model("", "attention_output_gate", True),
    "--no-rope-freq": _model("2", "no_rope_freq", [0, 1, 0, 1], also=_ROPE),
    "--untie-embeddings-and-output-weights": _model(
        "", "share_embeddings_and_output_weights", False
    ),
    "--init-method-std": _model("0.01", "init_method_std", 0.01),
    "--make-vocab-size-divisible-by": _model("48", "vocab_size", 240),
    "--hidden-dropout": _model("0", "hidden_dropout", 0.0, always=True),
    "--attention-dropout": _model("0", "attention_dropout", 0.0, always=True),
    "--recompute-granularity": _model("selective", "recompute_granularity", "selective"),
    "--recompute-activations": _model("", "recompute_granularity", "selective"),
    "--recompute-method": _model("block", "recompute_method", "block", also=_FULL),
    "--recompute-num-layers": _model("2", "recompute_num_layers", 2, also=_FULL),
    "--recompute-modules": _model(
        "mlp", "recompute_modules", ["mlp"], also="--recompute-activations --disable-bias-linear"
    ),
    "--spec": _model(f"{__name__} user_layer_spec", "transformer_layer_spec", user_layer_spec),
    "--transformer-impl": _args("local", "transformer_impl", "local", always=True),
    "--use-mcore-models": _args("", "deprecated_use_mcore_models", True),
    "--no-masked-softmax-fusion": _model("", "masked_softmax_fusion", False, cuda=True),
    "--no-bias-gelu-fusion": _model("", "bias_activation_fusion", False, cuda=True),
    "--no-bias-swiglu-fusion": _model(
        "", "bias_activation_fusion", False, also="--swiglu", cuda=True
    ),
    "--no-bias-dropout-fusion": _model("", "bias_dropout_fusion", False, cuda=True),
    "--no-rope-fusion": _args("", "apply_rope_fusion", False, also=_ROPE, always=True),
    "--no-persist-layer-norm": _model("", "persist_layer_norm", False, always=True),
    "--no-gradient-accumulation-fusion": _model(
        "", "gradient_accumulation_fusion", False, cuda=True
    ),
    "--disable-jit-fuser": _args("", "disable_jit_fuser", True, cuda=True),
    # latent attention
    "--multi-latent-attention": _model("", "multi_latent_attention", True),
    "--q-lora-rank": _latents("24", "q_lora_rank", 24),
    "--kv-lora-rank": _latents("24", "kv_lora_rank", 24),
    "--qk-head-dim": _latents("24", "qk_head_dim", 24),
    "--qk-pos-emb-head-dim": _latents("24", "qk_pos_emb_head_dim", 24),
    "--v-head-dim": _latents("24", "v_head_dim", 24),
    "--rope-type": _latents("rope", "rope_type", "rope"),
    "--rotary-scaling-factor": _latents("40", "rotary_scaling_factor", 40.0),
    "--mscale": _latents("0.7", "mscale", 0.7),
    "--mscale-all-dim": _latents("0.7", "mscale_all_dim", 0.7),
    # experts
    "--num-experts": _model("4", "num_moe_experts", 4, also="--disable-bias-linear"),
    "--moe-layer-freq": _experts("([0]+[1]*3)", "moe_layer_freq", [0, 1, 1, 1]),
    "--moe-ffn-hidden-size": _experts("24", "moe_ffn_hidden_size", 24),
    "--moe-router-topk": _experts("3", "moe_router_topk", 3),
    "--moe-router-score-function": _experts("sigmoid", "moe_router_score_function", "sigmoid"),
    "--moe-router-pre-softmax": _experts("", "moe_router_pre_softmax", True),
    "--moe-router-num-groups": _experts(
        "4", "moe_router_num_groups", 4, "--moe-router-group-topk 2"
    ),
    "--moe-router-group-topk": _experts(
        "2", "moe_router_group_topk", 2, "--moe-router-num-groups 4"
    ),
    "--moe-router-topk-scaling-factor": _experts("2.5", "moe_router_topk_scaling_factor", 2.5),
    "--moe-router-dtype": _experts("fp64", "moe_router_dtype", "fp64"),
    "--moe-router-load-balancing-type": _experts("none", "moe_router_load_balancing_type", "none"),
    "--moe-aux-loss-coeff": _experts("0.01", "moe_aux_loss_coeff", 0.01),
    "--moe-z-loss-coeff": _experts("0.001", "moe_z_loss_coeff", 0.001),
    "--moe-router-enable-expert-bias": _experts(
        "", "moe_router_enable_expert_bias", True, "--moe-router-score-function sigmoid"
    ),
    "--moe-router-bias-update-rate": _experts(
        "0.01",
        "moe_router_bias_update_rate",
        0.01,
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
    "--moe-shared-expert-intermediate-size": _experts(
        "24", "moe_shared_expert_intermediate_size", 24
    ),
    "--moe-shared-expert-gate": _experts(
        "", "moe_shared_expert_gate", True, "--moe-shared-expert-intermediate-size 24"
    ),
    "--moe-token-dispatcher-type": _experts("alltoall", "moe_token_dispatcher_type", "alltoall"),
    # Without CUDA the plain path runs instead.
    "--moe-grouped-gemm": _args("", "moe_grouped_gemm", False, also=_EXPERTS, always=True),
    "--moe-permute-fusion": _args("", "moe_permute_fusion", False, also=_EXPERTS, always=True),
    "--expert-model-parallel-size": Row(
        "4", "strategy", "2*cp4~ep4", also="--num-experts 8 --disable-bias-linear"
    ),
    "--expert-tensor-parallel-size": Row(
        "4", "strategy", "2*cp4~ep4", also="--num-experts 8 --disable-bias-linear"
    ),
    # batch and loop
    "--global-batch-size": _args("7", "global_batch_size", 7),
    "--rampup-batch-size": Row(
        "2 2 12", "sizes.steps", ((0, 2), (4, 4), (8, 6), (12, 8)), **_BY_SAMPLES
    ),
    "--step-batch-size-schedule": Row(
        "0:4,1K:8", "sizes.steps", ((0, 4), (1000 // 128, 8)), **_BY_SAMPLES
    ),
    "--seq-length": _args("96", "seq_length", 96),
    "--train-iters": _args("12", "train_iters", 12),
    "--train-samples": _args("96", "train_samples", 96, **_BY_SAMPLES),
    "--seed": _args("7", "seed", 7),
    "--calculate-per-token-loss": _model("", "calculate_per_token_loss", True, always=True),
    "--reset-position-ids": _args("", "reset_position_ids", True, always=True),
    "--reset-attention-mask": _args("", "reset_attention_mask", True, always=True),
    "--exit-interval": _args("5", "exit_interval", 5),
    "--exit-duration-in-mins": _args("9", "exit_duration_in_mins", 9),
    "--exit-signal-handler": _args("", "exit_signal_handler", True),
    "--exit-signal": _args("SIGUSR1", "exit_signal", signal.SIGUSR1, also="--exit-signal-handler"),
    "--eval-interval": _args("4", "eval_interval", 4),
    "--eval-iters": _args("3", "eval_iters", 3),
    "--start-eval-at-iter": _args("8", "start_eval_at_iter", 8, also="--eval-interval 4"),
    "--eval-global-batch-size": Row(
        "4", "evaluation_sizes.steps", ((0, 4),), also="--eval-interval 4"
    ),
    "--manual-gc": _args("", "manual_gc", True),
    "--manual-gc-interval": _args("5", "manual_gc_interval", 5, also="--manual-gc"),
    "--no-manual-gc-eval": _args("", "manual_gc_eval", False, also="--manual-gc"),
    # optimizer and schedules
    "--optimizer": _args("adam", "optimizer", "adam", always=True),
    "--lr": _args("0.02", "lr", 0.02),
    "--min-lr": _args("1e-4", "min_lr", 1e-4),
    "--decoupled-lr": _args("0.02", "decoupled_lr", 0.02),
    "--decoupled-min-lr": _args("1e-4", "decoupled_min_lr", 1e-4, also="--decoupled-lr 0.1"),
    "--lr-decay-style": _args("cosine", "lr_decay_style", "cosine"),
    "--lr-decay-iters": _args("8", "lr_decay_iters", 8),
    "--lr-warmup-iters": _args("3", "lr_warmup_iters", 3),
    "--lr-decay-samples": _args("40", "lr_decay_samples", 40, **_BY_SAMPLES),
    "--lr-warmup-samples": _args("8", "lr_warmup_samples", 8, **_BY_SAMPLES),
    "--lr-wsd-decay-samples": _args(
        *("9", "lr_wsd_decay_samples", 9),
        also="--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 7",
        without=("--train-iters",),
    ),
    "--lr-warmup-fraction": _args("0.1", "lr_warmup_fraction", 0.1),
    "--lr-warmup-init": _args("1e-5", "lr_warmup_init", 1e-5),
    "--lr-wsd-decay-style": _args(
        "linear",
        "lr_wsd_decay_style",
        "linear",
        also="--lr-decay-style WSD --lr-wsd-decay-iters 2",
    ),
    "--lr-wsd-decay-iters": _args(
        "3", "lr_wsd_decay_iters", 3, also="--lr-decay-style WSD --lr-wsd-decay-iters 2"
    ),
    "--weight-decay": _args("0.2", "end_weight_decay", 0.2),
    "--start-weight-decay": _args("0.2", "start_weight_decay", 0.2, also=_CHANGING_DECAY),
    "--end-weight-decay": _args("0.4", "end_weight_decay", 0.4, also=_CHANGING_DECAY),
    "--weight-decay-incr-style": _args(
        "cosine", "weight_decay_incr_style", "cosine", also=_CHANGING_DECAY
    ),
    "--clip-grad": _args("0.5", "clip_grad", 0.5),
    "--apply-wd-to-qk-layernorm": _args(
        "", "apply_wd_to_qk_layernorm", True, also="--qk-layernorm"
    ),
    "--no-weight-decay-cond-type": _args(
        "apply_wd_to_qk_layernorm", "apply_wd_to_qk_layernorm", True, also="--qk-layernorm"
    ),
    "--adam-beta1": _args("0.8", "adam_beta1", 0.8),
    "--adam-beta2": _args("0.95", "adam_beta2", 0.95),
    "--adam-eps": _args("1e-5", "adam_eps", 1e-5),
    "--use-distributed-optimizer": _args("", "use_distributed_optimizer", True, always=True),
    "--grad-reduce-in-bf16": _args("", "grad_reduce_in_bf16", True, also="--bf16"),
    "--bf16": _model("", "params_dtype", torch.bfloat16),
    "--accumulate-allreduce-grads-in-fp32": _args(
        "", "accumulate_allreduce_grads_in_fp32", True, always=True
    ),
    # checkpoints
    "--save": _args("{dir} --save-interval 2", "save", "{dir}"),
    "--save-interval": _args("3", "save_interval", 3, also="--save {dir} --save-interval 2"),
    "--async-save": _args("", "async_save", True, also="--save {dir} --save-interval 2"),
    "--load": _args("{dir}", "load", "{dir}"),
    "--ckpt-step": _args("4", "ckpt_step", 4, also="--load {dir}"),
    "--no-load-optim": _args("", "no_load_optim", True, also="--load {dir}"),
    "--finetune": _args("", "finetune", True, also="--load {dir}"),
    "--exit-on-missing-checkpoint": _args(
        "", "exit_on_missing_checkpoint", True, also="--load {dir}"
    ),
    "--dist-ckpt-optim-fully-reshardable": _args(
        "", "dist_ckpt_optim_fully_reshardable", True, always=True
    ),
    "--override-opt_param-scheduler": _args(
        "", "override_opt_param_scheduler", True, also="--load {dir}"
    ),
    "--use-checkpoint-opt_param-scheduler": _args(
        "", "use_checkpoint_opt_param_scheduler", True, also="--load {dir}"
    ),
    # parallelism
    "--tensor-model-parallel-size": Row("2", "strategy", "4*tp2"),
    "--pipeline-model-parallel-size": Row("2", "strategy", "4*pp2"),
    "--context-parallel-size": Row("2", "strategy", "4*cp2"),
    "--cp-comm-type": _model("a2a", "cp_comm_type", "a2a"),
    "--sequence-parallel": Row(
        "", "hydraulis.sequence_parallel", True, also="--no-sequence-parallel"
    ),
    "--deterministic-mode": _args("", "deterministic_mode", True),
    "--distributed-backend": _args("gloo", "distributed_backend", "gloo", always=True),
    "--distributed-timeout-minutes": _args("3", "distributed_timeout_minutes", 3),
    # data
    "--data-path": _args("{dir}/other", "data_path", ["{dir}/other"]),
    "--split": _args("8,1,1", "split", "8,1,1"),
    "--train-data-path": _args(
        "{dir}/other", "train_data_path", ["{dir}/other"], without=("--data-path",)
    ),
    "--valid-data-path": _args(
        "{dir}/other",
        "valid_data_path",
        ["{dir}/other"],
        also="--train-data-path {dir}/other",
        without=("--data-path",),
    ),
    "--test-data-path": _args(
        "{dir}/other",
        "test_data_path",
        ["{dir}/other"],
        also="--train-data-path {dir}/other",
        without=("--data-path",),
    ),
    "--tokenizer-type": _args(
        "HuggingFaceTokenizer",
        "tokenizer_type",
        "HuggingFaceTokenizer",
        also="--tokenizer-model {dir}/file",
    ),
    "--tokenizer-model": _args("{dir}/file2", "tokenizer_model", "{dir}/file2", also=_HUGGING_FACE),
    "--vocab-file": _args("{dir}/file2", "vocab_file", "{dir}/file2", also=_BPE),
    "--merge-file": _args("{dir}/file2", "merge_file", "{dir}/file2", also=_BPE),
    "--vocab-size": Row("300", "vocabulary.padded_size", 384),
    "--padded-vocab-size": Row("264", "vocabulary.padded_size", 264),
    "--tokenizer-metadata": _args("{dir}/file", "metadata_path", "{dir}/file"),
    "--tokenizer-special-tokens": _args("<a> <b>", "special_tokens", ["<a>", "<b>"]),
    "--tiktoken-pattern": _args("v2", "tiktoken_pattern", "v2", also=_TIK),
    "--tiktoken-num-special-tokens": _args("50", "tiktoken_num_special_tokens", 50, also=_TIK),
    "--tokenizer-sentencepiece-legacy": _args(
        "", "tokenizer_sentencepiece_legacy", True, also=_SENTENCE_PIECE
    ),
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": _args(
        "", "tokenizer_sentencepiece_ignore_extra_whitespaces", False, also=_SENTENCE_PIECE
    ),
    "--tokenizer-hf-no-use-fast": _args("", "tokenizer_hf_no_use_fast", True, also=_HUGGING_FACE),
    "--tokenizer-hf-no-include-special-tokens": _args(
        "", "tokenizer_hf_no_include_special_tokens", True, also=_HUGGING_FACE
    ),
    "--trust-remote-code": _args("", "trust_remote_code", True, also=_HUGGING_FACE),
    "--sft": _args("", "sft", True, also=_CHAT),
    "--sft-tokenizer-prompt-format": _args(
        "identity", "sft_tokenizer_prompt_format", "identity", also=f"--sft {_CHAT}"
    ),
    "--null-tokenizer-eod-id": _args("3", "null_tokenizer_eod_id", 3),
    "--null-tokenizer-pad-id": _args("4", "null_tokenizer_pad_id", 4),
    # logging
    "--log-interval": _args("2", "log_interval", 2),
    "--log-throughput": _args("", "log_throughput", True, always=True),
    "--timing-log-level": _args("2", "timing_log_level", 2),
    "--timing-log-option": _args("max", "timing_log_option", "max"),
    "--logging-level": _args("30", "logging_level", 30),
    "--tensorboard-dir": _args("{dir}", "tensorboard_dir", "{dir}"),
    "--tensorboard-log-interval": _args("3", "tensorboard_log_interval", 3),
    "--tensorboard-queue-size": _args("5", "tensorboard_queue_size", 5),
    "--log-timers-to-tensorboard": _args("", "log_timers_to_tensorboard", True),
    "--no-log-loss-scale-to-tensorboard": _args("", "log_loss_scale_to_tensorboard", False),
    "--log-validation-ppl-to-tensorboard": _args("", "log_validation_ppl_to_tensorboard", True),
    "--log-world-size-to-tensorboard": _args("", "log_world_size_to_tensorboard", True),
    "--wandb-project": _args("p", "wandb_project", "p"),
    "--wandb-exp-name": _args("n", "wandb_exp_name", "n", also="--wandb-project p"),
    "--wandb-save-dir": _args("{dir}", "wandb_save_dir", "{dir}", also="--wandb-project p"),
    "--wandb-entity": _args("e", "wandb_entity", "e", also="--wandb-project p"),
    "--no-one-logger": _args("", "enable_one_logger", False, always=True),
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


def _read(resolved: Resolved, where: str) -> Any:
    if where == "strategy":
        return str(resolved.pool.strategies[0])
    holder, attribute = where.split(".")
    if holder == "model":
        return getattr(gpt_model_config(resolved.args), attribute)
    return getattr(getattr(resolved, holder), attribute)


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
    if row.where.startswith("args."):
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
    assert _read(with_option, row.where) == value

    if option == "--train-data-path":
        assert with_option.args.data_path is None
        return
    if option in ("--moe-router-num-groups", "--moe-router-group-topk"):
        with pytest.raises(ConfigurationError, match=f"{option} is missing"):
            parse(tmp_path, *also)
        return
    without_option = parse(tmp_path, *also, without=row.without)
    assert (_read(without_option, row.where) == value) is row.always


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
