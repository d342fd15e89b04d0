"""Saved and resumed: the same run, bit by bit on the same ranks, to rounding on others."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint import folder_lock
from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, CheckpointFolder
from megatron.hydraulis.checkpoint.folder_lock import LOCK_FILE_NAME, FolderLocks, Writer
from megatron.hydraulis.checkpoint.loading import upstream_state
from megatron.hydraulis.checkpoint.manifest import Manifest
from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint
from megatron.hydraulis.errors import CheckpointError
from megatron.hydraulis.loop import entry
from megatron.hydraulis.loop.entry import EXIT_STATUS_OF_ERROR
from megatron.hydraulis.observability.records import METRICS_FILE_NAME
from tests.support.checkpoints import whole_tensors
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import (
    VOCAB_SIZE,
    document_lengths,
    tiny_command,
    write_corpus,
    write_weights,
)
from tests.support.training_log import validation_losses
from tests.support.training_run import (
    BATCH_SIZE,
    MAIN_FLAGS,
    ROUNDING,
    SEED,
    SPLIT,
    TRAIN_ITERS,
    Launch,
    Run,
)

pytestmark = pytest.mark.distributed

SAVED_AT = 2
NUM_RANKS = 4


def write_pool(path: Path, num_ranks: int, **strategies: str) -> str:
    entries = [{"name": name, "replicas": text} for name, text in strategies.items()]
    content = {"num_ranks": num_ranks, "ranks_per_node": num_ranks, "strategies": entries}
    path.write_text(json.dumps(content))
    return str(path)


def lengths_of(run: Run) -> dict[int, list[int]]:
    """Lengths of the sequences of every planned iteration."""
    return {
        plan.iteration: sorted(
            length
            for replica in plan.replicas
            for micro_batch in replica.micro_batches
            for length in micro_batch.lengths
        )
        for plan in run.plans
    }


@pytest.fixture(scope="module")
def pool_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pool") / "pool.json"
    return write_pool(path, NUM_RANKS, short="4*tp1", mixed="tp2+pp2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def uninterrupted(launch: Launch, pool_file: str, saved: Path) -> Run:
    schedule = ("--strategy-pool", pool_file, "--strategy-schedule", "mixed,short,short")
    save = ("--save", str(saved), "--save-interval", str(SAVED_AT), "--load", str(saved))
    return launch(None, NUM_RANKS, *schedule, *save, *MAIN_FLAGS)


@pytest.fixture(scope="module")
def resumed(launch: Launch, pool_file: str, uninterrupted: Run, saved: Path) -> tuple[Run, Path]:
    schedule = ("--strategy-pool", pool_file, "--strategy-schedule", "mixed,short,short")
    load = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    again = saved.parent / "saved_again"
    save = ("--save", str(again), "--save-interval", str(SAVED_AT), "--async-save")
    run = launch(None, NUM_RANKS, *schedule, *load, *save, "--keep-last", "1", *MAIN_FLAGS)
    return run, again


def test_on_the_same_ranks_a_resumed_run_is_bitwise_equal(
    uninterrupted: Run, resumed: tuple[Run, Path], saved: Path
) -> None:
    run, again = resumed
    assert [r.iteration for r in run.records] == [3, 4]
    assert run.losses == uninterrupted.losses[SAVED_AT:]
    assert [r.learning_rate for r in run.records] == [
        r.learning_rate for r in uninterrupted.records[SAVED_AT:]
    ]
    before = {plan.iteration: plan.digest for plan in uninterrupted.plans}
    assert {p.iteration: p.digest for p in run.plans} == {i: before[i] for i in (2, 3)}
    last = "iter_0000004"
    expected, found = whole_tensors(saved / last), whole_tensors(again / last)
    assert expected.keys() == found.keys()
    differing = [key for key in expected if not torch.equal(expected[key], found[key])]
    assert differing == []
    states = [Manifest.read(folder / last).state for folder in (saved, again)]
    assert states[0] == states[1]


def test_only_the_last_checkpoint_is_kept_and_named(resumed: tuple[Run, Path], saved: Path) -> None:
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert sorted(p.name for p in saved.iterdir() if p.is_dir()) == [
        "iter_0000002",
        "iter_0000004",
    ]
    _, again = resumed
    assert [p.name for p in again.iterdir() if p.is_dir()] == ["iter_0000004"]


@pytest.mark.parametrize(("num_ranks", "strategy"), [(2, "tp2"), (3, "pp2+tp1")])
def test_other_ranks_continue_with_the_same_sequences(
    launch: Launch, uninterrupted: Run, saved: Path, tmp_path: Path, num_ranks: int, strategy: str
) -> None:
    load: tuple[str, ...] = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    if num_ranks == 3:  # the same from another source
        shutil.copytree(saved, tmp_path / "damaged")
        (tmp_path / "damaged" / "iter_0000004" / "__2_0.distcp").unlink()
        load = ("--load", str(tmp_path / "damaged"), "--load-fallback")
    run = launch(strategy, num_ranks, *load, *MAIN_FLAGS)
    assert ("__2_0.distcp is missing" in run.outcome.stdout) == (num_ranks == 3)
    assert [r.iteration for r in run.records] == [3, 4]
    assert run.losses == pytest.approx(uninterrupted.losses[SAVED_AT:], rel=ROUNDING)
    before = lengths_of(uninterrupted)
    assert lengths_of(run) == {i: before[i] for i in (2, 3)}
    assert [r.consumed_samples for r in run.records] == [
        r.consumed_samples for r in uninterrupted.records[SAVED_AT:]
    ]
    assert f"written by {NUM_RANKS} ranks, now {num_ranks} go on" in run.outcome.stdout


def test_without_the_optimizer_a_run_continues_in_its_own_folder(
    launch: Launch, uninterrupted: Run, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "continued"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("iter_0000004"))
    (folder / LATEST_FILE_NAME).write_text(str(SAVED_AT))
    places = ("--load", str(folder), "--save", str(folder), "--save-interval", "2")
    run = launch("tp1", 1, *places, "--no-load-optim", *MAIN_FLAGS)
    assert [r.iteration for r in run.records] == [3, 4]
    assert run.losses[0] == pytest.approx(uninterrupted.losses[SAVED_AT], rel=ROUNDING)
    before = lengths_of(uninterrupted)
    assert lengths_of(run) == {i: before[i] for i in (2, 3)}
    assert [r.learning_rate for r in run.records] == [
        r.learning_rate for r in uninterrupted.records[:2]
    ], "upstream's schedule starts again too"
    assert "optimizer and learning-rate schedule are new" in run.outcome.stdout
    state = CheckpointFolder(folder).path_of(4)
    assert upstream_state(StoredCheckpoint(state)).num_steps == 2
    assert Manifest.read(state).state["sampler"]["num_batches"] == 4


def test_inspect_checkpoint_describes_a_run(
    uninterrupted: Run, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect-checkpoint", str(saved)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for fact in (
        "2 checkpoints, latest: iter_0000004",
        f"complete, checksums right │ {uninterrupted.records[-1].consumed_samples} │ {NUM_RANKS} │",
        "pool 4*tp1; tp2+pp2",
        "num_attention_heads 4",
    ):
        assert fact in printed


def test_the_first_start_says_that_it_begins_from_scratch(uninterrupted: Run, saved: Path) -> None:
    line = f"warning: there is no checkpoint in {saved} yet: training starts from scratch"
    assert line in uninterrupted.outcome.stdout


REFUSED = {
    "nothing to load": ("--load {empty}", "there is no checkpoint"),
    "another folder to save": ("--load {empty} --save {other} --save-interval 2", "no checkpoint"),
    "would be replaced": ("--save {saved} --save-interval 2", "give --load {saved} to go on"),
    "would be replaced from elsewhere": (
        "--load {empty} --save {saved} --save-interval 2",
        "with --load {empty} the run starts from what is there",
    ),
    "would be replaced from the start": (
        "--load {saved} --save {saved} --save-interval 2 --finetune",
        "with --finetune the run starts from iteration 1 and would replace them; "
        "give --load {saved} to go on without --finetune",
    ),
    "another schedule": (
        "--load {saved} --ckpt-step 2 --lr 0.5 --lr-warmup-iters 0",
        "was trained with another learning-rate schedule: --lr is 0.01 there and 0.5 here, the end "
        f"of the warm-up is {BATCH_SIZE} samples there and 0 samples here; give the former values",
    ),
    "another seed": ("--load {saved} --ckpt-step 2 --seed 5", "resume with --seed"),
    "no such iteration": ("--load {saved} --ckpt-step 3", "no checkpoint of iteration 3"),
    "other tokens": (
        "--load {saved} --ckpt-step 2 --data-path {shifted}",
        "was trained on other data: dataset '{shifted}' has other tokens; give the same data",
    ),
    "other weights": (
        "--load {saved} --ckpt-step 2 --data-path {weighted}",
        "was trained on other data: dataset '{weighted}' has other weights of tokens; give",
    ),
    "other lengths": (
        "--load {saved} --ckpt-step 2 --long-sequences truncate --seq-length 64",
        "was trained on other data: dataset '",
    ),
    "other settings": (
        "--load {saved} --ckpt-step 2 --adam-beta1 0.8 --bf16 --eval-iters 1 "
        "--loss-normalization sequence",
        "on which the update depends: --adam-beta1 0.9 -> 0.8, --bf16 False -> True, "
        "--loss-normalization token -> sequence; give",
    ),
    "another model": ("--load {saved} --norm-epsilon 0.1", "layernorm_epsilon is 1e-05 there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_cannot_be_resumed_ends_with_one_line(
    name: str, uninterrupted: Run, saved: Path, corpus_prefix: str, tmp_path: Path
) -> None:
    typed, message = REFUSED[name]
    places = {"saved": saved, "empty": tmp_path / "empty", "other": tmp_path / "other"}
    places["shifted"] = tmp_path / "shifted"
    write_corpus(places["shifted"], num_tokens=VOCAB_SIZE - 1)
    places["weighted"] = tmp_path / "weighted"
    num_tokens = sum(length + 1 for length in document_lengths())
    write_weights(write_corpus(places["weighted"]), np.ones(num_tokens))
    base = tiny_command(
        *(corpus_prefix, tmp_path / "run", "--strategy", "tp1", *MAIN_FLAGS),
        *("--seed", str(SEED), "--split", SPLIT, "--train-iters", str(TRAIN_ITERS)),
        *("--global-batch-size", str(BATCH_SIZE)),
    )
    outcome = run_job([*base, *typed.format(**places).split()], 1, tmp_path / "output")
    assert outcome.statuses == (EXIT_STATUS_OF_ERROR,)
    (line,) = [each for each in outcome.ranks[0].stderr.splitlines() if "error" in each.lower()]
    assert message.format(**places) in line
    assert not any((tmp_path / "other").glob("iter_*"))


def test_all_that_keeps_a_run_from_resuming_is_one_message(
    uninterrupted: Run, saved: Path, tmp_path: Path
) -> None:
    shifted = write_corpus(tmp_path / "shifted", num_tokens=VOCAB_SIZE - 1)
    other = (
        *("--data-path", shifted, "--seed", "7", "--clip-grad", "0.01", "--lr", "0.5"),
        *("--norm-epsilon", "0.1"),
    )
    load = ("--load", str(saved), "--ckpt-step", "2", "--run-dir", str(tmp_path / "run"))
    outcome = run_job([*uninterrupted.argv, *load, *other], 4, tmp_path / "output")
    first, *lines = outcome.ranks[0].stderr.partition("error: ")[2].splitlines()
    assert first == "5 problems with these flags:"
    says = (
        "layernorm_epsilon is 1e-05 there and 0.1 here",
        *("has other tokens", f"resume with --seed {SEED}"),
        *("--clip-grad 1.0 -> 0.01", "--lr is 0.01 there and 0.5 here"),
    )
    for line, words in zip(lines, says, strict=True):
        assert words in line


def test_a_folder_that_another_job_writes_to_is_refused_and_can_be_taken_over(
    corpus_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "save"
    save.mkdir()
    messages: list[str] = []
    theirs = Writer("Slurm's job 7", "node3", 11, "pid:[1]", "their token")
    monkeypatch.setattr(folder_lock, "HEARTBEAT_S", 0.2)
    lock = FolderLocks({"--save": save}, theirs, log=messages.append)
    argv = tiny_command(
        *(corpus_prefix, tmp_path / "run", "--strategy", "2*tp1", *MAIN_FLAGS),
        *("--train-iters", "3", "--save", str(save), "--save-interval", "3"),
    )
    lock.acquire()
    try:
        refused = run_job(argv, 2, tmp_path / "refused")
        assert EXIT_STATUS_OF_ERROR in refused.statuses
        assert "by Slurm's job 7 (process 11 on node3), which is running" in refused.stderr
        assert os.listdir(save) == [LOCK_FILE_NAME]
        taken = run_job([*argv, "--take-over-save"], 2, tmp_path / "taken")
        assert taken.statuses == (0, 0)
        assert "taken over (--take-over-save)" in taken.stdout
        with pytest.raises(CheckpointError, match="was taken over by"):
            lock.check()
    finally:
        lock.release()
    assert sorted(os.listdir(save)) == ["iter_0000003", LATEST_FILE_NAME]


def resume(launch: Launch, checkpoint: Path, *extra: str) -> Run:
    load = ("--load", str(checkpoint), "--ckpt-step", str(SAVED_AT))
    return launch("tp1", 1, *load, *MAIN_FLAGS, *extra)


def test_other_data_of_the_same_sizes_go_on_at_the_same_place_if_asked_for(
    launch: Launch, uninterrupted: Run, saved: Path, tmp_path: Path
) -> None:
    data = ("--data-path", write_corpus(tmp_path / "shifted", num_tokens=VOCAB_SIZE - 1))
    run = resume(launch, saved, *data, "--allow-other-data")
    assert lengths_of(run) == {i: lengths_of(uninterrupted)[i] for i in (2, 3)}
    assert run.losses != uninterrupted.losses[SAVED_AT:]
    assert "has other tokens; training goes on at the same place in them" in run.outcome.stdout


def test_other_shares_of_a_blend_are_refused_or_begin_with_the_first_sequence(
    launch: Launch, tmp_path: Path
) -> None:
    first, second = (write_corpus(tmp_path / name) for name in "ab")
    save = tmp_path / "save"
    blend = ("--data-path", "3", first, "7", second)
    run = launch(
        *("tp1", 1, *blend, "--save", str(save), "--save-interval", str(SAVED_AT)), *MAIN_FLAGS
    )
    other = ("--data-path", "0.5", first, "0.5", second)
    load = ("--load", str(save), "--ckpt-step", str(SAVED_AT))
    refused = run_job([*run.argv, *load, *other, "--save", str(tmp_path / "x")], 1, tmp_path / "o")
    assert refused.statuses == (EXIT_STATUS_OF_ERROR,)
    assert f"dataset '{first}' has a share of 0.3 there and 0.5 here" in refused.stderr
    assert "add --allow-other-data" in refused.stderr
    again = resume(launch, save, *other, "--allow-other-data")
    assert "training goes on with their first sequence" in again.outcome.stdout
    from_the_start = launch("tp1", 1, *other, "--train-iters", "2", *MAIN_FLAGS)
    assert list(lengths_of(again).values()) == list(lengths_of(from_the_start).values())


def test_changed_settings_of_the_update_need_a_flag_and_all_are_logged(
    launch: Launch, uninterrupted: Run, saved: Path
) -> None:
    changes = ("--clip-grad", "0.01", "--log-interval", "2")
    run = resume(launch, saved, *changes, "--allow-changed-settings")
    assert "  --clip-grad 1.0 -> 0.01\n" in run.outcome.stdout
    assert "  --log-interval 1 -> 2\n" in run.outcome.stdout
    assert "--train-iters" not in run.outcome.stdout.partition("changed ")[2].partition("[")[0]
    assert run.losses[0] == pytest.approx(uninterrupted.losses[SAVED_AT], rel=ROUNDING)
    assert run.losses[1] != pytest.approx(uninterrupted.losses[SAVED_AT + 1], rel=1e-4)


def test_a_checkpoint_is_evaluated_without_training(
    launch: Launch, uninterrupted: Run, saved: Path
) -> None:
    """The error for --skip-train gives this recipe."""
    recipe = ("--no-load-optim", "--eval-iters", "2", "--train-iters", str(SAVED_AT))
    run = resume(launch, saved, *recipe)
    assert run.records == []
    before = validation_losses(uninterrupted.outcome.stdout)[f"iteration {SAVED_AT}"]
    (found,) = validation_losses(run.outcome.stdout).values()
    assert found == pytest.approx(before, rel=ROUNDING)


def test_two_deterministic_runs_are_equal_bit_by_bit(launch: Launch) -> None:
    runs = [launch("2*tp1", 2, "--deterministic-mode", *MAIN_FLAGS) for _ in range(2)]
    assert runs[0].losses == runs[1].losses


def test_a_checkpoint_without_a_record_of_its_data_loads(
    launch: Launch, uninterrupted: Run, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "earlier"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("iter_0000004"))
    path = CheckpointFolder(folder).path_of(SAVED_AT)
    manifest = Manifest.read(path)
    state = {key: value for key, value in manifest.state.items() if key != "data"}
    dataclasses.replace(manifest, state=state, configuration={}).write(path)
    run = resume(launch, folder)
    assert run.losses == pytest.approx(uninterrupted.losses[SAVED_AT:], rel=ROUNDING)
    assert "does not record its data: these may be others" in run.outcome.stdout


@pytest.mark.parametrize("shared", ["--save", "--run-dir"])
def test_of_two_jobs_the_second_is_refused_until_the_first_is_killed(
    corpus_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    monkeypatch.setattr(folder_lock, "HEARTBEAT_S", 0.2)
    save, run_dir, killed = tmp_path / "save", tmp_path / "run", tmp_path / "killed"
    argv = tiny_command(
        *(corpus_prefix, run_dir, "--strategy", "tp1", *MAIN_FLAGS, "--train-iters", "2")
    )
    if shared == "--save":
        argv += ["--save", str(save), "--load", str(save)]
    others = argv if shared == "--run-dir" else [*argv, "--run-dir", str(tmp_path / "another")]

    def until_killed(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        while not killed.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    def first_program(argv: Sequence[str]) -> None:
        entry.main(argv, entry.UserHooks(loss_func=until_killed))

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(run_job, argv, 1, tmp_path / "first", program=first_program)
        try:
            metrics = run_dir / METRICS_FILE_NAME
            while not metrics.exists():
                assert not first.done(), first.result().stderr
                time.sleep(0.05)
            second = run_job(others, 1, tmp_path / "second")
        finally:
            killed.touch()
    assert second.statuses == (EXIT_STATUS_OF_ERROR,)
    folder = {"--save": save, "--run-dir": run_dir}[shared]
    in_use = rf"error: {shared} {folder} is in use by process \d+ on \S+, which is running; "
    assert re.search(in_use + f"end it, name another {shared}", second.stderr)
    assert metrics.exists(), "the second job moved the first one's run folder"
    assert first.result().statuses == (-signal.SIGKILL,)
    third = run_job(argv, 1, tmp_path / "third")
    assert third.statuses == (0,)
    assert "in use by" not in third.stdout + third.stderr
