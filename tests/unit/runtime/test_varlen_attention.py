import functools
import inspect

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.hydraulis.runtime.attention import SegmentAttention, attend_and_forget
from megatron.hydraulis.runtime.core_attention import VarlenAttention
from tests.support.context_probes import packed, run_attention
from tests.support.models import SmallModel
from tests.support.varlen_stand_in import replace_kernel, varlen_attn

MODEL = SmallModel(hidden_size=32, num_heads=4, num_groups=2)


def test_the_stand_in_has_the_signature_of_the_real_one() -> None:
    from torch.nn.attention import varlen  # loads torch's compiler

    real = inspect.signature(varlen.varlen_attn).parameters
    for name, parameter in inspect.signature(varlen_attn).parameters.items():
        assert real[name].kind == parameter.kind, name
        assert real[name].default == parameter.default, name


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0)])
@pytest.mark.parametrize("lengths", [[5, 1, 9, 2], [17]])
def test_attends_as_segments_do(
    lengths: list[int], window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_kernel(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(17, heads, 8) for heads in (4, 2, 2)]
    shapes.append((17, 32))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    config = MODEL.transformer()
    config.window_size = window
    own = VarlenAttention(config, 1, AttnMaskType.causal, "self")
    reference = SegmentAttention(config, 1, AttnMaskType.causal, "self")
    found = run_attention(own, given, packed(lengths, lengths))
    expected = run_attention(reference, given, packed(lengths, lengths))  # type: ignore[arg-type]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_gathered_tensors_are_freed_until_the_backward_and_their_parts_after_it() -> None:
    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    num_gathers = 0

    def gather(part: Tensor) -> Tensor:
        nonlocal num_gathers
        num_gathers += 1
        return 2 * part

    part, gathered = values.detach().clone(), 2 * values
    of_gathered, of_part = (StorageWeakRef(each.untyped_storage()) for each in (gathered, part))
    again = functools.partial(gather, part)
    outcome = attend_and_forget(lambda row: (row[1:] * row[:-1]).sum(), gathered, again)
    del gathered, part, again
    assert of_gathered.expired()
    assert num_gathers == 0
    outcome.backward()
    assert num_gathers == 1
    assert of_part.expired()  # though the outcome has its graph
    expected = values.detach().clone().requires_grad_()
    (4 * expected[1:] * expected[:-1]).sum().backward()
    torch.testing.assert_close(values.grad, expected.grad)
