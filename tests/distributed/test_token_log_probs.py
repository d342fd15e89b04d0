"""Log-probabilities, entropies and gradients, by chunks of tokens, against whole rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron.hydraulis.runtime.memory import CpuMemory
from megatron.hydraulis.runtime.token_loss import (
    ChunkedOutputLayer,
    OutputSettings,
    token_losses,
    token_outputs,
)
from tests.support.gloo_pool import pool_of
from tests.support.models import SmallModel

TOLERANCE = 1e-10
HIDDEN_SIZE, NUM_COLUMNS, NUM_TOKENS = 16, 64, 24
SCALE = 0.7


def place() -> tuple[int, int]:
    """Rank, and number of ranks."""
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def output_layer(
    settings: OutputSettings,
    *,
    sequence_parallel: bool,
    dtype: torch.dtype = torch.float64,
    shape: tuple[int, int] = (HIDDEN_SIZE, NUM_COLUMNS),
) -> ColumnParallelLinear:
    """The output layer over all ranks, with its gradient as an arena gives it."""
    config = SmallModel(dtype=dtype).transformer()
    config.sequence_parallel = sequence_parallel
    config.perform_initialization = False
    config.use_cpu_initialization = True
    layer = ColumnParallelLinear(
        *shape,
        config=config,
        init_method=config.init_method,
        bias=False,
        tp_group=torch.distributed.group.WORLD,
    )
    ChunkedOutputLayer.convert(layer, settings)
    wide = torch.promote_types(dtype, torch.float32)
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(weight.shape, dtype=wide)
    return layer


def inputs(num_columns: int = NUM_COLUMNS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the whole matrix, labels, and the loss's weights of both outputs."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    matrix = torch.randn(num_columns, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (NUM_TOKENS,), generator=generator)
    weights = torch.randn(2, NUM_TOKENS, generator=generator, dtype=torch.float64)
    return hidden, matrix, labels, weights


def part_of(whole: Tensor, rank: int, size: int) -> Tensor:
    return whole.chunk(size)[rank].clone()


def compute(
    settings: OutputSettings, sequence_parallel: bool, entropy: bool, dtype: torch.dtype
) -> tuple[Any, ...]:
    """On every rank: log-probabilities, entropies, gradients of hidden states and matrix."""
    rank, size = place()
    layer = output_layer(settings, sequence_parallel=sequence_parallel and size > 1, dtype=dtype)
    hidden, matrix, labels, weights = inputs()
    layer.weight.data.copy_(part_of(matrix, rank, size))
    mine = part_of(hidden, rank, size) if layer.sequence_parallel else hidden
    mine = mine.to(dtype)[:, None].requires_grad_()
    out = token_outputs(entropy=entropy)(
        hidden_states=mine, output_layer=layer, output_weight=None, labels=labels[None]
    )
    assert out.log_probs is not None
    loss = (weights[0] * out.log_probs).sum()
    if entropy:
        assert out.entropy is not None
        loss = loss + (weights[1] * out.entropy).sum()
    loss.backward()
    assert layer.weight.grad_added_to_main_grad
    found = (out.log_probs, out.entropy, mine.grad, layer.weight.main_grad)
    return tuple(None if x is None else x.detach().squeeze(1).double().numpy() for x in found)


def expected(num_real: int, entropy: bool, scale: float) -> tuple[Tensor, ...]:
    """With the logits of the whole row, by autograd."""
    hidden, matrix, labels, weights = inputs()
    hidden.requires_grad_(), matrix.requires_grad_()
    log_probs = (scale * hidden @ matrix[:num_real].t()).log_softmax(dim=1)
    of_labels = log_probs[torch.arange(NUM_TOKENS), labels]
    entropies = -(log_probs.exp() * log_probs).sum(dim=1)
    (weights[0] * of_labels + entropy * weights[1] * entropies).sum().backward()
    assert hidden.grad is not None
    assert matrix.grad is not None
    return of_labels.detach(), entropies.detach(), hidden.grad, matrix.grad


CASES = [
    (1, OutputSettings(61, 7), False),
    (1, OutputSettings(64, None, SCALE), False),
    (2, OutputSettings(61, 5, SCALE), True),
    (2, OutputSettings(61, 100), False),
    (4, OutputSettings(61, 1), True),
    (4, OutputSettings(61, 10), False),
    (4, OutputSettings(30, 10), True),  # two ranks hold padding only
]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("tp", "settings", "sequence_parallel"), CASES, ids=str)
def test_chunks_give_what_a_whole_row_gives(
    tp: int, settings: OutputSettings, sequence_parallel: bool, entropy: bool
) -> None:
    runs = pool_of(tp).run(compute, settings, sequence_parallel, entropy, torch.float64)
    wanted = expected(settings.num_tokens_in_vocabulary, entropy, settings.scale)
    for rank, (log_probs, entropies, of_hidden, of_matrix) in enumerate(runs):
        wanted_hidden = part_of(wanted[2], rank, tp) if sequence_parallel else wanted[2]
        pairs = [(log_probs[0], wanted[0]), (of_hidden, wanted_hidden)]
        pairs.append((of_matrix, part_of(wanted[3], rank, tp)))
        if entropy:
            pairs.append((entropies[0], wanted[1]))
        for found, exact in pairs:
            torch.testing.assert_close(
                torch.from_numpy(found), exact, rtol=TOLERANCE, atol=TOLERANCE
            )
    for one, other in pairwise(runs):  # bit by bit, as upstream's
        assert (one[0] == other[0]).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_narrow_types_round_products_only(dtype: torch.dtype, tolerance: float) -> None:
    settings = OutputSettings(61, 5)
    for log_probs, _, of_hidden, of_matrix in pool_of(1).run(
        compute, settings, False, False, dtype
    ):
        wanted = expected(61, False, 1.0)
        for found, exact in zip(
            (log_probs[0], of_hidden, of_matrix), (wanted[0], *wanted[2:]), strict=True
        ):
            error = (torch.from_numpy(found) - exact).abs().max() / exact.abs().max()
            assert error < tolerance


LARGE_TOKENS, LARGE_COLUMNS = 4096, 10240
LARGE_CHUNK = 1024
"""40 MiB of logits: what is larger than 32 MiB, glibc returns when it is freed."""
CHUNK_BYTES = 4 * LARGE_CHUNK * LARGE_COLUMNS
ROW_BYTES = 4 * LARGE_TOKENS * LARGE_COLUMNS


def peak_bytes(chunk_tokens: int, trains: tuple[str, ...]) -> int:
    """On one rank: bytes that forward and backward of a row of fp32 logits take."""
    layer = output_layer(
        OutputSettings(LARGE_COLUMNS, chunk_tokens),
        sequence_parallel=False,
        dtype=torch.float32,
        shape=(HIDDEN_SIZE, LARGE_COLUMNS),
    )
    layer.weight.data.fill_(0.01)
    layer.weight.main_grad.fill_(0.0)
    labels = torch.zeros(1, LARGE_TOKENS, dtype=torch.int64)
    hidden = torch.ones(LARGE_TOKENS, 1, HIDDEN_SIZE, requires_grad=True)
    meter = CpuMemory(1)

    def step() -> int:
        before = meter.restart()
        found = token_outputs(entropy="entropy" in trains)(
            hidden_states=hidden, output_layer=layer, output_weight=None, labels=labels
        )
        sum(getattr(found, name).sum() for name in trains).backward()
        return meter.peak_bytes() - before

    step()  # loads libraries
    # What the allocator returned to the system before a step counts in that step.
    return min(step() for _ in range(3))


def test_one_chunk_of_logits_is_alive() -> None:
    (chunked,) = pool_of(1).run(peak_bytes, LARGE_CHUNK, ("log_probs",))
    (whole,) = pool_of(1).run(peak_bytes, LARGE_TOKENS, ("log_probs",))
    assert whole > 0.9 * ROW_BYTES  # the meter sees logits
    assert chunked < 1.2 * CHUNK_BYTES


def test_entropies_and_their_gradient_take_no_more_than_a_chunk() -> None:
    (found,) = pool_of(1).run(peak_bytes, LARGE_CHUNK, ("log_probs", "entropy"))
    assert found < 1.25 * CHUNK_BYTES


def gradient_of_shared_matrix() -> tuple[int, float, float]:
    """On one rank: how often a matrix that is also the embedding reports its gradient, which."""
    layer = output_layer(OutputSettings(61, 7), sequence_parallel=False)
    matrix: Any = torch.nn.Parameter(inputs()[1])
    matrix.main_grad = torch.zeros_like(matrix)
    layer.weight = None
    arrivals: list[float] = []

    def arrived(parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        arrivals.append(float(parameter.main_grad.abs().sum()))

    matrix.register_post_accumulate_grad_hook(arrived)
    _, _, labels, weights = inputs()
    hidden = torch.nn.functional.embedding(labels, matrix)
    losses = token_losses(
        hidden_states=hidden[:, None],
        output_layer=layer,
        output_weight=matrix,
        labels=labels.flip(0)[None],
    )
    (weights[0] * losses).sum().backward()
    plain = inputs()[1].requires_grad_()
    logits = torch.nn.functional.embedding(labels, plain) @ plain[:61].t()
    expected_losses = torch.nn.functional.cross_entropy(logits, labels.flip(0), reduction="none")
    (weights[0] * expected_losses).sum().backward()
    assert plain.grad is not None
    error = float((matrix.main_grad - plain.grad).abs().max())
    return len(arrivals), arrivals[-1] - float(plain.grad.abs().sum()), error


def test_a_shared_matrix_is_complete_with_the_embeddings_gradient() -> None:
    ((num_arrivals, when_it_arrived, error),) = pool_of(1).run(gradient_of_shared_matrix)
    assert num_arrivals == 1
    assert abs(when_it_arrived) < TOLERANCE
    assert error < TOLERANCE


def losses_of_settings() -> tuple[float, ...]:
    """On every rank: losses of the same tokens without an entropy, with one, and again."""
    layer = output_layer(OutputSettings(61, 7), sequence_parallel=False)
    hidden, matrix, labels, _ = inputs()
    layer.weight.data.copy_(part_of(matrix, *place()))
    given: Any = {
        "hidden_states": hidden[:, None],
        "output_layer": layer,
        "output_weight": None,
        "labels": labels[None],
    }
    with torch.no_grad():
        first = token_losses(**given)
        others: list[Any] = [token_outputs(entropy=e)(**given).log_probs for e in (True, False)]
    return tuple(float((first + other).abs().max()) for other in others)


def test_log_probs_are_equal_bit_by_bit_whatever_is_asked_for() -> None:
    for differences in pool_of(2).run(losses_of_settings):
        assert differences == (0.0, 0.0)
