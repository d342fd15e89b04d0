"""Weights of tokens, from the data's file to losses, records and the log."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from tests.support.tiny_corpus import document_lengths, write_corpus, write_weights
from tests.support.training_log import validation_losses
from tests.support.training_run import BATCH_SIZE, MAIN_FLAGS, ROUNDING, SEED, TRAIN_ITERS, Launch

pytestmark = pytest.mark.distributed

UNTRAINED = 1
"""Index of the iteration of whose tokens none has a weight."""


def test_masks_normalised_by_sequence_train_as_the_same_weights_in_a_file(
    launch: Launch, training_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sampler = LengthSampler(
        training_corpus.lengths,
        training_corpus.groups,
        seed=SEED,
        sizes=BatchSizes.constant(num_sequences=BATCH_SIZE),
    )
    batches = [sampler.next_batch() for _ in range(TRAIN_ITERS)]
    rng = np.random.default_rng(3)
    masks = [rng.random(length + 1) < 0.5 for length in document_lengths()]
    for document in batches[UNTRAINED].sequence_ids:
        masks[document][1:] = False
    sums = [max(1, int(np.count_nonzero(mask[1:]))) for mask in masks]

    folder = tmp_path_factory.mktemp("weighted")
    first, second = (write_corpus(folder / name) for name in ("masks", "fractions"))
    write_weights(first, np.concatenate(masks))
    write_weights(second, np.concatenate([m / s for m, s in zip(masks, sums, strict=True)]))
    flags = ("--loss-normalization", "sequence", *MAIN_FLAGS)
    by_flag = launch("2*tp1", 2, "--data-path", first, *flags)
    in_file = launch("cp2", 2, "--data-path", second, *MAIN_FLAGS)

    trained = [
        sum(np.count_nonzero(masks[document][1:]) for document in batch.sequence_ids)
        for batch in batches
    ]
    for run in (by_flag, in_file):
        assert [record.trained_tokens for record in run.records] == trained
        assert [record.num_tokens for record in run.records] == [b.num_tokens for b in batches]
        has_loss = [record.lm_loss is not None for record in run.records]
        has_norm = [record.grad_norm is not None for record in run.records]
        assert has_loss == has_norm == [True, False, True, True]
        assert [line.num_skipped for line in run.lines] == [0, 1, 0, 0]
        shown = f" tokens: {batches[0].num_tokens:,} ({trained[0]:,} trained) | "
        assert shown in run.outcome.stdout
        assert "64 documents with token weights" in run.outcome.stdout
    assert by_flag.losses == pytest.approx(in_file.losses, rel=ROUNDING)
    norms = [[r.grad_norm for r in run.records if r.grad_norm] for run in (by_flag, in_file)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * ROUNDING)
    evaluated = [validation_losses(run.outcome.stdout) for run in (by_flag, in_file)]
    assert evaluated[0]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=ROUNDING)
