"""Settings that differ between the run that wrote a checkpoint and the one that loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.hydraulis.flags.config import option_of

_CHANGE_UPDATE = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "bf16",
    "clip_grad",
    "decoupled_lr",
    "decoupled_min_lr",
    "global_batch_size",
    "global_batch_tokens",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
    "optimizer",
    "rampup_batch_size",
    "step_batch_size_schedule",
)
"""Settings on which the update depends and which upstream's learning-rate schedule, when it is
loaded, does not compare. The data and the model are compared by themselves."""

_OF_ONE_START = (
    "allow_changed_settings",
    "allow_other_data",
    "ckpt_step",
    "dry_run",
    "load",
    "load_fallback",
    "num_ranks",
    "run_dir",
    "save",
    "take_over_save",
    "tensorboard_dir",
    "wandb_save_dir",
)
"""Settings that say nothing of how the run trains, and differ in most restarts."""

_SECTIONS = ("settings", "hydraulis")


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value."""

    name: str
    """The attribute, as --dry-run and config.json name it."""
    before: Any
    after: Any

    @property
    def changes_update(self) -> bool:
        """Whether training takes another course by it."""
        return self.name in _CHANGE_UPDATE

    def __str__(self) -> str:
        return f"{option_of(self.name)} {self.before} -> {self.after}"


def changed_settings(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[Change, ...]:
    """The settings in which two configurations differ, those that change the update first.

    saved, here: as `describe` returns them. A setting that only one of them has, as another version
    of this program wrote it, is left out.
    """
    return tuple(sorted(_changes(saved, here), key=lambda change: not change.changes_update))


def _changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Change]:
    for section in _SECTIONS:
        before, after = saved.get(section, {}), here[section]
        for name in sorted(before.keys() & after.keys()):
            if name not in _OF_ONE_START and before[name] != after[name]:
                yield Change(name, before[name], after[name])
