"""Settings that differ between a checkpoint and the run that loads it."""

from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.flags.changes import changed_settings
from megatron.hydraulis.loop.planning import Planning
from tests.unit.argument_command import parse

pytestmark = pytest.mark.usefixtures("plain_environment")


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


def test_settings_of_another_version_are_left_out(tmp_path: Path) -> None:
    here = described(tmp_path)
    del here["settings"]["clip_grad"]
    before = described(tmp_path, "--clip-grad", "2")
    before["hydraulis"]["no_longer_there"] = 1
    assert changed_settings(before, here) == ()
    assert changed_settings({}, here) == ()
