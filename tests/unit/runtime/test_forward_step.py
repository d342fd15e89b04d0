"""A loss function that would make the update depend on the packing is refused at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import LossFunction, loss_func, make_forward_step
from megatron.hydraulis.runtime.token_loss import TokenOutputs, loss_forward_step


class Losses(nn.Module):
    """Replaces a model: returns given token losses."""

    def __init__(self, losses: Tensor) -> None:
        super().__init__()
        self.losses = nn.Parameter(losses)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.losses * 1.0


SEQUENCES = [torch.arange(5).numpy(), torch.arange(4).numpy()]


def run(
    loss: LossFunction, *models: nn.Module, weights: list[list[float] | None] | None = None
) -> list[Any]:
    """What the schedule gets for micro-batches of 7 tokens, one after the other.

    weights: for each micro-batch those of predicting its tokens; 1 where None.
    """
    step = make_forward_step(loss)
    returned = []
    for model, given in zip(models, weights or [None] * len(models), strict=True):
        batch = pack(SEQUENCES, weights=None if given is None else two_sequences(given))
        output, finish = step(iter([batch]), model)
        returned.append(finish(output))
    return returned


def two_sequences(weights: list[float]) -> list[Any]:
    """With one for the first token of each, which is ignored."""
    return [np.array([9, *part], np.float32) for part in (weights[:4], weights[4:])]


def some_losses() -> nn.Module:
    return Losses(torch.linspace(1.0, 3.0, 7).unsqueeze(0))


def mean(mask: Tensor, output: Tensor) -> Any:
    total, num_tokens, _ = loss_func(mask, output)
    value = total / num_tokens
    return value, num_tokens, {"lm loss": torch.stack([value.detach(), num_tokens.float()])}


def mean_of_one(mask: Tensor, output: Tensor) -> Any:
    value = output.mean()
    return value, torch.tensor(1), {"lm loss": torch.stack([value.detach(), torch.tensor(1.0)])}


def mean_but_sum_reported(mask: Tensor, output: Tensor) -> Any:
    total, num_tokens, report = loss_func(mask, output)
    return total / num_tokens, num_tokens, report


def no_count(mask: Tensor, output: Tensor) -> Any:
    total, num_tokens, _ = loss_func(mask, output)
    return total, num_tokens, {"lm loss": total.detach()}


def no_report(mask: Tensor, output: Tensor) -> Any:
    total, num_tokens, _ = loss_func(mask, output)
    return total, num_tokens, {}


def other_count(mask: Tensor, output: Tensor) -> Any:
    total, num_tokens, report = loss_func(mask, output)
    return total, num_tokens + 1, report


def two_values(mask: Tensor, output: Tensor) -> Any:
    total, _, report = loss_func(mask, output)
    return total, report


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean, r"gives \(2, 7\) .* but \(2, 14\) for the same tokens twice; return the sum"),
        (mean_of_one, r"gives \(2, 1\) .* but \(2, 1\) for the same tokens twice"),
        (mean_but_sum_reported, r"returns \(2, 7\) but reports 'lm loss' as \(14, 7\)"),
        (no_count, r"report 'lm loss' holds 1 numbers"),
        (no_report, r"report 'none' holds 0 numbers"),
        (other_count, r"returns \(14, 8\) but reports 'lm loss' as \(14, 7\)"),
        (two_values, r"must return three values"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(loss: LossFunction, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(loss, some_losses())
    if loss not in (no_count, no_report, two_values):
        # Without a loss nothing can be checked; the next micro-batch is.
        for nothing in (0.0, torch.nan):
            with pytest.raises(ConfigurationError):
                run(loss, Losses(torch.full((1, 7), nothing)), some_losses())


def test_sums_pass_and_are_checked_once() -> None:
    num_calls = 0

    def weighted(mask: Tensor, output: Tensor) -> Any:
        nonlocal num_calls
        num_calls += 1
        return loss_func(mask, 0.5 * output)

    nan, *others = run(weighted, Losses(torch.full((1, 7), torch.nan)), *[some_losses()] * 3)
    assert num_calls == 5, "once for each micro-batch, and again for the check"
    assert not torch.isfinite(nan[0])
    assert [float(returned[0].detach()) for returned in others] == [7.0] * 3


FRACTIONS = [0.1, 0.0, 0.2, 0.0, 0.1, 0.0, 0.0]


def rounded(weights: Tensor, output: Tensor) -> Any:
    """As upstream's loss function, which counts with whole numbers."""
    total, weight_sum, _ = loss_func(weights, output)
    count = weight_sum.round().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def counted(weights: Tensor, output: Tensor) -> Any:
    total, _, _ = loss_func(weights, output)
    count = torch.count_nonzero(weights)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def masked(weights: Tensor, output: Tensor) -> Any:
    total, _, _ = loss_func((weights > 0).float(), output)
    weight_sum = weights.sum()
    return total, weight_sum, {"lm loss": torch.stack([total.detach(), weight_sum])}


@pytest.mark.parametrize(
    ("loss", "scale", "message"),
    [
        (rounded, 1.0, r"gives \(0\.66\S*, 0\) .* but \(1\.3\S*, 1\) for the same tokens twice"),
        (rounded, 6.25, r"gives \(4\.1\S*, 2\) .* but \(8\.3\S*, 5\) for the same tokens twice"),
        (rounded, 1000.25, r"\S*, 400\) .* but \(0\.66\S*, 0\) for its weights times 0\.00099"),
        (counted, 6.25, r"\S*, 3\) .* but \(0\.66\S*, 3\) for its weights times 0\.16; return"),
        (masked, 6.25, r"gives \(5, 2\.5\) .* but \(5, 0\.4\) for its weights"),
    ],
)
def test_weights_that_are_fractions_may_be_neither_rounded_nor_counted(
    loss: LossFunction, scale: float, message: str
) -> None:
    weights = [scale * weight for weight in FRACTIONS]
    with pytest.raises(ConfigurationError, match=message):
        run(loss, some_losses(), weights=[weights])
    # The check of micro-batches with weights of 0 and 1 says nothing about them.
    whole = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    run(loss, some_losses(), weights=[whole])
    with pytest.raises(ConfigurationError, match=message):
        run(loss, *[some_losses()] * 3, weights=[None, whole, weights])


@pytest.mark.parametrize("total", [0.4, 2.5])
def test_the_sum_of_weights_is_not_rounded(total: float) -> None:
    weights = [total / 0.4 * weight for weight in FRACTIONS]
    ((loss, num_tokens, report),) = run(loss_func, some_losses(), weights=[weights])
    expected = np.dot(weights, np.linspace(1.0, 3.0, 7))
    assert report["lm loss"].tolist() == pytest.approx([expected, total], rel=1e-6)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    num_trained = np.count_nonzero(weights)
    assert num_tokens == num_trained, "upstream's schedule adds it to a tensor of whole numbers"


def test_the_check_does_not_change_the_gradient() -> None:
    model = some_losses()
    ((loss, _, _),) = run(loss_func, model)
    loss.backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[1.0] * 7]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_losses_of_a_group_add_up_to_those_of_one_rank(size: int, tp: int) -> None:
    generator = np.random.default_rng(size)
    sequences = [generator.integers(61, size=length + 1) for length in (37, 1, 16, 5)]
    # The loss of a token as an arbitrary function of the model's input for it.
    table = torch.from_numpy(generator.random((61, 61, 64)))

    def total(batch: PackedBatch) -> list[float]:
        losses = table[batch.tokens, batch.labels, batch.position_ids]
        loss, num_tokens, report = loss_func(batch.weights, losses)
        assert report["lm loss"].tolist() == [float(loss), float(num_tokens)]
        assert num_tokens == batch.num_tokens
        return [float(loss), float(num_tokens)]

    whole = total(pack(sequences, tp))
    parts = [
        total(pack(sequences, tp, context_size=size, context_rank=rank)) for rank in range(size)
    ]
    assert np.sum(parts, axis=0) == pytest.approx(whole, rel=1e-12)
    assert whole[1] == 59


def test_an_infinite_loss_without_weight_is_not_trained() -> None:
    losses = torch.linspace(1.0, 3.0, 7).unsqueeze(0)
    losses[0, 2] = torch.inf
    model = Losses(losses)
    weights = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    ((total, _, report),) = run(loss_func, model, weights=[weights])
    assert report["lm loss"].isfinite().all()
    (gradient,) = torch.autograd.grad(total, list(model.parameters()))
    assert gradient.flatten().tolist() == weights


class Outputs(nn.Module):
    """Replaces a model that is called for outputs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.log_probs = nn.Parameter(torch.linspace(-3.0, -1.0, 7).unsqueeze(0))

    def forward(self, *_: Any, **__: Any) -> TokenOutputs:
        return TokenOutputs(self.log_probs * 1.0, self.log_probs.detach())


def test_a_ratio_that_overflows_without_weight_is_not_trained() -> None:
    weights = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    old = torch.zeros(7)
    old[2] = -1e5
    batch = replace(pack(SEQUENCES, weights=two_sequences(weights)), inputs={"old": old})
    model = Outputs()
    step = loss_forward_step(lambda log_probs, _, inputs, __: (log_probs - inputs["old"]).exp())
    output, finish = step(iter([batch]), model)
    total, _, _ = finish(output)
    (gradient,) = torch.autograd.grad(total, list(model.parameters()))
    expected = model.log_probs.exp().flatten() * torch.tensor(weights)
    assert torch.equal(gradient.flatten(), expected)
