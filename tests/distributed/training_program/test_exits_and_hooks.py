"""Ways to end a run, users' models and losses, and dry runs."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import get_args
from torch.utils.tensorboard import SummaryWriter

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.loop import entry, job
from megatron.hydraulis.runtime.executor import loss_func
from megatron.hydraulis.runtime.model_building import packed_block_spec
from tests.support.forked_job import JobOutcome, Kill, Program, run_job
from tests.support.tiny_corpus import (
    PADDED_VOCAB_SIZE,
    SEQ_LENGTH,
    tiny_command,
    write_corpus,
)
from tests.support.training_run import (
    FFN,
    HIDDEN,
    NUM_LAYERS,
    ROUNDING,
    Launch,
    Run,
    probing,
)

pytestmark = pytest.mark.distributed


def test_an_exit_interval_ends_the_run_properly_even_with_idle_ranks(launch: Launch) -> None:
    flags = ("--train-iters", "100", "--exit-interval", "2")
    run = launch("tp1+idle", 2, *flags, draws_summary=True)
    assert [line.iteration for line in run.lines] == [1, 2]
    assert len(run.records) == 2
    table = run.outcome.ranks[1].stdout.partition("Training finished")[2]
    assert re.search(r"of 100 +│ +an --exit option ended it", table)
    assert (run.run_dir / "summary.png").is_file()
    assert json.loads((run.run_dir / "config.json").read_text())["has_ended"]


def interruptible(argv: Sequence[str]) -> None:
    """The program with Python's own handler of SIGINT, as in a process that is not forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    entry.main(argv)


def test_ctrl_c_saves_and_ends_the_run_properly(launch: Launch, tmp_path: Path) -> None:
    save = tmp_path / "save"
    run = launch(
        *("2*tp1", 2, "--train-iters", "100000", "--exit-signal-handler"),
        *("--save", str(save), "--save-interval", "100000"),
        program=interruptible,
        kill=Kill(rank=0, after="iteration        2/", number=signal.SIGINT),
    )
    last = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert last == len(run.records) >= 2
    assert "SIGINT: the run ends after this iteration" in run.outcome.ranks[0].stderr


def run_failing(folder: Path, program: Program, *flags: str, **how: Any) -> JobOutcome:
    """A job of two ranks that fails, each of which ends by itself; its run folder is "run"."""
    argv = tiny_command(
        write_corpus(folder / "tiny"),
        folder / "run",
        *("--strategy", "2*tp1", "--split", "100,0,0", "--train-iters", "100000", *flags),
    )
    return run_job(argv, 2, folder / "output", program=program, ends_others=False, **how)


def test_ctrl_c_without_a_handler_is_one_line(tmp_path: Path) -> None:
    kill = Kill(rank=0, after="iteration        2/", number=signal.SIGINT)
    outcome = run_failing(tmp_path, interruptible, kill=kill)
    assert outcome.statuses == (130, 1)
    assert outcome.ranks[0].stderr.splitlines()[-1].startswith("interrupted: what was trained")
    assert "another rank is gone: " in outcome.ranks[1].stderr
    assert outcome.ranks[1].stderr.count("phase '") == 1
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("writer", ["metrics", "TensorBoard"])
def test_a_full_disk_is_one_error_of_the_rank_that_writes(writer: str, tmp_path: Path) -> None:
    def program(argv: Sequence[str]) -> None:
        class FullDisk(job.MetricsWriter):
            def __init__(self, run_dir: Path) -> None:
                super().__init__(run_dir)
                self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

        def no_room(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if writer == "metrics":
            job.MetricsWriter = FullDisk  # type: ignore[misc, assignment]
        else:
            SummaryWriter.add_scalar = no_room  # type: ignore[method-assign]
        entry.main(argv)

    run_dir = tmp_path / "run"
    outcome = run_failing(tmp_path, program)
    assert outcome.statuses == (1, 2)
    (line,) = (line for line in outcome.stderr.splitlines() if line.startswith("error: "))
    path = {
        "metrics": run_dir / "metrics.jsonl",
        "TensorBoard": run_dir / "tensorboard" / "events.out.tfevents.*",
    }[writer]
    assert str(path) in line
    assert "No space left on device (" in line
    assert f" bytes are free in {path.parent}); " in line
    assert "another rank is gone: " in outcome.ranks[0].stderr
    assert "Traceback" not in outcome.stderr
    assert not json.loads((run_dir / "config.json").read_text())["has_ended"]


@pytest.mark.parametrize("failing", ["trace", "merging"])
def test_results_that_cannot_be_written_do_not_hide_the_table(failing: str, tmp_path: Path) -> None:
    def program(argv: Sequence[str]) -> None:
        rank = int(os.environ["RANK"])

        def no_room(*_: object, **__: object) -> None:
            raise ConfigurationError("no room for results")

        if (failing, rank) == ("trace", 1):
            job.RunTrace.close = no_room  # type: ignore[method-assign]
        if (failing, rank) == ("merging", 0):
            job.RunTrace.merge = no_room  # type: ignore[method-assign]
        entry.main(argv)

    trace = ("--trace", str(tmp_path / "trace"))
    outcome = run_failing(tmp_path, program, "--train-iters", "1", *trace)
    assert outcome.statuses == (2, 2)
    assert "Training finished" in outcome.ranks[1].stdout
    assert outcome.ranks[0].stderr.splitlines()[-1] == "error: no room for results"
    assert not json.loads((tmp_path / "run" / "config.json").read_text())["has_ended"]


def test_the_end_is_recorded_where_the_record_is(launch: Launch, tmp_path: Path) -> None:
    """Also if nodes do not share the folder of the run."""

    def on_own_disk(argv: Sequence[str]) -> None:
        entry.main([*argv, "--run-dir", str(tmp_path / os.environ["RANK"])])

    run = launch("2*tp1", 2, "--train-iters", "1", program=on_own_disk)
    assert "Training finished" in run.outcome.ranks[1].stdout
    assert json.loads((tmp_path / "0" / "config.json").read_text())["has_ended"]
    assert not (tmp_path / "1" / "config.json").exists()


# --- a user's own parts -----------------------------------------------------------------------

_USERS_MODULE = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp


def attention_only(config):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.pre_mlp_layernorm = IdentityOp
    spec.submodules.mlp = IdentityOp
    spec.submodules.mlp_bda = IdentityFuncOp
    return spec
"""


def test_a_users_layer_spec_makes_the_layers(launch: Launch, main_run: Run, tmp_path: Path) -> None:
    (tmp_path / "users_layers.py").write_text(_USERS_MODULE)

    def program(argv: Sequence[str]) -> None:
        sys.path.insert(0, str(tmp_path))
        probing(argv)

    flags = ("--spec", "users_layers", "attention_only", "--train-iters", "2")
    run = launch("tp1+tp1", 2, *flags, program=program)
    whole = main_run.probed(3)["num_parameters_held"]
    num_removed = NUM_LAYERS * (3 * HIDDEN * FFN + HIDDEN)
    assert run.probed(0)["num_parameters_held"] == whole - num_removed
    assert run.losses[0] != pytest.approx(main_run.losses[0], rel=1e-4)


def model_provider(
    pre_process: bool = True, post_process: bool = True, *, config: Any, pg_collection: Any
) -> GPTModel:
    print(f"STAGE {config.num_layers} layers, {pre_process=} {post_process=}")
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=packed_block_spec(layer, config.num_layers),
        vocab_size=PADDED_VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        pg_collection=pg_collection,
    )


def test_what_a_users_model_freezes_is_gathered_once(launch: Launch, main_run: Run) -> None:
    def frozen_provider(*flags: bool, **named: Any) -> GPTModel:
        model = model_provider(*flags, **named)
        if hasattr(model, "embedding"):
            assert get_args().padded_vocab_size == PADDED_VOCAB_SIZE
            model.embedding.requires_grad_(False)
            cast(Any, model.decoder.layers[0]).requires_grad_(False)
        return model

    def program(argv: Sequence[str]) -> None:
        entry.main(argv, entry.UserHooks(model_provider=frozen_provider))

    run = launch("pp2", 2, "--train-iters", "2", program=program)
    assert "elements: embedding.word_embeddings.weight, decoder.layers.0." in (
        run.outcome.ranks[0].stdout
    )
    first, second = run.records
    # Layer 0 has no backward.
    assert (first.model_flops or 0) < (main_run.records[0].model_flops or 0)
    assert (first.skipped_bytes, second.regroup_bytes) == (
        0,
        (first.regroup_bytes or 0) - (second.skipped_bytes or 0),
    )
    assert second.skipped_bytes


def test_a_users_loss_and_model_replace_ours(launch: Launch, main_run: Run) -> None:
    def double_loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        return loss_func(mask, 2.0 * output)

    def program(argv: Sequence[str]) -> None:
        entry.main(argv, entry.UserHooks(loss_func=double_loss, model_provider=model_provider))

    run = launch("pp2", 2, "--train-iters", "1", program=program)
    assert "STAGE 1 layers, pre_process=True post_process=False" in run.outcome.ranks[0].stdout
    assert "STAGE 1 layers, pre_process=False post_process=True" in run.outcome.ranks[1].stdout
    (loss,) = run.losses
    (norm,) = (record.grad_norm for record in run.records)
    assert loss == pytest.approx(2 * main_run.losses[0], rel=ROUNDING)
    assert norm == pytest.approx(2 * (main_run.records[0].grad_norm or 0.0), rel=20 * ROUNDING)


def test_bf16_and_tied_embeddings_train(launch: Launch) -> None:
    tied = ["--untie-embeddings-and-output-weights"]
    exact = launch("tp1", 1, without=tied)
    rounded = launch("pp2", 2, "--bf16", without=tied)
    assert rounded.losses == pytest.approx(exact.losses, rel=2e-2)
    assert rounded.losses != pytest.approx(exact.losses, rel=1e-6)


# --- the dry run ------------------------------------------------------------------------------


@pytest.mark.parametrize("described", ["main_run", "pipeline_run"])
def test_a_dry_run_prints_what_ranks_will_hold(
    described: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Run = request.getfixturevalue(described)
    argv = [*run.argv, "--run-dir", str(tmp_path / "run"), "--dry-run", "--num-ranks", "4"]
    outcome = run_job(argv, 1, tmp_path / "output")
    outcome.assert_succeeded()
    assert f"strategy     {run.records[0].strategy}" in outcome.stdout
    assert "idle: none" in outcome.stdout
    printed: dict[int, int] = {}
    # Replica and scheme are named once, then each stage, its ranks, layers and parameters a rank.
    stage = re.compile(r"^  .{1,40}?  \d +(\d)(?:-(\d))? +\d +([\d,]{5,})", re.MULTILINE)
    for first, last, count in stage.findall(outcome.stdout):
        ranks = range(int(first), int(last or first) + 1)
        printed |= dict.fromkeys(ranks, int(count.replace(",", "")))
    held = {rank: run.probed(rank)["num_parameters_held"] for rank in range(4)}
    assert printed == held
    assert not (tmp_path / "run").exists(), "a dry run writes no files"
