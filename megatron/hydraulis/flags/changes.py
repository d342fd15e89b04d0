"""Settings that differ between the run that wrote a checkpoint and the one that loads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron.hydraulis.flags.config import HydraulisConfig, option_of

_CHANGE_UPDATE = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "apply_wd_to_qk_layernorm",
    "bf16",
    "clip_grad",
    "decoupled_lr",
    "decoupled_min_lr",
    "global_batch_size",
    "global_batch_tokens",
    "grad_reduce_in_bf16",
    "loss_normalization",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_z_loss_coeff",
    "mtp_loss_scaling_factor",
    "no_weight_decay_cond_type",
    "optimizer",
    "rampup_batch_size",
    "spec",
    "step_batch_size_schedule",
)
"""Settings on which the update depends and which upstream's learning-rate schedule, when it is
loaded, does not compare. The data and the rest of the model are compared by themselves."""

_OF_SCHEDULE = (
    "end_weight_decay",
    "lr",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_style",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "min_lr",
    "start_weight_decay",
    "weight_decay",
    "weight_decay_incr_style",
)
"""Settings that the schedule of a checkpoint replaces if upstream's flag asks for it."""

_OF_ONE_START = (
    "allow_changed_settings",
    "allow_other_data",
    "ckpt_step",
    "dry_run",
    "exit_on_missing_checkpoint",
    "finetune",
    "hf",
    "load",
    "load_fallback",
    "no_load_optim",
    "num_ranks",
    "override_opt_param_scheduler",
    "run_dir",
    "console",
    "save",
    "take_over_save",
    "tensorboard_dir",
    "use_checkpoint_opt_param_scheduler",
    "wandb_save_dir",
)
"""Settings that say nothing of how the run trains, and differ in most restarts."""

COMPLETED = (
    "eval_global_batch_size",
    "eval_interval",
    "global_batch_size",
    "lr_decay_iters",
    "lr_decay_samples",
    "save_interval",
    "step_batch_size_schedule",
    "train_iters",
)
"""Settings that get a number which follows from others unless an option gives them. Checkpoints of
earlier versions hold that number."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value."""

    name: str
    """The attribute, as --dry-run and config.json name it."""
    before: Any
    after: Any

    @property
    def changes_update(self) -> bool:
        """True if training takes another course by it."""
        return self.name in _CHANGE_UPDATE

    def __str__(self) -> str:
        return f"{option_of(self.name)} {_text(self.before)} -> {_text(self.after)}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)


def changed_settings(
    saved: Mapping[str, Any],
    here: Mapping[str, Any],
    *,
    upstream_defaults: Mapping[str, Any],
    compared: Collection[str] = (),
    keeps_schedule: bool = False,
) -> tuple[Change, ...]:
    """The settings in which two configurations differ, those that change the update first.

    A setting that only one of them has, as another version of this program wrote it, is left out,
    unless it changes the update and only this run has it: the checkpoint was trained with the
    option's default.

    Args:
        saved: of the checkpoint, as `describe` returns it.
        here: of this run.
        upstream_defaults: of upstream's settings that this version honours, by attribute.
        compared: settings that are compared elsewhere, and left out.
        keeps_schedule: whether the checkpoint's schedule of learning rate and decay is used.
    """
    given = {*saved.get("explicit_options", ()), *here["explicit_options"]}
    left_out = {
        *_OF_ONE_START,
        *compared,
        *(_OF_SCHEDULE if keeps_schedule else ()),
        *(name for name in COMPLETED if option_of(name) not in given),
    }
    defaults = {"settings": upstream_defaults, "hydraulis": asdict(HydraulisConfig())}
    completed = {
        section: {name: known[name] for name in _CHANGE_UPDATE if name in known} | saved[section]
        for section, known in defaults.items()
        if section in saved
    }
    changes = [
        Change(name, before, here[section][name])
        for section, settings in completed.items()
        for name, before in sorted(settings.items())
        if name not in left_out and here[section].get(name, before) != before
    ]
    return tuple(sorted(changes, key=lambda change: not change.changes_update))
