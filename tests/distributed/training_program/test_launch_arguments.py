"""Others' argument sets at toy size train as upstream's plain model does on one process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from tests.support.forked_job import run_job
from tests.support.launch_arguments import options_of
from tests.support.plain_training import PlainRun, train_plainly
from tests.support.tiny_corpus import SEQ_LENGTH
from tests.support.training_run import SEED, SPLIT, Run

pytestmark = pytest.mark.distributed

STRATEGY, NUM_RANKS = "tp2+2*tp1", 4
WITH_EP = {"slime_qwen3-30B-A3B": "tp2ep2+2*tp1"}
"""Strategies of sets whose experts are whole on a rank."""
SAME_LOSS, SAME_NORM = 1e-6, 1e-4
BATCH, ITERS = 8, 6
SETS = (
    "llmjp_v3_1.8b",
    "llmjp_v4_8b_decay",
    pytest.param("pai_deepseek_v2", marks=pytest.mark.nightly),
    "pai_moonlight",
    "pai_qwen2_7b",
    "slime_qwen3-30B-A3B",
    "swiss_llama3_70b",
)
TOY = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "96",
    "--num-attention-heads": "4",
    "--num-query-groups": "2",
    "--kv-channels": "24",
    "--num-experts": "16",
    "--moe-layer-freq": "[0,1]",
    "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "48",
    "--kv-lora-rank": "16",
    "--qk-head-dim": "16",
    "--qk-pos-emb-head-dim": "8",
    "--v-head-dim": "24",
    # Upstream's balancing loss depends on packing.
    "--moe-aux-loss-coeff": "0",
    "--seq-length": str(SEQ_LENGTH),
    "--max-position-embeddings": str(SEQ_LENGTH),
    "--global-batch-size": str(BATCH),
    "--train-iters": str(ITERS),
    "--lr-decay-iters": str(ITERS),
    "--lr-warmup-iters": "2",
    "--lr-wsd-decay-iters": "3",
    # Those of large models hardly change a small one in a few iterations.
    "--lr": "4e-3",
    "--min-lr": "4e-4",
    "--init-method-std": "0.05",
}
"""Options of a set that get another value if it has them."""
NEEDED = (
    "--seq-length",
    "--max-position-embeddings",
    "--global-batch-size",
    "--train-iters",
    "--lr",
)
"""Options that a set of a model alone lacks."""
ON_BOTH = (
    *("--vocab-size", "64", "--padded-vocab-size", "64", "--tokenizer-type", "NullTokenizer"),
    *("--seed", str(SEED), "--hidden-dropout", "0", "--attention-dropout", "0"),
)
"""The padded vocabulary is the vocabulary: Megatron does not mask padded logits."""
FP32 = ("--bf16", "--fp16")
ELSEWHERE = ("--save", "--load", "--tensorboard-dir", "--wandb-project", "--split")
NOT_PLAIN = re.compile(
    r"--(.*parallel.*|.*-comm-.*|.*overlap.*|.*wgrad.*|.*precision-aware.*|main-grads.*|recompute.*"
    r"|use-distributed-optimizer|transformer-impl|async-save|cross-entropy.*|.*virtual.*|exit-.*"
    r"|attention-backend|use-flash-attn|distributed-.*|.*interval|.*-opt_param-scheduler"
    r"|moe-grouped-gemm|moe-permute-fusion)"
)
"""Options of layout, kernels and the loop: one process with upstream's local layers has none."""
ON_PLAIN = (
    *("--transformer-impl", "local", "--use-cpu-initialization", "--micro-batch-size", "1"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
    "--no-bias-dropout-fusion",
)


def toy_options(name: str) -> list[list[str]]:
    """The options of a set at toy size, in fp32, and a strategy."""
    given = [*options_of(name), ["--strategy", WITH_EP.get(name, STRATEGY)]]
    lacking = [[option] for option in NEEDED if [option] not in [each[:1] for each in given]]
    return [
        [option, TOY[option]] if option in TOY else [option, *values]
        for option, *values in given + lacking
        if option not in (*FP32, *ELSEWHERE)
    ]


@pytest.mark.parametrize("name", SETS)
def test_a_set_trains_as_the_plain_model_does(
    name: str, corpus_prefix: str, training_corpus: Corpus, tmp_path: Path
) -> None:
    check(toy_options(name), [BATCH] * ITERS, corpus_prefix, training_corpus, tmp_path)


def test_a_set_with_a_growing_batch_trains_as_the_plain_model_does(
    corpus_prefix: str, training_corpus: Corpus, tmp_path: Path
) -> None:
    """The only set with LayerNorm, biases, GELU, learned positions and tied embeddings.

    It trains in fp16, with a batch that grows but iterations that end training; here in fp32 and
    by samples.
    """
    by_iterations = ("--global-batch-size", "--train-iters", "--lr-decay-iters")
    options = [
        [option, "0:2 400:4 1K:8"] if option == "--step-batch-size-schedule" else [option, *values]
        for option, *values in toy_options("mlm_gpt3_175b")
        if option not in by_iterations
    ]
    decoupled = [["--decoupled-lr", "2e-2"], ["--decoupled-min-lr", "3e-3"]]
    options += [["--train-samples", "40"], ["--lr-decay-samples", "36"], *decoupled]
    check(options, [2, 2, 4, 4, 8, 8, 8, 8], corpus_prefix, training_corpus, tmp_path)


def check(
    options: list[list[str]],
    sizes: Sequence[int],
    corpus_prefix: str,
    corpus: Corpus,
    folder: Path,
) -> None:
    plain = plain_run(options, sizes, corpus, folder)
    ours = our_run(options, corpus_prefix, folder)
    records = ours.records
    assert [record.num_sequences for record in records] == list(sizes)
    assert ours.losses == pytest.approx(plain.losses, rel=SAME_LOSS)
    assert [r.grad_norm for r in records] == pytest.approx(plain.gradient_norms, rel=SAME_NORM)
    assert [r.learning_rate for r in records] == pytest.approx(plain.learning_rates, rel=1e-12)
    # The weights have moved: the last losses would differ by other updates.
    assert max(plain.losses) - min(plain.losses) > 0.05


def plain_run(
    options: list[list[str]], sizes: Sequence[int], corpus: Corpus, folder: Path
) -> PlainRun:
    argv = [word for each in options if not NOT_PLAIN.fullmatch(each[0]) for word in each]
    sampler = LengthSampler(
        corpus.lengths,
        corpus.groups,
        seed=SEED,
        sizes=BatchSizes.constant(num_sequences=1),
    )
    sequences = [
        np.asarray(corpus.tokens(sampler.next_batch().sequence_ids[0])) for _ in range(sum(sizes))
    ]
    outcome = run_job(
        [*argv, *ON_BOTH, *ON_PLAIN],
        1,
        folder / "plain_output",
        program=lambda words: train_plainly(words, sequences, folder),
    )
    outcome.assert_succeeded()
    return PlainRun.read(folder)


def our_run(options: list[list[str]], corpus_prefix: str, folder: Path) -> Run:
    run_dir = folder / "run"
    argv = [
        *(word for each in options for word in each),
        *ON_BOTH,
        *("--data-path", corpus_prefix, "--split", SPLIT, "--run-dir", str(run_dir)),
        *("--max-tokens-per-micro-batch", "128"),
        *("--load", str(folder), "--finetune", "--ignore-unknown-options"),
        *("--distributed-timeout-minutes", "1"),
    ]
    outcome = run_job(argv, NUM_RANKS, folder / "output")
    outcome.assert_succeeded()
    return Run(outcome, run_dir, folder / "no_plans", argv)
