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
from tests.distributed.training_program.test_variants import EXPERTS
from tests.support.training_run import ROUNDING, TRAIN_ITERS

__all__ = ["corpus", "pool_flags"]  # fixtures

pytestmark = pytest.mark.timeout(900)

LAYERS = ("--transformer-impl", "transformer_engine")
LOCAL = ("--transformer-impl", "local")
PLAIN_PATH = "the plain path gives the same result"
OTHER = ("--strategy", "tp2+2*tp1")
"""Not in the pool."""


@pytest.mark.parametrize(
    ("model", "layers", "attention", "rtol"),
    [
        pytest.param((), LAYERS, "sdpa", ROUNDING, id="fp32"),
        pytest.param(("--bf16", "--kv-channels", "16"), LAYERS, "te", BF16_LOSS_RTOL, id="bf16"),
        pytest.param(EXPERTS, ("--moe-permute-fusion",), "sdpa", ROUNDING, id="experts"),
    ],
)
def test_losses_are_those_of_local_layers(
    model: tuple[str, ...],
    layers: tuple[str, ...],
    attention: str,
    rtol: float,
    corpus: str,
    pool_flags: tuple[str, ...],
    tmp_path: Path,
) -> None:
    saved = tmp_path / "saved"
    save = ("--save", str(saved), "--save-interval", str(SAVED_AT), "--async-save")
    load = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    of_local = (*LOCAL, "--core-attention", "torch" if "--bf16" in model else "sdpa")
    local = train(corpus, tmp_path / "local", NUM_RANKS, *pool_flags, *model, *of_local)
    run = train(corpus, tmp_path / "te", NUM_RANKS, *pool_flags, *model, *layers, *save)
    assert f"core attention: {attention}" in run.outcome.stdout
    assert PLAIN_PATH not in run.outcome.stdout
    assert (PLAIN_PATH in local.outcome.stdout) is ("--moe-grouped-gemm" in model)
    assert len(run.losses) == TRAIN_ITERS
    assert run.losses == pytest.approx(local.losses, rel=rtol)
    assert len(evaluations(run)) >= 2
    assert evaluations(run) == pytest.approx(evaluations(local), rel=rtol)
    for name, chosen in (("resumed", layers), ("resumed local", LOCAL)):
        resumed = train(corpus, tmp_path / name, NUM_RANKS, *OTHER, *model, *chosen, *load)
        assert resumed.losses == pytest.approx(local.losses[SAVED_AT:], rel=rtol)
        assert evaluations(resumed) == pytest.approx(evaluations(local)[1:], rel=rtol)
