"""What experts cost by scheme: weights, exchange, launches, the load of the busiest rank."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model import ProfileCostModel
from megatron.hydraulis.cost_model.analytic import KERNELS, AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile, possible_schemes
from megatron.hydraulis.cost_model.host import LOCAL_LAYERS
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.trained_model import NO_RECOMPUTE, SAFE_EXPERT_LOAD, Recompute
from megatron.hydraulis.frozen import StageLayers
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.simulator.ways import FIXED_ROWS, MEGATRON_CP, PACKING, Ways
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme
from tests.support.planning import LLAMA_7B
from tests.unit.cost_model.test_layout_commands import EXPERTS
from tests.unit.cost_model.test_layout_commands import QWEN3_30B_A3B as FLAGS_WITHOUT_EXPERTS
from tests.unit.test_model_shape import DEEPSEEK_V3, QWEN3_30B_A3B

_H100 = device_constants("h100-80g")
_DEVICE = replace(_H100, kernels=None, matmul_fraction=0.7, attention_fraction=0.5)
"""By its data sheet."""
_MODEL = AnalyticCostModel(shape=QWEN3_30B_A3B, device=_DEVICE, cluster=_DEVICE.cluster(64, 8))
_ON_16 = replace(_MODEL, cluster=_DEVICE.cluster(16, 8))
FLAGS = (*FLAGS_WITHOUT_EXPERTS, *EXPERTS)
_ROUTED = 128 * 3 * 2048 * 768
"""Entries of a layer's experts."""


def _terms(text: str) -> dict[str, float]:
    """Seconds of every token of the row in the forward of a layer, and of a micro-batch."""
    terms = _MODEL.forward_terms(parse_scheme(text, label="test"))
    constants = {f"{cause}, constant": term.constant_s for cause, term in terms.items()}
    return {cause: term.per_token_s for cause, term in terms.items()} | constants


def test_ranks_hold_whole_experts_or_a_part_of_each() -> None:
    whole = 2048 * (128 + 2)  # router and norms on every rank
    others = QWEN3_30B_A3B.num_parameters_of_layers(1) - _ROUTED - whole
    for text, expected in (
        ("tp4", (others + _ROUTED) / 4),
        ("tp4ep4", (others + _ROUTED) / 4),
        ("cp8ep8", others + _ROUTED / 8),
        ("tp2cp4ep8", others / 2 + _ROUTED / 8),
    ):
        scheme = parse_scheme(text, label="test")
        assert _MODEL.num_layer_parameters(scheme, 1) == whole + expected


def test_the_exchange_moves_a_copy_for_each_expert_of_another_rank() -> None:
    assert _terms("tp8")["expert_parallel"] == 0.0
    num_bytes = 2 * 8 * 7 / 8 * 2048 * 2 / 8  # there and back, experts, ranks, size, ranks
    bandwidth = _DEVICE.intra_node.bytes_per_s * _DEVICE.link_fraction
    load = _MODEL.rank_load(parse_scheme("cp8ep8", label="test"))
    assert _terms("cp8ep8")["expert_parallel"] == pytest.approx(load * num_bytes / bandwidth)
    # Of 15 other ranks, 8 are in another node.
    assert _terms("tp8cp2ep16")["expert_parallel"] > 2 * _terms("cp8ep8")["expert_parallel"]
    # Whole experts take the tokens of their own tp rank.
    assert _terms("tp8ep8")["tensor_parallel"] == _terms("tp8")["tensor_parallel"] / 2


def test_a_measured_all_to_all_takes_longer_than_its_bytes() -> None:
    measured = replace(_MODEL, device=_H100)
    for text in ("ep8", "cp8ep8", "tp2cp4ep8"):
        scheme = parse_scheme(text, label="test")
        exchanges = [each.forward_terms(scheme)["expert_parallel"] for each in (_MODEL, measured)]
        by_bytes, found = (each.seconds(0.0, scheme.cp * 4096) for each in exchanges)
        assert 1.05 < found / by_bytes < 1.5


def test_products_of_small_experts_fill_tiles_if_they_are_grouped() -> None:
    one_by_one, grouped, dense = (
        replace(_MODEL, device=device, groups_experts=groups, shape=shape)
        .forward_terms(parse_scheme("ep8" if shape.num_experts else "tp1", label="test"))["matmul"]
        .seconds(0.0, 4096)
        / shape.num_matrix_parameters_per_layer
        for device, groups, shape in (
            (_H100, False, QWEN3_30B_A3B),
            (_H100, True, QWEN3_30B_A3B),
            (_H100, False, LLAMA_7B),
        )
    )
    assert one_by_one > 1.05 * grouped > dense


def test_ranks_wait_for_the_one_whose_experts_have_most_tokens() -> None:
    loads = [
        replace(_MODEL, expert_load=3.0).rank_load(parse_scheme(text, label="test"))
        for text in ("tp8", "cp2ep2", "cp8ep8", "cp8ep128")
    ]
    assert loads == [1.0, 1.25, 1.5, 3.0]
    assert _terms("cp8ep8")["matmul"] > _terms("cp8")["matmul"]
    even = replace(_MODEL, expert_load=1.0).forward_terms(parse_scheme("cp8ep8", label="test"))
    assert even["matmul"].per_token_s == pytest.approx(_terms("cp8")["matmul"])


def test_a_rank_launches_the_kernels_of_its_experts_alone() -> None:
    of_tp, own = LOCAL_LAYERS.dense.num_launches, LOCAL_LAYERS.expert.num_launches
    others = of_tp + LOCAL_LAYERS.tensor_parallel.num_launches + LOCAL_LAYERS.experts.num_launches
    of_some, of_all = _terms("cp8ep8"), _terms("tp8")
    ratio = of_some["launch, constant"] / of_all["launch, constant"]
    assert ratio == pytest.approx((others + 16 * own) / (others + 128 * own))


def test_whole_experts_leave_room_for_more_tokens() -> None:
    """A tp rank has copies of its own tokens, not of those of all tp ranks."""
    whole, cut = (_MODEL.max_tokens(parse_scheme(text, label="test")) for text in ("tp8ep8", "tp8"))
    assert whole > 2 * cut > 0


def test_schemes_of_a_model_with_experts_have_every_ep() -> None:
    found = {str(scheme) for scheme in possible_schemes(_ON_16)}
    assert {"tp4", "tp4ep2", "tp4ep4", "tp2cp4ep8", "cp16ep16"} <= found
    assert {"tp4ep8", "ep2"} <= found  # groups of tp4cp2~ep8 and cp2~ep2
    assert not {"ep32", "tp4ep16pp2"} & found


def test_expert_parallelism_over_data_parallel_ranks_is_offered_and_compared() -> None:
    profile = estimated_profile(_ON_16)
    batches = [[2048, *[500] * 60], [1024, *[300] * 100]]
    every = {str(scheme) for scheme in Candidates.of(profile, 16, 8).schemes}
    assert {"cp8~ep8", "cp8~ep8pp2", "tp2cp4~ep8"} <= every
    offered = Candidates.of(profile, 16, 8, batches=batches)
    found = [scheme for scheme in offered.schemes if scheme.splits_cp and scheme.ep > 1]
    assert 2 <= len(found) <= 8
    assert any(scheme.num_ranks == 16 for scheme in found)
    assert len(set(offered.schemes)) == len(offered.schemes)
    mix = offered.filled((0,) * len(offered.schemes), (offered.schemes.index(found[0]),))
    assert offered.is_static(mix) == (not found[0].shares_weights)
    pool = Pool.of(Strategy.parse("tp2cp4ep8pp2", 16, ranks_per_node=8))
    ways = Ways(batches=batches, pool=pool, costs=JobCosts(profile=profile, model=None))
    static = set(map(str, ways.static()))
    assert {"2*cp8~ep8", "cp8~ep8pp2", "cp16~ep8"} <= static
    # Of each tp, ep and pp the narrowest that holds the longest sequence, and all ranks.
    assert {"2*cp4~ep4pp2", "cp8~ep4pp2"} <= static
    split = (strategy.schemes[0] for strategy in ways.static() if "~" in str(strategy))
    assert set(Counter(scheme.of_context_group(1) for scheme in split).values()) == {1, 2}
    lanes = {
        (str(layout.strategy), layout.scheme.cp)
        for layout in ways.layouts()
        if layout.strategy.schemes[0].splits_cp
    }
    assert {("2*cp8~ep8", 4), ("2*tp2cp4~ep8", 2)} <= lanes
    assert ("2*cp8~ep8", 8) not in lanes  # cp8ep8 itself
    costs = ways.simulated
    for way in (FIXED_ROWS, PACKING, MEGATRON_CP):
        splits = 0
        for candidate in ways.candidates(way):
            for work, batch in zip(candidate.works(), batches, strict=True):
                rows = [row for rows in work.replicas for row in rows]
                assert sorted(s for row in rows for s in row.segments) == sorted(batch)
                scheme = work.strategy.schemes[0]
                for row in rows if scheme.splits_cp and scheme.ep > 1 else ():
                    splits += 1
                    assert sum(cp for cp, _, _ in row.groups) == scheme.cp
                    for cp, num_tokens, segments in row.groups:
                        assert sum(segments) <= num_tokens
                        assert num_tokens <= costs.max_tokens(scheme.of_context_group(cp))
                        assert way != FIXED_ROWS or num_tokens % ways.limit == 0
        assert splits


def test_narrow_groups_of_a_wave_have_rows_but_no_replicas(tmp_path: Path) -> None:
    """A group of tp2cp2~ep4 may have 2 ranks, fewer than share the experts."""
    profile_path = tmp_path / "profile.json"
    typed = [*FLAGS, "--device", "h200", "--num-ranks", "8", "--out", str(profile_path)]
    assert main(["estimate", *typed, "--schemes", "tp2cp2~ep4pp2", "tp4ep4pp2"]) == 0
    profile = ProfileCostModel.read(profile_path)
    whole, narrow = Scheme(4, pp=2, ep=4), Scheme(2, pp=2, ep=4)
    assert {whole, narrow} <= {row.scheme for row in profile.schemes}
    assert narrow not in Candidates.of(profile, 8, 8).schemes


def test_recomputing_mlps_frees_nothing_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training, which says the same of the flag."""
    flags = [*FLAGS, "--device", "h100-80g", "--num-ranks", "64", "--schemes", "tp4cp2ep8"]
    selective = ["--recompute-granularity", "selective", "--recompute-modules"]
    rows = {}
    for modules in ([], ["core_attn"], ["mlp"], ["core_attn", "mlp"]):
        path = tmp_path / "profile.json"
        asked = [*selective, *modules] if modules else []
        assert main(["estimate", *flags, *asked, "--out", str(path)]) == 0
        rows[" ".join(modules)] = ProfileCostModel.read(path).schemes
        note = "--recompute-modules mlp: its activations are kept, which takes more memory, as "
        assert (note in capsys.readouterr().err) == ("mlp" in modules)
    assert rows["mlp"] == rows[""] != rows["core_attn"] == rows["core_attn mlp"]


def test_norms_and_activations_of_experts_are_recomputed_with_transformer_engine() -> None:
    again = Recompute(granularity="selective", modules=("layernorm", "moe_act"))
    scheme = Scheme(cp=8, ep=8)
    local = replace(_MODEL, recompute=again)
    assert local.recompute == NO_RECOMPUTE
    plain = replace(_MODEL, has_te_layers=True, groups_experts=True)
    less = replace(plain, recompute=again)
    assert less.max_tokens(scheme) > plain.max_tokens(scheme)
    seconds = (each.terms_by_stage(scheme)[0]["recompute"].per_token_s for each in (plain, less))
    # A norm before the experts, and of their 8 gated activations the passes of the MLP's.
    rows = 2 * 2048 + KERNELS.ffn_passes * 8 * 768
    expected = 48 * rows * 2 / 8 / _DEVICE.memory_bytes_per_s
    assert list(seconds) == pytest.approx([0.0, expected])
    # What is kept is less by the norm's output and the input of the experts' second product.
    kept = [each.memory.activation_bytes(scheme, 0, 8) for each in (plain, less)]
    load = plain.memory.rank_load(scheme)
    assert kept[0] - kept[1] == pytest.approx(48 * 2 * (2048 + load * 8 * 768))


def test_limits_allow_for_loads_that_random_tokens_do_not_have() -> None:
    limits = {
        load: replace(_MODEL, expert_load=load).max_tokens(Scheme(cp=8, ep=8))
        for load in (1.0, SAFE_EXPERT_LOAD, 4.0)
    }
    assert limits[1.0] == limits[SAFE_EXPERT_LOAD] > limits[4.0] > 0


def test_copies_for_experts_move_through_memory() -> None:
    """Copied, joined and added up: 7 hidden states for each of 8 experts. Whole experts have the
    copies of other ranks' tokens, too, which are sorted twice."""
    s_per_state = 2048 * 2 / _DEVICE.memory_bytes_per_s
    for text in ("tp1", "tp8"):  # every tp rank works for all tokens
        assert _terms(text)["expert_copies"] == pytest.approx(7 * 8 * s_per_state)
    assert _terms("tp2cp4")["expert_copies"] == pytest.approx(7 * 8 * s_per_state / 4)
    load = _MODEL.rank_load(Scheme(4, 2, ep=8))
    expected = (5 + 6 * load) * 8 / 4 / 2 * s_per_state
    assert _terms("tp4cp2ep8")["expert_copies"] == pytest.approx(expected)
    stage = _MODEL.stage_terms(Scheme(4), StageLayers(3), is_last=False)
    assert stage["expert_copies"].per_token_s == pytest.approx(3 * 2 * 7 * 8 * s_per_state)
    half = replace(QWEN3_30B_A3B, num_expert_layers=QWEN3_30B_A3B.num_layers // 2)
    mixed = replace(_MODEL, shape=half).forward_terms(Scheme(8))
    assert mixed["expert_copies"].per_token_s == pytest.approx(7 * 4 * s_per_state)


@pytest.mark.parametrize("q_lora_rank", [1536, 0])
def test_latent_attention_gathers_latents(q_lora_rank: int) -> None:
    """Both latents and the rotated channels of keys; hidden states if no latent makes queries."""
    shape = replace(DEEPSEEK_V3, q_lora_rank=q_lora_rank)
    model = replace(_MODEL, shape=shape)
    spread = model.forward_terms(Scheme(8))["tensor_parallel"]
    whole = replace(model, sequence_parallel=False).forward_terms(Scheme(8))["tensor_parallel"]
    num_states = 3 + ((q_lora_rank or 7168) + 512 + 64) / 7168
    assert spread.per_token_s == pytest.approx(whole.per_token_s * num_states / 4)
    assert spread.constant_s == pytest.approx(whole.constant_s * 6 / 4)
