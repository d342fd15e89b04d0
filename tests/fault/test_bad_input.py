"""Bad input ends a job with one line that states rule, numbers and fix, and nothing ever hangs.

Of the jobs whose flags or data are wrong only rank 0 is started: they end although the other
ranks never come, so no rank waits for another before it has checked its input.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hydraulis.data import corpus as corpus_module
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from megatron.hydraulis.data.sources import Blend, load_corpora
from megatron.hydraulis.loop import entry, faults, startup
from megatron.hydraulis.observability.records import read_metrics
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import loss_func
from tests.support.forked_job import JobOutcome, Kill, run_job
from tests.support.tiny_corpus import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    document_lengths,
    tiny_command,
    write_corpus,
    write_weights,
)
from tests.support.training_log import log_lines

pytestmark = pytest.mark.fault

EXIT_STATUS = 2
SEED = 77
Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a valid corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture
def command(prefix: str, tmp_path: Path) -> Command:
    def command(*extra: str, data: str = prefix, without: Sequence[str] = ()) -> list[str]:
        flags = ("--seed", str(SEED), "--split", "100,0,0", *extra)
        return tiny_command(data, tmp_path / "run", *flags, without=without)

    return command


def _refused(argv: Sequence[str], num_ranks: int, folder: Path) -> str:
    """The one line that the only started rank of a job ends with."""
    outcome = run_job(argv, num_ranks, folder / "output", started=[0], timeout_s=30)
    assert not outcome.timed_out, "rank 0 waited for ranks that never came"
    assert outcome.statuses == (EXIT_STATUS,), outcome.stderr
    return _only_error(outcome)


def _only_error(outcome: JobOutcome) -> str:
    assert "Traceback" not in outcome.stderr, outcome.stderr
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.stderr
    return errors[0]


# --- flags ------------------------------------------------------------------------------------

# The other rules of flags and data are in tests/unit.
_FLAGS: dict[str, tuple[str, list[str]]] = {
    "more ranks in the strategy than in the job": (
        "--strategy 2*tp2+tp1",
        ["strategy '2*tp2+tp1'", "5 ranks", "4", "remove"],
    ),
    "a micro-batch that cannot hold the longest sequence": (
        "--strategy 4*tp1 --max-tokens-per-micro-batch 64",
        ["--seq-length", "96", "--max-tokens-per-micro-batch", "64"],
    ),
    "an upstream flag that is not honoured": (
        "--strategy 4*tp1 --linear-attention-freq 1",
        ["--linear-attention-freq"],
    ),
    "a tokenizer larger than the model's vocabulary": (
        "--strategy 4*tp1 --padded-vocab-size 32 --vocab-size 61",
        ["61", "--padded-vocab-size", "32"],
    ),
}


@pytest.mark.parametrize("case", _FLAGS)
def test_wrong_flags_are_refused(case: str, command: Command, tmp_path: Path) -> None:
    flags, expected = _FLAGS[case]
    without = ["--make-vocab-size-divisible-by"] if "--padded-vocab-size" in flags else []
    error = _refused(command(*flags.split(), without=without), 4, tmp_path)
    for words in expected:
        assert words in error, error
    assert ";" in error, f"no fix is named: {error}"
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_refused(command: Command, tmp_path: Path) -> None:
    # Also root cannot make a folder inside a file.
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "file" / "run"
    error = _refused(command("--strategy", "2*tp1", "--run-dir", str(run_dir)), 2, tmp_path)
    assert f"--run-dir {run_dir}" in error
    assert "Not a directory" in error
    assert "name another folder" in error


# --- data -------------------------------------------------------------------------------------


def _cut_short(prefix: str) -> str:
    path = Path(prefix + ".idx")
    path.write_bytes(path.read_bytes()[:-11])
    return prefix


NUM_TOKENS = sum(length + 1 for length in document_lengths())

_DATA: dict[str, tuple[Callable[[Path], str], list[str]]] = {
    "an .idx cut short": (
        lambda path: _cut_short(write_corpus(path)),
        ["bytes", "cut short", "copy the dataset again"],
    ),
    "nothing to predict": (
        lambda path: write_corpus(path, [0, 0, 0]),
        ["3 of fewer than 2 tokens"],
    ),
    "no files": (str, [".idx", "correct the prefix"]),
    "weights of another length": (
        lambda path: write_weights(write_corpus(path, [4, 5]), [1.0] * 10),
        ["one weight a token", "10 for 11 tokens", "remove the file"],
    ),
}


@pytest.mark.parametrize("case", _DATA)
def test_wrong_data_are_refused(case: str, command: Command, tmp_path: Path) -> None:
    make, expected = _DATA[case]
    data = make(tmp_path / "wrong")
    error = _refused(command("--strategy", "2*tp1", data=data), 2, tmp_path)
    for words in [*expected, data]:
        assert words in error, error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(
            lambda path: write_corpus(path, num_tokens=VOCAB_SIZE + 5),
            [f"vocabulary of {VOCAB_SIZE}", f"there is {VOCAB_SIZE + 4}", "--vocab-size"],
            id="tokens beyond the model's vocabulary",
        ),
        pytest.param(
            lambda path: write_weights(write_corpus(path), ([1.0, -0.5] * NUM_TOKENS)[:NUM_TOKENS]),
            ["finite and at least 0", "is -0.5", "correct"],
            id="a negative weight",
        ),
    ],
)
def test_what_one_rank_finds_in_the_data_ends_all(
    make: Callable[[Path], str], expected: list[str], command: Command, tmp_path: Path
) -> None:
    data = make(tmp_path / "wrong")

    def program(argv: Sequence[str]) -> None:
        faults.SECONDS_OF_SILENCE = 0.0  # or rank 1 would be silent until its launcher ends it
        entry.main(argv)

    argv = command("--strategy", "2*tp1", data=data)
    outcome = run_job(argv, 2, tmp_path / "output", program=program, ends_others=False)
    assert not outcome.timed_out
    assert outcome.statuses == (EXIT_STATUS, EXIT_STATUS)
    for rank in outcome.ranks.values():
        for words in [*expected, data]:
            assert words in rank.stderr


@pytest.mark.parametrize(
    ("flags", "without", "there"),
    [
        (("--global-batch-size", "81"), [], "80 sequences"),
        (("--global-batch-tokens", "1000000"), ["--global-batch-size"], "tokens"),
        (("--step-batch-size-schedule", "0:8,1K:81"), ["--global-batch-size"], "80 sequences"),
    ],
)
def test_a_global_batch_beyond_the_corpus_is_refused(
    flags: tuple[str, str], without: list[str], there: str, command: Command, tmp_path: Path
) -> None:
    error = _refused(command("--strategy", "2*tp1", *flags, without=without), 2, tmp_path)
    size = flags[1].rpartition(":")[2]
    what = f"the last of {flags[0]}" if "schedule" in flags[0] else flags[0]
    assert f"at most one epoch of the training data but {what} is {size}" in error
    assert there in error


def test_a_global_batch_of_evaluation_beyond_its_data_is_refused(
    command: Command, tmp_path: Path
) -> None:
    flags = ("--split", "80,20,0", "--eval-interval", "2", "--eval-global-batch-size", "1000000000")
    error = _refused(command("--strategy", "2*tp1", *flags), 2, tmp_path)
    assert "one epoch of the validation data but --eval-global-batch-size is 1000000000" in error
    assert "the most is 16 sequences" in error


def test_a_sequence_that_no_replica_holds_is_refused(command: Command, tmp_path: Path) -> None:
    # A vocabulary so large that the logits of some dozen tokens fill a rank's memory.
    flags = ("--strategy", "2*tp1", "--padded-vocab-size", str(2_500_000))
    without = ["--max-tokens-per-micro-batch", "--make-vocab-size-divisible-by"]
    error = _refused(command(*flags, without=without), 2, tmp_path)
    assert f"trains {SEQ_LENGTH} tokens" in error
    assert "no replica of strategy '2*tp1' holds more than" in error
    assert "lower --seq-length" in error


def test_a_model_that_does_not_fit_is_refused_by_its_scheme(
    command: Command, tmp_path: Path
) -> None:
    # The rows of this vocabulary take more than a rank's memory before the first token.
    flags = ("--strategy", "2*tp1", "--padded-vocab-size", str(60_000_000))
    without = ["--max-tokens-per-micro-batch", "--make-vocab-size-divisible-by"]
    error = _refused(command(*flags, without=without), 2, tmp_path)
    assert "strategy '2*tp1': a micro-batch holds at least 1 token but on tp1 it holds 0" in error
    assert "use more tp or pp ranks" in error
    assert not (tmp_path / "run").exists()


def test_a_model_for_whose_shards_there_is_no_memory_is_refused(
    command: Command, tmp_path: Path
) -> None:
    """--max-tokens-per-micro-batch, which the command has, leaves out the check before."""
    flags = ("--strategy", "tp1", "--vocab-size", "2000000000", "--hidden-size", "128")
    error = _refused(command(*flags), 1, tmp_path)
    assert "every rank owns 1/1 of the parameters, gradients and optimizer state" in error
    assert "GB, for which memory is too small; use more ranks or a smaller model" in error
    assert "--vocab-size is 2000000000" in error


def test_a_dry_run_reads_the_corpus_and_prints_limits(command: Command, tmp_path: Path) -> None:
    argv = command("--strategy", "tp2+2*tp1", "--dry-run", "--num-ranks", "4")
    outcome = run_job(argv, 1, tmp_path / "output")
    outcome.assert_succeeded()
    rows = [line.split() for line in outcome.stdout.splitlines()]
    # Scheme and, in the last column, the most tokens of a micro-batch.
    table = [(row[1], row[-1]) for row in rows if row[:1] in (["0"], ["1"], ["2"])]
    assert table == [("tp2", "128"), ("tp1", "128"), ("tp1", "128")]
    assert ["cost", "model", "analytic,", "device", "'cpu'"] in rows
    assert "train data   80 documents" in outcome.stdout
    assert f"longest sequence {SEQ_LENGTH} tokens" in outcome.stdout
    error = _refused([*argv, "--split", "0,1,1"], 1, tmp_path)
    assert "--split" in error
    assert "'0,1,1'" in error


def test_a_dry_run_without_its_data_prints_what_ranks_hold_and_then_the_error(
    command: Command, tmp_path: Path
) -> None:
    argv = command("--strategy", "tp2+2*tp1", "--dry-run", "--num-ranks", "4")
    outcome = run_job([*argv, "--data-path", "nowhere"], 1, tmp_path / "output")
    assert outcome.ranks[0].status == EXIT_STATUS
    assert "strategy     tp2+2*tp1, idle: none" in outcome.stdout
    assert re.search(r"^  1 +tp1 .* 128$", outcome.stdout, re.MULTILINE)
    assert "train data" not in outcome.stdout
    error = _only_error(outcome)
    assert error.startswith("error: --data-path nowhere: ")
    assert "there is no nowhere.idx" in error


def test_without_a_launcher_the_torchrun_command_is_shown(command: Command, tmp_path: Path) -> None:
    def program(argv: Sequence[str]) -> None:
        for variable in startup.LAUNCHER_VARIABLES:
            del os.environ[variable]
        entry.main(argv)

    # For four ranks, of which this process is none.
    argv = command("--strategy", "tp2+2*tp1")
    outcome = run_job(argv, 1, tmp_path / "output", program=program, timeout_s=30)
    assert outcome.statuses == (EXIT_STATUS,)
    error = _only_error(outcome)
    assert "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set" in error
    assert "torchrun --standalone --nproc-per-node 1 --no-python hydraulis train" in error


def test_plans_of_an_earlier_run_are_not_mixed_with_new_ones(
    command: Command, tmp_path: Path
) -> None:
    plans = tmp_path / "plans"
    plans.mkdir()
    for iteration in (1, 2):
        (plans / f"iteration_{iteration:07d}.json").write_text("{}")
    error = _refused(command("--strategy", "2*tp1", "--plan-dir", str(plans)), 2, tmp_path)
    assert f"--plan-dir {plans}" in error
    assert "holds 2 of an earlier one; name another folder or empty it" in error
    assert not (tmp_path / "run").exists()


def test_a_node_without_the_data_is_named(command: Command, tmp_path: Path) -> None:
    def program(argv: Sequence[str]) -> None:
        is_second_node = int(os.environ["RANK"]) >= 2
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        entry.main([*argv, "--data-path", "nowhere"] if is_second_node else argv)

    argv = command("--strategy", "4*tp1")
    outcome = run_job(argv, 4, tmp_path / "output", program=program, timeout_s=30)
    assert not outcome.timed_out
    assert outcome.ranks[2].status == EXIT_STATUS
    error = _only_error(outcome)
    assert error.startswith(f"error: {socket.gethostname()}, rank 2: ")
    assert "there is no nowhere.idx" in error


def test_a_second_run_in_a_folder_moves_the_first_away(command: Command, tmp_path: Path) -> None:
    argv = command("--strategy", "tp1", "--train-iters", "1", "--seed")
    for seed in ("5", "6"):
        run_job([*argv, seed], 1, tmp_path / "output", draws_summary=True).assert_succeeded()
    run_dir, earlier = tmp_path / "run", tmp_path / "run" / "earlier.1"
    for folder, expected_seed in ((earlier, 5), (run_dir, 6)):
        assert len(read_metrics(folder)) == 1
        assert (folder / "summary.png").is_file()
        assert len(list((folder / "tensorboard").glob("events*"))) == 1
        settings = json.loads((folder / "config.json").read_text())["settings"]
        assert settings["seed"] == expected_seed


def test_a_requeued_job_warns_that_it_starts_from_scratch(command: Command, tmp_path: Path) -> None:
    def program(argv: Sequence[str]) -> None:
        os.environ["SLURM_RESTART_COUNT"] = "2"
        entry.main(argv)

    argv = command("--strategy", "tp1", "--train-iters", "1")
    outcome = run_job(argv, 1, tmp_path / "output", program=program)
    outcome.assert_succeeded()
    assert "restart 2" in outcome.stderr
    assert "from iteration 1" in outcome.stderr


def test_one_rank_reports_for_all(command: Command, prefix: str, tmp_path: Path) -> None:
    for data, flags in ((prefix, ["--strategy", "pp4"]), (str(tmp_path / "none"), [])):
        outcome = run_job(command(*flags, data=data), 4, tmp_path / "output", timeout_s=30)
        assert not outcome.timed_out
        _only_error(outcome)
        assert outcome.ranks[0].status == EXIT_STATUS


# --- during training --------------------------------------------------------------------------


def _on_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def _with_bad_second_iteration(
    poison: Callable[[torch.Tensor], torch.Tensor], is_poisoned: Callable[[], bool]
) -> Callable[[Sequence[str]], None]:
    """The program with a loss that goes wrong in the first micro-batch of the second iteration."""

    def program(argv: Sequence[str]) -> None:
        iterations: list[int] = []

        class CountingEngine(RuntimeEngine):
            def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
                iterations.append(0)
                return super().forward_backward(*args, **kwargs)

        def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
            iterations[-1] += 1
            if len(iterations) == 2 and iterations[-1] == 1 and is_poisoned():
                output = poison(output)
            return loss_func(mask, output)

        entry.main(argv, entry.UserHooks(loss_func=loss, engine=CountingEngine))

    return program


_NAN_ON_RANK_1 = _with_bad_second_iteration(lambda output: output * torch.nan, lambda: _on_rank(1))


def test_the_error_of_a_non_finite_loss_names_iteration_and_sequences(
    command: Command, prefix: str, tmp_path: Path
) -> None:
    plans = tmp_path / "plans"
    argv = command("--strategy", "2*tp1", "--global-batch-size", "16", "--plan-dir", str(plans))
    outcome = run_job(argv, 2, tmp_path / "output", program=_NAN_ON_RANK_1)
    assert not outcome.timed_out
    assert outcome.ranks[0].status == EXIT_STATUS
    error = _only_error(outcome)
    assert "iteration 2: the loss is nan" in error
    assert "--skip-nan-iterations" in error
    assert len(log_lines(outcome.stdout)) == 1
    assert "Training finished" not in outcome.stdout

    corpus = load_corpora(
        seq_length=SEQ_LENGTH, long_sequences="split", blend=Blend((prefix,)), split="100,0,0"
    ).train
    sampler = LengthSampler(
        corpus.lengths, corpus.groups, seed=SEED, sizes=BatchSizes.constant(num_sequences=16)
    )
    sampler.next_batch()
    batch = sampler.next_batch()
    plan = IterationPlan.from_json(json.loads((plans / "iteration_0000002.json").read_text()))
    mine = plan.replica_of(1)
    assert mine is not None
    bad = {batch.sequence_ids[index] for index in mine.micro_batches[0].sequences}
    assert 0 < len(bad) < batch.num_sequences
    for sequence_id in batch.sequence_ids:
        is_named = f"{sequence_id} ({corpus.describe(sequence_id)})" in error
        assert is_named == (sequence_id in bad)


def test_a_non_finite_iteration_can_be_skipped(command: Command, tmp_path: Path) -> None:
    flags = ("--strategy", "2*tp1", "--global-batch-size", "16", "--train-iters", "4")
    argv = command(*flags, "--skip-nan-iterations")
    outcome = run_job(argv, 2, tmp_path / "output", program=_NAN_ON_RANK_1)
    outcome.assert_succeeded()
    lines = log_lines(outcome.stdout)
    assert [(line.num_skipped, line.num_nan) for line in lines] == [(0, 0), (1, 1), (0, 0), (0, 0)]
    assert [line.consumed_samples for line in lines] == [16, 32, 48, 64]
    records = read_metrics(tmp_path / "run")
    assert [record.lm_loss is None for record in records] == [False, True, False, False]
    assert [record.grad_norm is None for record in records] == [False, True, False, False]
    assert records[0].learning_rate == records[1].learning_rate > records[2].learning_rate
    assert "iterations" in outcome.stdout[outcome.stdout.index("Training finished") :]


def test_a_far_too_high_learning_rate_ends_in_the_same_error(
    command: Command, tmp_path: Path
) -> None:
    argv = command("--strategy", "tp1", "--lr", "1e19")
    outcome = run_job(argv, 1, tmp_path / "output")
    assert outcome.statuses == (EXIT_STATUS,)
    error = _only_error(outcome)
    # The weights are finite but huge after the first update, and products of them overflow.
    assert "iteration 2: the loss is nan" in error
    assert "lower --lr" in error


def test_a_bad_token_found_by_one_rank_is_reported_by_that_rank(
    command: Command, tmp_path: Path
) -> None:
    # The check at the start samples a large dataset; the bad document is not in the sample.
    data = write_corpus(tmp_path / "corpus", [8] * 40)
    with Path(data + ".bin").open("r+b") as tokens:
        tokens.seek(-4, os.SEEK_END)
        tokens.write(struct.pack("<i", VOCAB_SIZE))

    def program(argv: Sequence[str]) -> None:
        corpus_module.VOCABULARY_CHECK_TOKENS = corpus_module.VOCABULARY_STRETCH_TOKENS = 8
        entry.main(argv)

    # Only rank 1 reads sequences.
    argv = command("--strategy", "tp1@1+idle", "--global-batch-size", "40", data=data)
    outcome = run_job(argv, 2, tmp_path / "output", program=program)
    assert not outcome.timed_out
    assert outcome.ranks[1].status == EXIT_STATUS
    error = next(line for line in outcome.ranks[1].stderr.splitlines() if "error: " in line)
    assert f"dataset '{data}', document 39" in error
    assert f"below the model's vocabulary of {VOCAB_SIZE} but there is {VOCAB_SIZE}" in error
    assert "error: " not in outcome.ranks[0].stderr


@pytest.mark.parametrize("ends_others", [True, False], ids=["launcher ends them", "by themselves"])
def test_a_killed_rank_ends_the_job(ends_others: bool, command: Command, tmp_path: Path) -> None:
    outcome = run_job(
        command("--strategy", "pp2+tp2", "--train-iters", "100000"),
        4,
        tmp_path / "output",
        kill=Kill(rank=2, after="iteration        2/"),
        ends_others=ends_others,
        timeout_s=45,
    )
    assert not outcome.timed_out, "the other ranks hang"
    assert outcome.ranks[2].status == -9
    assert 0 not in outcome.statuses
    assert "Training finished" not in outcome.stdout
    assert len(read_metrics(tmp_path / "run")) >= 2
