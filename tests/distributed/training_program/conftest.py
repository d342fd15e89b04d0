"""Jobs of the training program that the tests of this folder share.

Every job is one of forked ranks (`tests.support.forked_job`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sources import Blend, load_corpora
from megatron.hydraulis.loop import entry
from tests.support.forked_job import Kill, run_job
from tests.support.tiny_corpus import (
    SEQ_LENGTH,
    tiny_command,
    write_corpus,
)
from tests.support.training_run import (
    BATCH_SIZE,
    BATCH_TOKENS,
    MAIN_FLAGS,
    SEED,
    SPLIT,
    TRAIN_ITERS,
    Launch,
    Run,
    probing,
)


@pytest.fixture(scope="package")
def corpus_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture(scope="package")
def launch(corpus_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs a job that must succeed; without a strategy the flags must name a pool."""

    def launch(
        strategy: str | None,
        num_ranks: int,
        *extra: str,
        program: Callable[[Sequence[str]], None] = entry.main,
        without: Sequence[str] = (),
        kill: Kill | None = None,
        draws_summary: bool = False,
    ) -> Run:
        folder = tmp_path_factory.mktemp("job")
        run_dir, plan_dir = folder / "run", folder / "plans"
        argv = tiny_command(
            corpus_prefix,
            run_dir,
            *(() if strategy is None else ("--strategy", strategy)),
            *("--seed", str(SEED), "--split", SPLIT),
            *(() if "--train-iters" in without else ("--train-iters", str(TRAIN_ITERS))),
            *("--plan-dir", str(plan_dir)),
            *(() if "--global-batch-size" in without else ("--global-batch-size", str(BATCH_SIZE))),
            *extra,
            without=without,
        )
        outcome = run_job(
            argv,
            num_ranks,
            folder / "output",
            program=program,
            kill=kill,
            draws_summary=draws_summary,
        )
        outcome.assert_succeeded()
        return Run(outcome, run_dir, plan_dir, argv)

    return launch


@pytest.fixture(scope="package")
def main_run(launch: Launch) -> Run:
    """A run with different tensor-parallel degrees."""
    return launch("tp2+2*tp1", 4, *MAIN_FLAGS, program=probing, draws_summary=True)


@pytest.fixture(scope="package")
def pipeline_run(launch: Launch) -> Run:
    """The same with a pipeline and tensor parallelism."""
    return launch("pp2+tp2", 4, *MAIN_FLAGS, program=probing)


@pytest.fixture(scope="package")
def data_parallel_run(launch: Launch) -> Run:
    """The same with replicas of one rank."""
    return launch("4*tp1", 4, *MAIN_FLAGS)


@pytest.fixture(scope="package")
def budget_run(launch: Launch) -> Run:
    """Global batches by a budget of tokens."""
    return launch(
        *("2*tp1", 2, "--global-batch-tokens", str(BATCH_TOKENS)), without=["--global-batch-size"]
    )


@pytest.fixture(scope="package")
def training_corpus(corpus_prefix: str) -> Corpus:
    corpora = load_corpora(
        seq_length=SEQ_LENGTH, long_sequences="split", blend=Blend((corpus_prefix,)), split=SPLIT
    )
    return corpora.train
