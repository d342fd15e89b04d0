"""An emulated device: modelled times, tiny tensors, and sleeps on a manual clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.emulated_device import (
    EmulatedBatch,
    EmulatedDevice,
    EmulatedForwardStep,
    scaled,
)
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.runtime.executor import loss_func
from megatron.hydraulis.strategy import Scheme, Strategy

A800 = Path(__file__).parents[3] / "examples" / "cost_profile_llama32b_a800.json"
TP4 = Scheme(tp=4)
LENGTHS = (1000, 30, 5)


class ManualClock:
    """Time advances only explicitly and in sleeps."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.sleeps_s: list[float] = []

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0.0
        self.sleeps_s.append(duration_s)
        self.time_s += duration_s


class SlowIdentity(torch.autograd.Function):
    """Computes nothing for some time of a clock, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, clock: ManualClock, seconds: tuple[float, float]) -> Any:
        ctx.clock, ctx.backward_s = clock, seconds[1]
        clock.time_s += seconds[0]
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.time_s += ctx.backward_s
        return gradients[0], None, None


class Losses(nn.Module):
    """Replaces a model; forward and backward take some time of the clock."""

    def __init__(self, clock: ManualClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))
        self.clock, self.seconds = clock, (forward_s, backward_s)

    def forward(self, tokens: Tensor) -> Tensor:
        losses: Tensor = SlowIdentity.apply(self.weight, self.clock, self.seconds)
        return losses * torch.ones(tokens.shape)


def plain_step(data_iterator: Iterator[PackedBatch], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    return model(batch.tokens), lambda output: loss_func(batch.weights, output)


def packed(lengths: tuple[int, ...] = LENGTHS, pad_multiple: int = 4) -> PackedBatch:
    return pack([np.arange(length + 1) for length in lengths], pad_multiple)


def emulated_batch(scale: float = 1.0) -> EmulatedBatch:
    return EmulatedDevice.read(A800, scale).shorten(packed(), TP4)


def run(clock: ManualClock, model: Losses, batch: PackedBatch) -> EmulatedForwardStep:
    """One micro-batch, forward and backward."""
    step = EmulatedForwardStep(plain_step, now_s=clock.now_s, sleep=clock.sleep)
    output, loss = step(iter([batch]), model)
    loss(output)[0].backward()
    return step


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_micro_batch_takes_the_profiles_time_of_its_real_lengths(scale: float) -> None:
    batch = emulated_batch(scale)
    coefficients = ProfileCostModel.read(A800).coefficients(TP4)
    # 1035 tokens and one of padding, which takes no time.
    assert batch.lengths == LENGTHS
    time_s = scale * coefficients.time_ms(LENGTHS) / 1e3
    assert batch.forward_s + batch.backward_s == pytest.approx(time_s, rel=1e-12)
    assert batch.forward_s == pytest.approx(coefficients.forward_share * time_s, rel=1e-12)


def test_plans_are_made_with_the_emulated_times() -> None:
    device = EmulatedDevice.read(A800, 0.25)
    cost_model = device.cost_model
    batch = device.shorten(packed(), TP4)
    assert cost_model.coefficients(TP4).time_ms(LENGTHS) / 1e3 == pytest.approx(
        batch.forward_s + batch.backward_s, rel=1e-12
    )
    assert cost_model.max_tokens(TP4) == ProfileCostModel.read(A800).max_tokens(TP4)


def test_the_overhead_is_scaled_too() -> None:
    content = ProfileCostModel.read(A800).to_json() | {
        "strategies": [{"name": "S", "regroup_ms": 30.0, "optimizer_ms": 10.0}]
    }
    profile = ProfileCostModel.from_json(content, what="profile")
    strategy = Strategy.parse("tp4", 4, name="S")
    assert scaled(profile, 0.5).overhead_ms(strategy) == 20.0


@pytest.mark.parametrize("lengths", [LENGTHS, (1, 2, 9), (1, 1), (2,)])
@pytest.mark.parametrize("scheme", [Scheme(tp=1, pp=4), TP4, Scheme(tp=8)], ids=str)
def test_only_the_beginning_of_the_row_is_run(lengths: tuple[int, ...], scheme: Scheme) -> None:
    whole = packed(lengths, scheme.tp)
    batch = EmulatedDevice.read(A800).shorten(whole, scheme)
    assert batch.lengths == lengths
    assert batch.tokens.shape == (1, scheme.tp)
    for name in ("tokens", "labels", "weights", "position_ids"):
        assert torch.equal(getattr(batch, name), getattr(whole, name)[:, : scheme.tp]), name
    borders = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int32
    assert borders[0] == 0
    assert borders[-1] == scheme.tp
    assert borders[:-1] == whole.cu_seqlens.tolist()[: len(borders) - 1]
    assert batch.max_seqlen == max(np.diff(borders))
    assert batch.num_tokens == int(batch.weights.sum()) >= 1
    assert batch.num_tokens + batch.num_padding == scheme.tp


def test_a_row_that_begins_with_a_masked_prompt_trains() -> None:
    tokens = [np.arange(10)]
    device = EmulatedDevice.read(A800)
    for num_answer_tokens in (0, 1, 9):
        weights = np.zeros(10, dtype=np.float32)
        weights[10 - num_answer_tokens :] = 0.5
        batch = device.shorten(pack(tokens, 4, weights=[weights]), TP4)
        assert batch.trained_tokens == min(num_answer_tokens, 4)
        assert float(batch.weights.sum()) == 0.5 * batch.trained_tokens


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lengths", [LENGTHS, (3,), ()])
def test_a_context_group_takes_its_own_time_and_runs_a_short_row(
    lengths: tuple[int, ...], size: int, rank: int
) -> None:
    tp = 2
    rows = [(1, 0.5), (2, 0.25)]
    device = EmulatedDevice(ProfileCostModel.from_json(context_profile(tp, rows), what="profile"))
    part = pack(
        [np.arange(length + 1) for length in lengths],
        tp,
        context_size=size,
        context_rank=rank % size,
        allow_empty=True,
    )
    batch = device.shorten(part, Scheme(tp=tp, cp=2, splits_cp=True))
    time_s = (dict(rows)[size] * sum(lengths) + 7.0) / 1e3
    assert batch.forward_s + batch.backward_s == pytest.approx(time_s, rel=1e-12)
    num_kept = tp * (1 if size == 1 else 2)
    assert batch.tokens.shape == (1, num_kept)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens_padded.tolist()[-1] == num_kept * size
    assert batch.num_tokens == int(batch.weights.sum())
    assert batch.num_tokens + batch.num_padding == num_kept
    assert (batch.context_size, batch.context_rank) == (size, rank % size)
    assert batch.lengths == batch.sequence_lengths == lengths


def context_profile(tp: int, rows: list[tuple[int, float]]) -> dict[str, Any]:
    """A cost profile of cp degrees and their time of a token."""
    return {
        "device": "imagined",
        "source": "made for tests",
        "date": "2026-01-01",
        "schemes": [
            {
                "tp": tp,
                "cp": cp,
                "pp": 1,
                "a_ms_per_token2": 0.0,
                "b_ms_per_token": b_ms_per_token,
                "c_ms": 7.0,
                "max_tokens": 2000,
            }
            for cp, b_ms_per_token in rows
        ],
    }


def test_a_scheme_that_was_not_measured_is_refused() -> None:
    with pytest.raises(StrategyError, match="not in the cost profile"):
        EmulatedDevice.read(A800).shorten(packed(), Scheme(tp=3))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_scale_is_refused(scale: float) -> None:
    with pytest.raises(ConfigurationError, match=r"scaled by a positive number but the factor is"):
        EmulatedDevice.read(A800, scale)


def test_the_notice_names_the_meaningless_results() -> None:
    notice = EmulatedDevice.read(A800, 0.25).notice
    assert notice.startswith("emulated device: ")
    assert "times 0.25" in notice
    assert "A800" in notice
    assert "losses" in notice
    assert "mean nothing" in notice


def test_the_rank_sleeps_for_the_rest_of_the_modelled_time() -> None:
    clock, batch = ManualClock(), emulated_batch()
    step = run(clock, Losses(clock, 0.01, 0.02), batch)
    assert clock.sleeps_s == pytest.approx([batch.forward_s - 0.01, batch.backward_s - 0.02])
    assert clock.time_s - 100.0 == pytest.approx(batch.forward_s + batch.backward_s)
    assert (step.count.num_operations, step.count.num_overruns) == (2, 0)
    assert step.count.modelled_s == pytest.approx(batch.forward_s + batch.backward_s)


def test_a_longer_computation_is_counted_as_an_overrun() -> None:
    clock, batch = ManualClock(), emulated_batch()
    step = run(clock, Losses(clock, batch.forward_s + 0.5, batch.backward_s + 0.25), batch)
    assert clock.sleeps_s == []
    assert (step.count.num_operations, step.count.num_overruns) == (2, 2)
    assert step.count.overrun_s == pytest.approx(0.75)


def test_gradients_are_those_of_the_plain_step() -> None:
    clock, batch = ManualClock(), emulated_batch()
    model = Losses(clock, 0.0, 0.0)
    run(clock, model, batch)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == batch.num_tokens


def test_without_a_backward_only_the_forward_takes_time() -> None:
    clock, batch = ManualClock(), emulated_batch()
    with torch.no_grad():
        EmulatedForwardStep(plain_step, now_s=clock.now_s, sleep=clock.sleep)(
            iter([batch]), Losses(clock, 0.0, 0.0)
        )
    assert clock.sleeps_s == pytest.approx([batch.forward_s])


def test_waiting_between_forward_and_backward_is_not_part_of_either() -> None:
    clock, batch = ManualClock(), emulated_batch()
    step = EmulatedForwardStep(plain_step, now_s=clock.now_s, sleep=clock.sleep)
    output, loss = step(iter([batch]), Losses(clock, 0.0, 0.0))
    clock.time_s += 5.0  # the next stage is busy
    loss(output)[0].backward()
    assert clock.sleeps_s == pytest.approx([batch.forward_s, batch.backward_s])


def test_a_micro_batch_of_unknown_time_is_refused() -> None:
    clock = ManualClock()
    with pytest.raises(ConfigurationError, match=r"micro-batches of known time .* 1035 tokens"):
        run(clock, Losses(clock, 0.0, 0.0), packed())
