"""Which buckets share a call, on the models and strategies for which this was made."""

from itertools import accumulate

import pytest

from benchmarks.inputs import llama_shape
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.amounts import LayoutAmounts, StrategyAmounts
from megatron.hydraulis.transfer.calls import Calls, call_amounts, calls_of
from megatron.hydraulis.transfer.canonical import CanonicalLayout, Unit, model_parameters
from megatron.hydraulis.transfer.collective import Collective, collective_of
from megatron.hydraulis.transfer.role import roles_of

M8 = llama_shape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
)
M32 = llama_shape(
    num_layers=64,
    hidden_size=5120,
    ffn_hidden_size=27648,
    num_attention_heads=40,
    num_query_groups=8,
    vocab_size=151936,
)


class Planned:
    """The calls of a strategy, nodes of 8."""

    def __init__(self, shape: ModelShape, text: str, num_ranks: int, num_atoms: int) -> None:
        self.strategy = Strategy.parse(text, num_ranks, ranks_per_node=8)
        self.layout = CanonicalLayout.build(
            model_parameters(shape), num_atoms=num_atoms, num_ranks=num_ranks
        )
        roles = roles_of(self.strategy, shape.num_layers, shape.tied_embeddings)
        self.amounts = StrategyAmounts(LayoutAmounts(self.layout, 8), roles)
        self.kind = collective_of(self.amounts)
        self.calls = calls_of(self.kind, self.amounts, self.strategy)
        self.rising: Calls = tuple((bucket.index,) for bucket in self.layout.buckets)

    def times(self, calls: Calls) -> list[int]:
        """Elements of the busiest rank, one across nodes counted as ten."""
        found = []
        for call in calls:
            gather, _ = call_amounts(self.kind, self.amounts, call)
            inside = max(gather.received_inside.max(), gather.sent_inside.max())
            across = 10 * max(gather.received_across.max(), gather.sent_across.max())
            is_sum = self.kind is Collective.TWO_STEP
            found.append(int(inside + across if is_sum else max(inside, across)))
        return found

    def bytes_of_busiest(self, calls: Calls) -> int:
        """Sum over the calls of gathers in bf16 and scatters in fp32."""
        total = 0
        for call in calls:
            for each, size in zip(call_amounts(self.kind, self.amounts, call), (2, 4), strict=True):
                total += size * int(max(each.received.max(), each.sent.max()))
        return total


@pytest.mark.parametrize(
    ("shape", "text", "num_ranks", "num_atoms", "least"),
    [
        (M8, "2*pp4", 8, 1, 3.0),
        (M8, "8*tp4pp2", 64, 4, 1.8),
        (M32, "8*tp4pp2", 64, 4, 1.8),
        (M8, "pp4+tp4", 8, 4, 3.0),
        # Sections of two stages, so that tp8 does not wait for four layers.
        (M8, "tp4pp4+2*tp8", 32, 8, 1.8),
    ],
)
def test_sets_send_fewer_bytes_through_the_busiest_rank_and_delay_no_bucket(
    shape: ModelShape, text: str, num_ranks: int, num_atoms: int, least: float
) -> None:
    planned = Planned(shape, text, num_ranks, num_atoms)
    calls, rising = planned.calls, planned.rising
    assert sorted(bucket for call in calls for bucket in call) == [b for (b,) in rising]
    assert planned.bytes_of_busiest(rising) >= least * planned.bytes_of_busiest(calls)
    arrivals = dict(zip(rising, accumulate(planned.times(rising)), strict=True))
    times = planned.times(calls)
    for call, end in zip(calls, accumulate(times), strict=True):
        assert all(end <= arrivals[bucket,] + 2 * max(times) for bucket in call)


@pytest.mark.parametrize(
    ("shape", "text", "num_ranks", "num_atoms"),
    [
        (M8, "8*tp1", 8, 1),
        (M8, "tp4+4*tp1", 8, 4),
        # Most ranks hold every layer, so that a set would only delay what they need first.
        (M8, "tp8pp3+10*tp4", 64, 8),
        (M32, "tp8pp3+10*tp4", 64, 8),
        (M8, "pp4+4*tp1", 8, 1),
    ],
)
def test_buckets_travel_alone_without_pipelines_and_where_sets_save_nothing(
    shape: ModelShape, text: str, num_ranks: int, num_atoms: int
) -> None:
    planned = Planned(shape, text, num_ranks, num_atoms)
    assert planned.calls == planned.rising


def test_a_set_has_about_a_layer_of_every_stage() -> None:
    planned = Planned(M8, "2*pp4", 8, 1)
    units = [[planned.layout.buckets[b].unit for b in call] for call in planned.calls]
    # Embedding and output are cut into 14 parts each, together as large as 2.4 layers.
    assert [of_call.count(Unit.embedding()) for of_call in units] == [6, 6, 2, *[0] * 8]
    assert [of_call.count(Unit.output()) for of_call in units] == [*[0] * 8, 6, 6, 2]
    assert [{unit.order for unit in of_call if unit.is_layer} for of_call in units] == [
        {8, 16, 24},
        {9, 17, 25},
        *({layer, layer + 10, layer + 18, layer + 26} for layer in range(6)),
        {6},
        {7},
        set(),
    ]
