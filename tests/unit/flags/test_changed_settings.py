"""Settings that differ between a checkpoint and the run that loads it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.checkpoint.manifest import (
    ADAPTER_ARGUMENTS,
    EXPERT_ARGUMENTS,
    LATENT_ARGUMENTS,
    MODEL_ARGUMENTS,
    MODEL_SETTINGS,
    OFF_BY_DEFAULT,
    RECURRENT_ARGUMENTS,
    YARN_ARGUMENTS,
)
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.flags import changes
from megatron.hydraulis.flags.changes import Change
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.library.planning import Planning
from tests.unit.flags.argument_command import flag_parser, parse

pytestmark = pytest.mark.usefixtures("plain_environment")

COMPARED_OTHERWISE = """
    add_position_embedding group_query_attention use_rotary_position_embeddings
    max_position_embeddings make_vocab_size_divisible_by padded_vocab_size vocab_size
    data_path train_data_path valid_data_path test_data_path split seq_length long_sequences seed
    tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens
    tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy
    tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
    tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id
    train_iters train_samples sft sft_tokenizer_prompt_format
    """
"""By the shapes of tensors, the fingerprint of the data, the sampler or the schedule's length."""

NO_UPDATE_DEPENDS_ON = """
    deterministic_mode
    calculate_per_token_loss reset_position_ids reset_attention_mask hidden_dropout
    attention_dropout accumulate_allreduce_grads_in_fp32 use_distributed_optimizer
    dist_ckpt_optim_fully_reshardable enable_one_logger log_throughput apply_rope_fusion
    no_persist_layer_norm deprecated_use_mcore_models
    init_method_std
    transformer_impl attention_backend core_attention cp_comm_type masked_softmax_fusion
    bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion gradient_accumulation_fusion
    disable_jit_fuser recompute_granularity recompute_activations recompute_method
    recompute_num_layers recompute_modules moe_token_dispatcher_type moe_grouped_gemm
    moe_permute_fusion
    strategy strategy_pool strategy_schedule balance_pipeline_layers no_sequence_parallel
    sequence_parallel tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    regroup_owners_for no_regroup_overlap elastic ranks_per_node device
    distributed_backend distributed_timeout_minutes
    cost_profile report_drift memory_trial max_tokens_per_micro_batch
    row_quantum_tokens loss_chunk_tokens fs_prefetch plan_ahead plan_time_limit plan_dir
    replay_plans
    skip_nan_iterations max_skipped_in_a_row ignore_unknown_options
    eval_interval eval_iters eval_global_batch_size start_eval_at_iter
    async_save save_interval keep_last
    exit_interval exit_duration_in_mins exit_signal exit_signal_handler
    manual_gc manual_gc_interval manual_gc_eval trust_remote_code trace trace_iterations
    log_interval logging_level timing_log_level timing_log_option tensorboard_log_interval
    tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard
    log_validation_ppl_to_tensorboard log_world_size_to_tensorboard wandb_project wandb_exp_name
    wandb_entity
    """
"""Always the same, needed only for new weights, or without effect on an update."""


def test_every_setting_is_classified_once() -> None:
    ours = [field.name for field in dataclasses.fields(HydraulisConfig)]
    settings = {*flag_parser().honoured_defaults, *ours}
    of_model = (
        *MODEL_ARGUMENTS,
        *EXPERT_ARGUMENTS,
        *LATENT_ARGUMENTS,
        *RECURRENT_ARGUMENTS,
        *YARN_ARGUMENTS,
        *ADAPTER_ARGUMENTS,
    )
    compared = {*of_model, *OFF_BY_DEFAULT} & settings
    classes = (
        *(compared, changes._CHANGE_UPDATE, changes._OF_SCHEDULE, changes._OF_ONE_START),
        *(COMPARED_OTHERWISE.split(), NO_UPDATE_DEPENDS_ON.split()),
    )
    assert sorted(itertools.chain(*classes)) == sorted(settings)


def changed_settings(
    saved: dict[str, Any], here: dict[str, Any], *, keeps_schedule: bool = False
) -> tuple[Change, ...]:
    defaults = flag_parser().honoured_defaults
    return changes.changed_settings(
        saved, here, upstream_defaults=defaults, keeps_schedule=keeps_schedule
    )


def described(folder: Path, *extra: str) -> dict[str, Any]:
    resolved = parse(folder, *extra, num_ranks=1)
    return Planning.of(resolved, device_constants("cpu"), None).description_of(resolved)


def test_every_changed_setting_is_named_those_of_the_update_first(tmp_path: Path) -> None:
    before = described(tmp_path, "--clip-grad", "2", "--run-dir", "a")
    here = described(
        tmp_path, "--log-interval", "5", "--adam-beta1", "0.8", "--bf16", "--run-dir", "b"
    )
    assert [(str(change), change.changes_update) for change in changed_settings(before, here)] == [
        ("--adam-beta1 0.9 -> 0.8", True),
        ("--bf16 False -> True", True),
        ("--clip-grad 2.0 -> 1.0", True),
        ("--log-interval 1 -> 5", False),
    ]
    assert changed_settings(here, here) == ()


def test_settings_of_the_model_are_not_listed_again(tmp_path: Path) -> None:
    """As many groups as heads are the same model as no groups: nobody gave the default, 1."""
    before = described(tmp_path, "--group-query-attention", "--num-query-groups", "4")
    here = described(tmp_path)
    assert {change.name for change in changed_settings(before, here)} == {
        "group_query_attention",
        "num_query_groups",
    }
    defaults = flag_parser().honoured_defaults
    left = changes.changed_settings(
        before, here, upstream_defaults=defaults, compared=MODEL_SETTINGS
    )
    assert left == ()


def test_what_decays_changes_the_update(tmp_path: Path) -> None:
    here = described(tmp_path, "--qk-layernorm", "--apply-wd-to-qk-layernorm")
    (change,) = changed_settings(described(tmp_path, "--qk-layernorm"), here)
    assert str(change) == "--apply-wd-to-qk-layernorm False -> True"
    assert change.changes_update


def test_the_schedule_of_the_checkpoint_changes_nothing(tmp_path: Path) -> None:
    before, here = described(tmp_path), described(tmp_path, "--lr", "0.5", "--weight-decay", "0")
    changed = {change.name for change in changed_settings(before, here)}
    assert changed >= {"lr", "weight_decay"}
    assert changed_settings(before, here, keeps_schedule=True) == ()


def test_intervals_that_no_option_gives_are_left_out(tmp_path: Path) -> None:
    def changed(*extra: str) -> set[str]:
        before = described(tmp_path, "--save", "x", "--train-iters", "20", *extra)
        here = described(tmp_path, "--save", "x")
        return {change.name for change in changed_settings(before, here)}

    assert changed() == {"train_iters"}
    assert changed("--save-interval", "5") == {"save_interval", "train_iters"}


def test_numbers_that_stand_in_for_settings_are_left_out(tmp_path: Path) -> None:
    """Earlier versions wrote them."""
    before, here = described(tmp_path), described(tmp_path)
    before["settings"] |= {"eval_interval": 11, "save_interval": 11, "eval_global_batch_size": 8}
    assert changed_settings(before, here) == ()
    given = described(tmp_path, "--save", "x", "--save-interval", "5")
    (change,) = changed_settings(given, here)
    assert str(change) == "--save-interval 5 -> none"


def test_finetune_is_of_one_start_and_another_spec_changes_the_update(tmp_path: Path) -> None:
    spec = ("--spec", "megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")
    before, here = described(tmp_path, "--load", "x", "--finetune"), described(tmp_path, *spec)
    (change,) = changed_settings(before, here)
    assert (str(change), change.changes_update) == (f"--spec none -> {' '.join(spec[1:])}", True)


def test_settings_of_another_version_are_left_out(tmp_path: Path) -> None:
    here = described(tmp_path)
    del here["settings"]["clip_grad"]
    before = described(tmp_path, "--clip-grad", "2")
    before["hydraulis"]["no_longer_there"] = 1
    assert changed_settings(before, here) == ()
    assert changed_settings({}, here) == ()


def test_settings_of_the_update_that_an_older_checkpoint_lacks_had_their_defaults(
    tmp_path: Path,
) -> None:
    older = described(tmp_path)
    # Training always needs a batch size, so that every checkpoint has it.
    for name in {*changes._CHANGE_UPDATE} - {"global_batch_size"}:
        older["settings"].pop(name, None)
        older["hydraulis"].pop(name, None)
    del older["hydraulis"]["keep_last"]
    assert changed_settings(older, described(tmp_path, "--clip-grad", "1")) == ()
    options = ("--bf16", "--grad-reduce-in-bf16")
    here = described(tmp_path, *options, "--save", "x", "--keep-last", "2")
    assert [str(each) for each in changed_settings(older, here) if each.changes_update] == [
        "--bf16 False -> True",
        "--grad-reduce-in-bf16 False -> True",
    ]
    assert changed_settings({}, here) == ()
