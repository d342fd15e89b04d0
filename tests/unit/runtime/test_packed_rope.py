"""Queries and keys rotate by their place in the sequence, whatever group the model has."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor, nn

from megatron.hydraulis.data.packed_batch import local_places, pack, row_segments
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import packed_seq_params
from megatron.hydraulis.runtime.model_building import build_model
from megatron.hydraulis.runtime.packed_rows import follow_rows, rotate
from megatron.hydraulis.runtime.process_groups import LocalGroup, local_collection
from megatron.hydraulis.transfer.role import Role
from tests.support.gloo_pool import prepare_parent
from tests.support.models import SmallModel

LENGTHS = (37, 1, 16, 5)
MODEL = SmallModel(num_layers=1, hidden_size=32, num_heads=4, num_groups=2)
HEAD_SIZE = 8
ROLE = Role(1, 0, 0, 1, 1, False)


class Recorder(nn.Module):
    """Replaces core attention and records its arguments."""

    takes_context_group = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any) -> Tensor:
        self.given = (query, key)
        return query


class Unchanged(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden, None


def attention_in(cp: LocalGroup, *, follows: bool = True) -> tuple[Any, Any]:
    """Upstream's attention of a model that was built in a group, and the model's rotary table."""
    prepare_parent()
    groups: Any = local_collection()
    groups.cp = cp
    definition = MODEL.definition()
    with torch.device("meta"):
        model: Any = build_model(definition, definition.role_config(ROLE), ROLE, groups)
    attention = model.decoder.layers[0].self_attention
    attention.core_attention = Recorder()
    attention.linear_proj = Unchanged()
    if follows:
        follow_rows(model)
    return attention, model.rotary_pos_emb


def tensors(num_tokens: int) -> list[Tensor]:
    """Queries, keys and values of a row before rotation."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, heads, HEAD_SIZE, generator=generator, dtype=torch.float64)
        for heads in (MODEL.num_heads, MODEL.num_groups, MODEL.num_groups)
    ]


def rotated(attention: Any, rotary: Any, given: list[Tensor], description: Any) -> list[Tensor]:
    """Queries and keys at core attention."""
    attention.get_query_key_value_tensors = lambda *_, **__: tuple(x.unsqueeze(1) for x in given)
    table = rotary(description.max_seqlen_q, packed_seq=True, cp_group=description.cp_group)
    hidden = torch.zeros(len(given[0]), 1, MODEL.hidden_size)
    attention(hidden, None, rotary_pos_emb=table, packed_seq_params=description)
    return list(attention.core_attention.given)


def naive(given: Tensor, position: list[int]) -> Tensor:
    """Every pair of channels (i, i + half) of a token at place p turned by p / 10000^(i / half)."""
    half = HEAD_SIZE // 2
    turned = given.clone()
    for token, place in enumerate(position):
        for i in range(half):
            # Upstream computes the angle in fp32.
            base = torch.tensor(10000.0) ** torch.tensor(2 * i / HEAD_SIZE)
            angle = (torch.tensor(float(place)) * (1.0 / base)).double()
            x, y = given[token, :, i], given[token, :, i + half]
            turned[token, :, i] = x * angle.cos() - y * angle.sin()
            turned[token, :, i + half] = x * angle.sin() + y * angle.cos()
    return turned


def row_of(size: int) -> tuple[list[Tensor], list[int], list[int]]:
    """A whole row: queries, keys and values; padded lengths; the place of each token, 0 on padding,
    which nothing attends to."""
    _, padded = row_segments(LENGTHS, context_size=size)
    positions = [
        i if i < length else 0
        for length, padded_length in zip((*LENGTHS, 0), padded, strict=False)
        for i in range(padded_length)
    ]
    return tensors(sum(padded)), padded, positions


def description_of(group: LocalGroup) -> Any:
    sequences = [torch.arange(length + 1).numpy() for length in LENGTHS]
    part = pack(sequences, context_size=group.size(), context_rank=group.rank())
    return packed_seq_params(part.in_group(group))  # type: ignore[arg-type]


@pytest.mark.parametrize("static", [(1, 0), (2, 1), (4, 2), (8, 0)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_rotates_its_tokens_by_their_places(size: int, static: tuple[int, int]) -> None:
    given, padded, positions = row_of(size)
    expected = [naive(x, positions) for x in given[:2]]
    attention, rotary = attention_in(LocalGroup(*static))
    for rank in range(size):
        places = local_places(padded, size, rank)
        mine = [x[places] for x in given]
        found = rotated(attention, rotary, mine, description_of(LocalGroup(size, rank)))
        for got, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(got, whole[places], rtol=0.0, atol=1e-6)


def test_upstream_rotates_by_the_group_of_the_model() -> None:
    """Why we do not use it: in another group of the same size positions are silently wrong."""
    given, padded, positions = row_of(2)
    places = local_places(padded, 2, 0)
    expected = naive(given[0], positions)[places]
    mine = [x[places] for x in given]
    description = description_of(LocalGroup(2, 0))
    attention, rotary = attention_in(LocalGroup(2, 1), follows=False)
    found = rotated(attention, rotary, mine, description)[0]
    assert (found - expected).abs().max() > 0.1
    follow_rows(attention)
    found = rotated(attention, rotary, mine, description)[0]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("static", [1, 4])
def test_upstream_cannot_run_in_a_group_of_another_size(static: int) -> None:
    given, padded, _ = row_of(2)
    mine = [x[local_places(padded, 2, 0)] for x in given]
    attention, rotary = attention_in(LocalGroup(static, 0), follows=False)
    with pytest.raises(RuntimeError, match="split"):
        rotated(attention, rotary, mine, description_of(LocalGroup(2, 0)))


def test_the_fused_kernel_gets_the_micro_batch_s_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def fused(x: Tensor, borders: Tensor, table: Tensor, *, cp_size: int, cp_rank: int, **_: Any):
        calls.append((cp_size, cp_rank, borders.tolist()))
        return x

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", fused)
    attention, rotary = attention_in(LocalGroup(4, 3))
    attention.config.apply_rope_fusion = True
    for group in (LocalGroup(2, 1), LocalGroup(4, 0), LocalGroup(1, 0)):
        given, padded, _ = row_of(group.size())
        mine = [x[local_places(padded, group.size(), group.rank())] for x in given]
        rotated(attention, rotary, mine, description_of(group))
        borders = [0, *torch.tensor(padded).cumsum(0).tolist()]
        assert calls == [(group.size(), group.rank(), borders)] * 2
        calls.clear()


def test_a_part_without_its_group_is_refused() -> None:
    part = pack([torch.arange(9).numpy()], context_size=2)
    with pytest.raises(ConfigurationError, match="part of rank 0 of 2 but has no"):
        packed_seq_params(part)
    description = description_of(LocalGroup(2, 0))
    description.cp_group = None
    given, padded, _ = row_of(2)
    attention, rotary = attention_in(LocalGroup(2, 0))
    with pytest.raises(ConfigurationError, match="shared by 2 ranks but has no"):
        rotated(attention, rotary, [x[local_places(padded, 2, 0)] for x in given], description)


def test_a_core_attention_without_groups_is_refused() -> None:
    """It would attend only inside the part, and gradients would be silently wrong."""
    attention, rotary = attention_in(LocalGroup())
    attention.core_attention.takes_context_group = False
    given, padded, _ = row_of(2)
    mine = [x[local_places(padded, 2, 0)] for x in given]
    with pytest.raises(ConfigurationError, match=r"Recorder .* part of a row that 2 ranks share"):
        rotated(attention, rotary, mine, description_of(LocalGroup(2, 0)))
    given, padded, _ = row_of(1)
    rotated(attention, rotary, given, description_of(LocalGroup(1, 0)))


def test_rows_without_positions_are_left_to_upstream() -> None:
    """A user's own forward step may describe its rows as upstream does."""
    given, padded, positions = row_of(2)
    places = local_places(padded, 2, 1)
    attention, rotary = attention_in(LocalGroup())
    description = description_of(LocalGroup(2, 1))
    description.positions = None
    found = rotated(attention, rotary, [x[places] for x in given], description)[0]
    is_token = torch.tensor([positions[place] for place in places]) > 0
    expected = naive(given[0], positions)[places]
    torch.testing.assert_close(found[is_token], expected[is_token], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_turned", [HEAD_SIZE, HEAD_SIZE // 2])
def test_rotation_and_its_gradient_equal_upstream_s(num_turned: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.tensor([0, 1, 2, 0, 7, 8])
    halves = torch.outer(positions.double(), torch.tensor([1.0, 0.3, 0.1, 0.02])[: num_turned // 2])
    angles = (
        halves.repeat_interleave(2, dim=1) if interleaved else torch.cat([halves, halves], dim=1)
    ).view(-1, 1, 1, num_turned)
    query, key = (
        torch.randn(6, heads, HEAD_SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2)
    )
    cos, sin = angles[:, 0].cos(), angles[:, 0].sin()
    found = rotate(query, key, cos, sin, interleaved=interleaved)
    for given, turned in zip((query, key), found, strict=True):
        expected = rope_utils._apply_rotary_pos_emb_bshd(
            given.unsqueeze(1), angles, rotary_interleaved=interleaved
        ).squeeze(1)
        torch.testing.assert_close(turned, expected, rtol=1e-14, atol=1e-14)
        gradient = torch.randn(turned.shape, generator=generator, dtype=torch.float64)
        (wanted,) = torch.autograd.grad(expected, given, gradient)
        (got,) = torch.autograd.grad(turned, given, gradient, retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)


def test_layers_share_cosines_and_sines_and_do_not_keep_the_fused_output() -> None:
    given, _, _ = row_of(1)
    fused = torch.cat(given, dim=1).requires_grad_()
    attention, rotary = attention_in(LocalGroup())
    description = description_of(LocalGroup(1, 0))
    attention.core_attention.register_forward_hook(
        lambda _, inputs, outcome: outcome + inputs[1].repeat(1, 2, 1) * inputs[2].repeat(1, 2, 1)
    )
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    heads = [x.size(1) for x in given]
    table = rotary(description.max_seqlen_q, packed_seq=True)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            parts = list((fused * 1.0).split(heads, dim=1))
            rotated(attention, lambda *_, **__: table, parts, description)
    sizes = list(kept.values())
    assert fused.untyped_storage().nbytes() not in sizes
    assert sizes.count(len(fused) * HEAD_SIZE * fused.element_size()) == 2  # cosines and sines


def test_a_table_at_the_address_of_an_earlier_one_is_not_confused_with_it() -> None:
    """A layer may create a table and free it before the next layer creates one."""
    given, _, positions = row_of(1)
    attention, rotary = attention_in(LocalGroup())
    description = description_of(LocalGroup(1, 0))
    table = rotary(description.max_seqlen_q, packed_seq=True)
    memory = bytearray(table.numel() * table.element_size())
    for angles in (table, 2.0 * table):
        # Both lie at the same address, one after the other.
        copy = torch.frombuffer(memory, dtype=table.dtype).view(table.shape).copy_(angles)
        found = rotated(attention, lambda *_, made=copy, **__: made, given, description)[0]
        own = angles[positions].squeeze(1)
        expected = rope_utils._apply_rotary_pos_emb_bshd(given[0].unsqueeze(1), own.unsqueeze(1))
        torch.testing.assert_close(found, expected.squeeze(1), rtol=0.0, atol=1e-6)
        del copy
