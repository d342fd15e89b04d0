"""Initial weights are computed by rows; initialisers that cannot be replayed are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.catalogue import EverythingOnMeta, InitialiserRecorder


def recorded(make: Callable[[], Tensor], name: str = "some.weight") -> list[str]:
    """Names of the steps that initialise the parameter, as recorded on meta."""
    recorder = InitialiserRecorder()
    with EverythingOnMeta(recorder), recorder:
        parameter = make()
    return [step.operation.__name__ for step in recorder.recipe(name, parameter)]


def weight(*changes: Callable[[Tensor], object]) -> Callable[[], Tensor]:
    """A parameter of (6, 4), normally distributed and then changed."""

    def make() -> Tensor:
        parameter = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            parameter.normal_(0.0, 0.1)
            for change in changes:
                change(parameter)
        return parameter

    return make


def test_steps_before_the_last_complete_overwrite_have_no_effect() -> None:
    assert recorded(weight(lambda w: w.mul_(2.0), lambda w: w.add_(1.0))) == [
        *("normal_", "mul_", "add_")
    ]
    assert recorded(weight(lambda w: w.mul_(2.0), lambda w: w.uniform_(-1, 1))) == ["uniform_"]
    earlier = weight(lambda w: w[:2].zero_(), lambda w: w.copy_(torch.ones(6, 4)), nn.init.ones_)
    assert recorded(earlier) == ["fill_"]


def test_views_of_the_whole_parameter_count_as_the_parameter() -> None:
    assert recorded(weight(lambda w: w.t().uniform_(), lambda w: w.view(-1).mul_(3.0))) == [
        *("uniform_", "mul_")
    ]
    assert recorded(weight(lambda w: w.data.zero_())) == ["zero_"]


def test_parameters_of_one_storage_are_distinguished() -> None:
    def second_half() -> Tensor:
        both = torch.empty(8).normal_()
        both[:4].zero_()
        both[4:].mul_(2.0)
        return nn.Parameter(both[4:])

    assert recorded(second_half) == ["normal_", "mul_"]


def test_replayed_steps_give_what_the_initialiser_gives() -> None:
    make = weight(lambda w: w.mul_(3.0), lambda w: w.clamp_(min=-0.1, max=0.2), lambda w: w.sub_(1))
    recorder = InitialiserRecorder()
    with EverythingOnMeta(recorder), recorder:
        parameter = make()
    torch.manual_seed(5)
    expected = make()
    torch.manual_seed(5)
    found = torch.empty(6, 4)
    for step in recorder.recipe("weight", parameter):
        step.replay(found)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:2].zero_(), "'zero_', which writes to a part of it, within 8 of 24 elements"),
        (lambda w: w[:, 1].fill_(1.0), "'fill_', which writes to a part of it"),
        (lambda w: w[1:].mul_(2.0), "'mul_', which writes to a part of it"),
        (lambda w: w.copy_(torch.ones(6, 4)), "'copy_', which takes values from another tensor"),
        (lambda w: w.mul_(torch.arange(4)), "'mul_', which takes values from another tensor"),
        (lambda w: w.fill_(torch.ones(())), "'fill_', which takes values from another tensor"),
        (lambda w: w.tril_(), "'tril_', which is not an element-wise operation"),
        (lambda w: torch._foreach_mul_([w], 2.0), "'_foreach_mul_', which is not an element-wise"),
        (lambda w: torch.eye(6, 4, out=w), "'eye', which is not an element-wise operation"),
        (nn.init.trunc_normal_, "'trunc_normal_', which does nothing on meta"),
        (nn.init.orthogonal_, "'orthogonal_', which does nothing on meta"),
        (lambda w: nn.init.sparse_(w, 0.5), "'sparse_', which does nothing on meta"),
    ],
)
def test_steps_that_do_not_work_by_rows_are_refused(
    change: Callable[[Tensor], object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"'decoder.layers.0.some.weight' .* {message}"):
        recorded(weight(change), "decoder.layers.0.some.weight")
    # If it is overwritten later, it does not matter.
    assert recorded(weight(change, lambda w: w.normal_())) == ["normal_"]


def test_an_embedding_with_a_padding_index_is_refused() -> None:
    assert recorded(lambda: nn.Embedding(6, 4).weight) == ["normal_"]
    with pytest.raises(ConfigurationError, match=r"by 'fill_', .* 4 of 24 .* without padding_idx"):
        recorded(lambda: nn.Embedding(6, 4, padding_idx=0).weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.empty(4)),
        lambda: nn.Parameter(torch.randn(4)),
        lambda: nn.Parameter(torch.ones(4)),
    ],
)
def test_a_parameter_that_nothing_initialises_in_place_is_refused(
    make: Callable[[], Tensor],
) -> None:
    with pytest.raises(ConfigurationError, match=r"'some.weight' is not initialised by"):
        recorded(make)


def test_a_table_of_numbers_on_a_named_device_can_be_combined_with_parameters() -> None:
    def scaled() -> Tensor:
        parameter = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            parameter.zero_()
        table = torch.arange(4, dtype=torch.float32, device="cpu") / 2
        assert table.tolist() == [0.0, 0.5, 1.0, 1.5]
        assert (parameter + table).is_meta
        assert torch.cat([table, parameter.detach()[0]]).is_meta
        return parameter

    assert recorded(scaled) == ["zero_"]
