"""Weights that cp ranks share: their memory by hand, their messages, and what hides these."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.propose import SIZES
from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, device_constants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.kernels import Operation
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.cost_model.overlap import shared_weights_s
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, NO_RECOMPUTE, Recompute
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.proposal.propose import ProposalRequest
from megatron.hydraulis.proposal.verdict import Setting, best_baseline
from megatron.hydraulis.simulator.ways import FIXED_ROWS, PACKING, Ways
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme
from tests.support.planning import LLAMA_7B
from tests.unit.test_model_shape import QWEN3_30B_A3B

H100 = device_constants("h100-80")
LLAMA_8B = SIZES["8B"]


def scheme(text: str) -> Scheme:
    return parse_scheme(text, label="test")


def model(shape: ModelShape = LLAMA_8B, num_ranks: int = 8, **settings: Any) -> AnalyticCostModel:
    return AnalyticCostModel(
        shape=shape, device=H100, cluster=H100.cluster(num_ranks, 8), **settings
    )


def memory(shape: ModelShape = LLAMA_8B, **settings: Any) -> MemoryModel:
    return MemoryModel(shape=shape, device=H100, num_ranks=8, ranks_per_node=8, **settings)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 40])
def test_a_share_of_the_model_and_slots_by_hand(prefetch: int) -> None:
    embedding, hidden = LLAMA_8B.num_embedding_parameters, LLAMA_8B.hidden_size
    layer = LLAMA_8B.num_parameters_per_layer
    assert LLAMA_8B.num_parameters == 32 * layer + 2 * embedding + hidden
    weights = min(1 + prefetch, 32) * layer + 2 * embedding + hidden
    # Embedding and output layer take turns; what is received is the share of the largest.
    gradients = 2 * layer + embedding + hidden + embedding / 8
    share = LLAMA_8B.num_parameters / 8
    expected = 2 * (share + weights) + 4 * (share + gradients)
    of_role = memory(fs_prefetch=prefetch).role_bytes(scheme("cp8fs"), 0)
    assert of_role == pytest.approx(expected)
    assert memory(fs_prefetch=prefetch).role_bytes(scheme("cp2fs8"), 0) == of_role
    without = memory(fs_prefetch=prefetch, has_optimizer=False).role_bytes(scheme("cp8fs"), 0)
    assert without == pytest.approx(2 * (share + weights))
    of_bf16 = memory(fs_prefetch=prefetch, gradient_bytes=2).role_bytes(scheme("cp8fs"), 0)
    assert of_bf16 - of_role == pytest.approx((2 * 2 * embedding) - 4 * embedding / 8)


def test_experts_are_shared_like_other_weights() -> None:
    shape = QWEN3_30B_A3B
    of_role = memory(shape, fs_prefetch=0, has_optimizer=False).role_bytes(scheme("cp8fs"), 0)
    slots = shape.num_parameters_per_layer + 2 * shape.num_embedding_parameters + shape.hidden_size
    assert of_role == pytest.approx(2 * (shape.num_parameters / 8 + slots))


@pytest.mark.parametrize(
    ("text", "ep", "num_holders"), [("cp8fsep2", 2, 4), ("cp2fs8ep4", 4, 2), ("cp8fsep8", 8, 1)]
)
def test_whole_experts_are_shared_by_the_ranks_that_hold_them(
    text: str, ep: int, num_holders: int
) -> None:
    shape = QWEN3_30B_A3B
    of_role = memory(shape, fs_prefetch=0, has_optimizer=False).role_bytes(scheme(text), 0)
    routed = shape.num_routed_entries
    of_experts = shape.num_layers * routed
    kept = (shape.num_parameters - of_experts) / 8 + of_experts / ep / num_holders
    slots = shape.num_parameters_per_layer - routed + (routed / ep if num_holders > 1 else 0)
    slots += 2 * shape.num_embedding_parameters + shape.hidden_size
    assert of_role == pytest.approx(2 * (kept + slots))


def test_limits_of_an_8b_model_on_eight_gpus() -> None:
    plain, shared = memory().max_tokens(scheme("cp8")), memory().max_tokens(scheme("cp8fs"))
    assert plain < 12_000
    assert shared >= 60_000
    # Groups of a wave hold as many tokens a rank.
    assert [memory().max_tokens(scheme(each)) for each in ("cp4fs8", "fs8")] == [
        shared // 2,
        pytest.approx(shared // 8, rel=0.001),
    ]


def test_regrouping_moves_a_share() -> None:
    def footprint(text: str) -> PoolFootprint:
        return PoolFootprint.of(Pool.of(Strategy.parse(text, 8)), LLAMA_8B)

    whole, shared = footprint("tp2cp4"), footprint("tp2cp4fs")
    for share in ("share_as_owner", "share_as_role"):
        assert getattr(shared, share) == pytest.approx(getattr(whole, share) / 4)


def test_messages_of_a_micro_batch_by_hand() -> None:
    of_8 = model(LLAMA_7B)
    forward, backward = shared_weights_s(of_8, scheme("cp8fs"))
    layer, embedding = LLAMA_7B.num_parameters_per_layer, LLAMA_7B.num_embedding_parameters

    def seconds(operation: Operation, num_bytes: float) -> float:
        assert H100.kernels is not None
        return H100.kernels.collective_s(of_8.rates, operation, 8, num_bytes)

    gather, scatter = seconds("all_gather", 2 * layer), seconds("reduce_scatter", 4 * layer)
    embedding_back = seconds("reduce_scatter", 4 * embedding)
    assert forward == pytest.approx(30 * gather + scatter + embedding_back)
    assert backward == pytest.approx(30 * gather + 31 * scatter + embedding_back)
    lora = Lora.resolve(16, 32, ("all-linear", "lm_head"), LLAMA_7B)
    adapters = 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    gather_adapted = seconds("all_gather", 2 * (layer + adapters))
    scatter_adapters = seconds("reduce_scatter", 4 * adapters)
    adapted_forward, adapted_backward = shared_weights_s(
        replace(of_8, frozen=Frozen.around(lora, of_8.shape)), scheme("cp8fs")
    )
    assert adapted_forward == pytest.approx(30 * gather_adapted + scatter_adapters)
    of_output = seconds("reduce_scatter", 4 * 16 * (4096 + LLAMA_7B.vocab_size))
    assert adapted_backward == pytest.approx(
        30 * gather_adapted + 31 * scatter_adapters + of_output
    )
    in_bf16 = shared_weights_s(replace(of_8, gradient_bytes=2), scheme("cp8fs"))
    assert sum(in_bf16) == pytest.approx((60 + 32) * gather + embedding_back, rel=0.01)


@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_what_no_micro_batch_hides_counts_once_an_iteration(gradient_bytes: int) -> None:
    of_8 = model(LLAMA_7B, gradient_bytes=gradient_bytes)
    costs = of_8.regroup_costs((1,))
    first, second, *_ = costs.times(Strategy.parse("cp8fs", 8)).calls
    layer, embedding = LLAMA_7B.num_parameters_per_layer, LLAMA_7B.num_embedding_parameters
    bytes_per_s = of_8.cluster.intra_node.bytes_per_s * H100.link_fraction
    ends_ms = 1e3 * 7 / 8 * (layer + embedding) * (2 + gradient_bytes) / bytes_per_s
    assert first.units == second.units  # parts of the embedding
    assert first.scatter_ms - second.scatter_ms == pytest.approx(ends_ms, rel=0.01)
    unshared = costs.times(Strategy.parse("cp8", 8)).calls
    assert unshared[0].scatter_ms == unshared[1].scatter_ms


@pytest.mark.parametrize(("text", "ep"), [("cp8fsep2", 2), ("cp8fsep4", 4), ("cp8fsep8", 8)])
def test_messages_of_whole_experts_by_hand(text: str, ep: int) -> None:
    shape, rates = QWEN3_30B_A3B, model(QWEN3_30B_A3B).rates

    def seconds(operation: Operation, num_ranks: int, num_bytes: float) -> float:
        assert H100.kernels is not None
        return H100.kernels.collective_s(rates, operation, num_ranks, num_bytes)

    def layer_s(operation: Operation, entry_bytes: int) -> float:
        others = shape.num_parameters_per_layer - shape.num_routed_entries
        routed_bytes = entry_bytes * shape.num_routed_entries / ep
        of_experts_s = 0.0 if ep == 8 else seconds(operation, 8 // ep, routed_bytes)
        return seconds(operation, 8, entry_bytes * others) + of_experts_s

    forward_s, _ = shared_weights_s(model(shape), scheme(text))
    embedding_s = seconds("reduce_scatter", 8, 4 * shape.num_embedding_parameters)
    num_gathered = shape.num_layers - 2
    expected_s = num_gathered * layer_s("all_gather", 2) + layer_s("reduce_scatter", 4)
    assert forward_s == pytest.approx(expected_s + embedding_s)


def test_columns_of_several_nodes_share_the_network_of_all_their_ranks() -> None:
    across = model(num_ranks=64)
    inside_s, wide_s, of_tp_s = (
        shared_weights_s(across, scheme(each))[0] for each in ("cp8fs", "cp64fs", "tp8cp8fs")
    )
    assert inside_s < wide_s
    # Eight groups share a node's links: each has an eighth of them, for an eighth of the weights.
    assert of_tp_s == pytest.approx(wide_s, rel=0.15)


@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, EVERY_LAYER], ids=["kept", "recomputed"])
@pytest.mark.parametrize("text", ["cp8fs", "tp2cp4fs", "cp2fs8"])
def test_a_pass_takes_the_longer_of_compute_and_messages(text: str, recompute: Recompute) -> None:
    shared = model(cp_comm_type="auto", recompute=recompute)
    whole = shared.coefficients(replace(scheme(text), fs=1))
    times = shared.coefficients(scheme(text))
    assert whole.others == ()
    assert len(times.forms) == 4
    all_ms = 1e3 * sum(shared_weights_s(shared, scheme(text)))
    # Much compute hides all of them; little is hidden by them.
    assert times.time_ms([65536]) == pytest.approx(whole.time_ms([65536]))
    assert times.time_ms([8]) == pytest.approx(all_ms, rel=0.2)  # with those of tp
    assert max(form.c_ms for form in times.forms) < all_ms + whole.c_ms
    shared = replace(shared, fs_prefetch=0)
    all_ms = 1e3 * sum(shared_weights_s(shared, scheme(text)))
    at_once = shared.coefficients(scheme(text))
    assert at_once.others == ()
    assert at_once.time_ms([4096]) == pytest.approx(whole.time_ms([4096]) + all_ms)


def test_a_ring_and_weights_hide_in_every_combination() -> None:
    shared = model(has_te_attention=True, has_te_layers=True, cp_comm_type="p2p")
    ring, times = (shared.coefficients(scheme(each)) for each in ("cp8", "cp8fs"))
    messages_ms = 1e3 * sum(shared_weights_s(shared, scheme("cp8fs")))
    for length, number in itertools.product((256, 1024, 4096, 16384, 65536), (1, 4, 16)):
        lengths = [length] * number
        least = ring.time_ms(lengths)
        assert least - 1e-9 <= times.time_ms(lengths) <= least + messages_ms
    assert len(times.forms) == 9


def test_shared_weights_are_offered_where_they_save_memory() -> None:
    rows = {str(row.scheme): row.max_tokens for row in estimated_profile(model()).schemes}
    assert {"cp8fs", "cp4fs8", "cp2fs8", "fs8", "tp2cp4fs", "tp2fs4"} <= set(rows)
    # Over four tp ranks weights take a tenth of the memory.
    assert "tp4cp2" in rows
    assert "tp4cp2fs" not in rows
    schemes = Candidates.of(estimated_profile(model()), 8, 8).schemes
    assert {"cp8~fs", "cp8fs"} <= {str(each) for each in schemes}


def test_shared_weights_are_offered_with_whole_experts() -> None:
    profile = estimated_profile(model(QWEN3_30B_A3B, num_ranks=32))
    schemes = {str(scheme) for scheme in Candidates.of(profile, 32, 8).schemes}
    assert {"cp32~fsep8", "tp2cp16~fsep8"} <= schemes


def test_lanes_of_fully_sharded_data_parallelism_are_compared() -> None:
    """Groups of one width that share weights with others are what Megatron's FSDP trains; only
    groups that change from micro-batch to micro-batch are not."""
    of_8b = model()
    pool = Pool.of(Strategy.parse("cp8~fs", 8))
    costs = JobCosts(profile=estimated_profile(of_8b), model=None)
    ways = Ways(batches=[[2048, *[500] * 60]], pool=pool, costs=costs)
    lanes = {(str(each.strategy), str(each.scheme)) for each in ways.layouts()}
    assert {("cp8~fs", "cp2fs8"), ("cp8~fs", "fs8"), ("cp8fs", "cp8fs")} <= lanes
    assert ("cp8~fs", "cp8fs") not in lanes
    static = {str(strategy) for strategy in ways.static()}
    assert "cp8fs" in static
    assert "cp8~fs" not in static
    for candidate in ways.candidates(FIXED_ROWS):
        (work,) = candidate.works()
        assert candidate.least_ms <= work.makespan_ms(ways.simulated) * (1 + 1e-9)
    request = ProposalRequest(
        corpus=LengthCounts.of([500, 2048], [600, 1]),
        sizes=BatchSizes.constant(num_sequences=600),
        num_ranks=8,
        ranks_per_node=8,
        num_batches=2,
    )
    best = best_baseline(request, [Setting(costs=costs)], pool)
    assert best is not None
    assert (best.way, str(best.strategy)) == (PACKING, "cp8~fs")


def test_rows_of_shared_weights_follow_from_others_if_the_model_is_known() -> None:
    estimated = estimated_profile(model(), [scheme("tp1"), scheme("cp8")], keeps_all=True)
    slower = replace(
        estimated,
        schemes=tuple(
            replace(row, coefficients=row.coefficients.scaled(a=1.2, b=1.3, c=1.1))
            for row in estimated.schemes
        ),
    )
    groups = scheme("cp8~fs").group_schemes
    costs = JobCosts.of(slower, model()).with_rows(groups)
    for group in groups:
        row = costs.profile.find(group)
        assert row is not None
        assert row.is_assumed
        assert row.max_tokens == model().max_tokens(group)
        expected = model().coefficients(group).scaled(a=1.2, b=1.3, c=1.1)
        assert row.coefficients.time_ms([4096]) == pytest.approx(expected.time_ms([4096]))
    with pytest.raises(StrategyError, match="measure cp8fs,"):
        JobCosts(profile=slower).coefficients(scheme("cp8fs"))
    # Others never follow from shared weights.
    shared = estimated_profile(model(), [scheme("cp8fs")])
    with pytest.raises(StrategyError, match="cp8"):
        JobCosts.of(shared, model()).coefficients(scheme("cp8"))
