"""The whole training program with layers of Transformer Engine, compared with local layers:
trained, saved, resumed under another strategy, evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_stand_in.test_training_program import (
    BF16_LOSS_RTOL,
    NUM_RANKS,
    SAVED_AT,
    corpus,
    evaluations,
    pool_flags,
    train,
)
from tests.support.training_run import ROUNDING, TRAIN_ITERS

__all__ = ["corpus", "pool_flags"]  # fixtures

pytestmark = pytest.mark.timeout(900)

LAYERS = ("--transformer-impl", "transformer_engine")
OTHER = ("--strategy", "tp2+2*tp1")
"""Not in the pool."""


@pytest.mark.parametrize(
    ("precision", "attention", "rtol"),
    [
        pytest.param((), "sdpa", ROUNDING, id="fp32"),
        pytest.param(("--bf16", "--kv-channels", "16"), "te", BF16_LOSS_RTOL, id="bf16"),
    ],
)
def test_losses_are_those_of_local_layers(
    precision: tuple[str, ...],
    attention: str,
    rtol: float,
    corpus: str,
    pool_flags: tuple[str, ...],
    tmp_path: Path,
) -> None:
    saved = tmp_path / "saved"
    save = ("--save", str(saved), "--save-interval", str(SAVED_AT), "--async-save")
    load = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    of_local = ("--core-attention", "torch" if precision else "sdpa")
    local = train(corpus, tmp_path / "local", NUM_RANKS, *pool_flags, *precision, *of_local)
    run = train(corpus, tmp_path / "te", NUM_RANKS, *pool_flags, *precision, *LAYERS, *save)
    assert f"core attention: {attention}" in run.outcome.stdout
    assert len(run.losses) == TRAIN_ITERS
    assert run.losses == pytest.approx(local.losses, rel=rtol)
    assert len(evaluations(run)) >= 2
    assert evaluations(run) == pytest.approx(evaluations(local), rel=rtol)
    for name, layers in (("resumed", LAYERS), ("resumed local", ())):
        resumed = train(corpus, tmp_path / name, NUM_RANKS, *OTHER, *precision, *layers, *load)
        assert resumed.losses == pytest.approx(local.losses[SAVED_AT:], rel=rtol)
        assert evaluations(resumed) == pytest.approx(evaluations(local)[1:], rel=rtol)
