"""Queries and keys turn by their place in their sequence, whatever group the model was built in."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor, nn

from megatron.hydraulis.data.context_split import local_places, row_segments
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.context_rope import follow_context_groups
from megatron.hydraulis.runtime.forward_step import packed_seq_params
from megatron.hydraulis.runtime.model_building import build_model, build_role_model
from megatron.hydraulis.runtime.process_groups import LocalGroup, local_collection
from megatron.hydraulis.transfer.role import Role
from tests.support.gloo_pool import prepare_parent
from tests.support.models import SmallModel

LENGTHS = (37, 1, 16, 5)
MODEL = SmallModel(num_layers=1, hidden_size=32, num_heads=4, num_groups=2)
HEAD_SIZE = 8
ROLE = Role(1, 0, 0, 1, 1, False)


class Recorder(nn.Module):
    """Stands in for core attention and keeps what it was given."""

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
    if follows:
        model: Any = build_role_model(definition, ROLE, groups)
    else:
        with torch.device("meta"):
            model = build_model(definition, definition.role_config(ROLE), ROLE, groups)
    attention = model.decoder.layers[0].self_attention
    attention.core_attention = Recorder()
    attention.linear_proj = Unchanged()
    return attention, model.rotary_pos_emb


def tensors(num_tokens: int) -> list[Tensor]:
    """Queries, keys and values of a row before rotation."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, heads, HEAD_SIZE, generator=generator, dtype=torch.float64)
        for heads in (MODEL.num_heads, MODEL.num_groups, MODEL.num_groups)
    ]


def rotated(attention: Any, rotary: Any, given: list[Tensor], description: Any) -> list[Tensor]:
    """Queries and keys as core attention gets them."""
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
    """A whole row: queries, keys and values; padded lengths; the place of each token."""
    _, padded = row_segments(LENGTHS, context_size=size)
    return tensors(sum(padded)), padded, [i for length in padded for i in range(length)]


def description_of(group: LocalGroup) -> Any:
    sequences = [torch.arange(length + 1).numpy() for length in LENGTHS]
    part = pack(sequences, context_size=group.size(), context_rank=group.rank())
    return packed_seq_params(part.in_group(group))  # type: ignore[arg-type]


@pytest.mark.parametrize("static", [(1, 0), (2, 1), (4, 2), (8, 0)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_turns_its_tokens_by_their_places(size: int, static: tuple[int, int]) -> None:
    given, padded, positions = row_of(size)
    expected = [naive(x, positions) for x in given[:2]]
    attention, rotary = attention_in(LocalGroup(*static))
    for rank in range(size):
        places = local_places(padded, size, rank)
        mine = [x[places] for x in given]
        found = rotated(attention, rotary, mine, description_of(LocalGroup(size, rank)))
        for got, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(got, whole[places], rtol=0.0, atol=1e-6)


def test_upstream_alone_turns_by_the_group_of_the_model() -> None:
    """The trap: another rank of a group as large gives wrong positions without a word."""
    given, padded, positions = row_of(2)
    places = local_places(padded, 2, 0)
    expected = naive(given[0], positions)[places]
    mine = [x[places] for x in given]
    description = description_of(LocalGroup(2, 0))
    attention, rotary = attention_in(LocalGroup(2, 1), follows=False)
    found = rotated(attention, rotary, mine, description)[0]
    assert (found - expected).abs().max() > 0.1
    follow_context_groups(attention)
    found = rotated(attention, rotary, mine, description)[0]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("static", [1, 4])
def test_upstream_alone_cannot_run_in_a_group_of_another_size(static: int) -> None:
    given, padded, _ = row_of(2)
    mine = [x[local_places(padded, 2, 0)] for x in given]
    attention, rotary = attention_in(LocalGroup(static, 0), follows=False)
    with pytest.raises(RuntimeError, match="split"):
        rotated(attention, rotary, mine, description_of(LocalGroup(2, 0)))


def test_the_fused_kernel_is_told_of_the_micro_batch_s_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []

    def fused(x: Tensor, borders: Tensor, table: Tensor, *, cp_size: int, cp_rank: int, **_: Any):
        told.append((cp_size, cp_rank, borders.tolist()))
        return x

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", fused)
    attention, rotary = attention_in(LocalGroup(4, 3))
    attention.config.apply_rope_fusion = True
    for group in (LocalGroup(2, 1), LocalGroup(4, 0), LocalGroup(1, 0)):
        given, padded, _ = row_of(group.size())
        mine = [x[local_places(padded, group.size(), group.rank())] for x in given]
        rotated(attention, rotary, mine, description_of(group))
        borders = [0, *torch.tensor(padded).cumsum(0).tolist()]
        assert told == [(group.size(), group.rank(), borders)] * 2
        told.clear()


def test_a_part_without_its_group_is_refused() -> None:
    part = pack([torch.arange(9).numpy()], context_size=2)
    with pytest.raises(ConfigurationError, match="part of rank 0 of 2 but has no"):
        packed_seq_params(part)
    description = description_of(LocalGroup(2, 0))
    description.cp_group = None
    given, padded, _ = row_of(2)
    attention, rotary = attention_in(LocalGroup(2, 0))
    with pytest.raises(ConfigurationError, match="shared by 2 ranks but names no"):
        rotated(attention, rotary, [x[local_places(padded, 2, 0)] for x in given], description)


def test_a_core_attention_that_knows_no_groups_is_refused() -> None:
    """It would attend inside the part, and gradients would be wrong without a word."""
    attention, rotary = attention_in(LocalGroup())
    attention.core_attention.takes_context_group = False
    given, padded, _ = row_of(2)
    mine = [x[local_places(padded, 2, 0)] for x in given]
    with pytest.raises(ConfigurationError, match=r"Recorder was given the part .* 2 ranks share"):
        rotated(attention, rotary, mine, description_of(LocalGroup(2, 0)))
    given, padded, _ = row_of(1)
    rotated(attention, rotary, given, description_of(LocalGroup(1, 0)))
