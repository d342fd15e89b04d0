"""The memory model: limits near published ones, and their dependence on parameters."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model import MemoryModel, ModelShape, Recompute, device_constants
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.staging import PoolFootprint, num_communicators
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.transfer.amounts import LayoutAmounts, StrategyAmounts
from megatron.hydraulis.transfer.calls import calls_of
from megatron.hydraulis.transfer.canonical import CanonicalLayout, model_parameters
from megatron.hydraulis.transfer.collective import Collective, bucket_plans, collective_of
from megatron.hydraulis.transfer.plan import TransferPlan, TwoStepPlan
from megatron.hydraulis.transfer.role import roles_of
from tests.support.planning import LLAMA_7B, LLAMA_32B


def memory(shape: ModelShape = LLAMA_7B, num_ranks: int = 64) -> MemoryModel:
    return MemoryModel(
        shape=shape,
        device=device_constants("a800-80"),
        num_ranks=num_ranks,
    )


# Limits that the authors of arXiv 2412.07894 computed for LLAMA_32B on 64 A800-80G (their file
# generate_strategy_32b.py, 2024), by another formula with another reserve.
@pytest.mark.parametrize(
    ("scheme", "published"),
    [
        (Scheme(tp=4, pp=2), 12416),
        (Scheme(tp=4, pp=4), 14592),
        (Scheme(tp=8), 21888),
        (Scheme(tp=8, pp=2), 25856),
    ],
    ids=str,
)
def test_near_published_limits(scheme: Scheme, published: int) -> None:
    assert memory(LLAMA_32B).max_tokens(scheme) == pytest.approx(published, rel=0.2)


def test_what_raises_the_limit() -> None:
    base = memory().max_tokens(Scheme(tp=2))
    assert base > memory(LLAMA_32B).max_tokens(Scheme()) == 0
    assert memory().max_tokens(Scheme(tp=4)) > base
    assert memory(num_ranks=512).max_tokens(Scheme(tp=2)) > base
    assert replace(memory(), recompute=EVERY_LAYER).max_tokens(Scheme(tp=2)) > base
    assert replace(memory(), has_optimizer=False).max_tokens(Scheme(tp=2)) > base
    assert replace(memory(), sequence_parallel=False).max_tokens(Scheme(tp=2)) < base
    # Tokens are spread over the cp ranks; weights and the table of rotary angles are not, and one
    # layer's keys and values meet.
    assert 1.998 * base < memory().max_tokens(Scheme(tp=2, cp=2)) <= 2 * base
    assert 7.5 * base < memory().max_tokens(Scheme(tp=2, cp=8)) < 8 * base


def test_what_variants_of_layers_keep_lowers_the_limit() -> None:
    base = memory().max_tokens(Scheme(tp=2))
    assert replace(memory(), num_gate_tensors=7).max_tokens(Scheme(tp=2)) < 0.8 * base
    gated = replace(LLAMA_7B, output_gate=True)
    assert memory(gated).max_tokens(Scheme(tp=2)) < 0.9 * base
    off_by_one = replace(memory(), softmax_type="off-by-one").max_tokens(Scheme(tp=2))
    learnable = replace(memory(), softmax_type="learnable").max_tokens(Scheme(tp=2))
    assert learnable < off_by_one < 0.98 * base
    assert replace(memory(), has_wide_norms=True).max_tokens(Scheme(tp=2)) < 0.98 * base
    windowed = replace(LLAMA_7B, num_windowed_layers=16, window_tokens=1024)
    assert memory(windowed).max_tokens(Scheme(tp=2)) == base


def per_token(model: MemoryModel, scheme: Scheme, stage: int = 0) -> dict[str, float]:
    return {moment.name: moment.bytes_per_token for moment in model.moments(scheme, stage)}


def test_keys_and_values_of_the_row_by_hand() -> None:
    """In bf16, over tp 2: gathered, their gradients, and these together, for cp + 1/2 tokens."""
    found = {cp: per_token(memory(), Scheme(tp=2, cp=cp))["attention"] for cp in (4, 8, 16)}
    keys_and_values = 2 * LLAMA_7B.num_query_groups * LLAMA_7B.kv_channels * 2 / 2
    assert found[8] - found[4] == pytest.approx(3 * 4 * keys_and_values)
    assert found[16] - found[8] == pytest.approx(3 * 8 * keys_and_values)


@pytest.mark.parametrize("scheme", [Scheme(tp=2), Scheme(tp=2, cp=4), Scheme(cp=2, pp=2)], ids=str)
def test_the_limit_is_the_most_that_fits_of_whole_rows(scheme: Scheme) -> None:
    model, limit = memory(), memory().max_tokens(scheme)
    assert limit % (2 * scheme.tp * scheme.cp) == 0

    def peak_bytes(num_tokens: int) -> float:
        return max(model.peak_bytes(scheme, stage, num_tokens) for stage in range(scheme.pp))

    assert peak_bytes(limit) <= model.usable_bytes < peak_bytes(limit + 2 * scheme.tp * scheme.cp)


HIDDEN, HEADS = LLAMA_7B.hidden_size, LLAMA_7B.num_attention_heads
# Inputs and outputs of two norms, their means and deviations; queries, keys, values and output;
# an fp32 number a head; the MLP's three.
LAYER = 2 * 4 * HIDDEN + 16 + 2 * 4 * HIDDEN + 4 * HEADS + 2 * 3 * LLAMA_7B.ffn_hidden_size
# Cosines and sines of a head, token, label, position and mask.
OF_MICRO_BATCH = 2 * 2 * LLAMA_7B.kv_channels + 28
# Angles of a head in fp32.
ROTARY_TABLE = 4 * LLAMA_7B.kv_channels


def test_the_first_stage_holds_most_activations_the_last_the_logits() -> None:
    scheme = Scheme(pp=4)
    activation = 2 * HIDDEN + 4 * 2 * LLAMA_7B.ffn_hidden_size
    for stage in range(3):
        # With the output; what was received stays, with its gradient, until the next arrives.
        kept = (4 - stage) * (8 * LAYER + 2 * HIDDEN + OF_MICRO_BATCH)
        kept += 2 * 2 * HIDDEN if stage else 0
        found = per_token(memory(), scheme, stage)
        assert found["activation of the MLP"] == pytest.approx(kept + activation)
        assert "loss" not in found
    # 64 bytes of indices and sums, and the gradient of the hidden state.
    kept = 8 * LAYER + (2 + 2) * 2 * HIDDEN + OF_MICRO_BATCH + 64
    found = per_token(memory(), scheme, 3)
    assert found["loss"] == pytest.approx(kept + ROTARY_TABLE)
    assert found["output layer"] == pytest.approx(kept + 2 * HIDDEN)


def test_logits_of_a_chunk_are_alive() -> None:
    """In fp32, their gradient in bf16 too; of all tokens if there are fewer."""
    scheme, columns = Scheme(tp=2, pp=4), LLAMA_7B.vocab_size / 2
    for chunk_tokens in (1000, None):
        model = replace(memory(), loss_chunk_tokens=chunk_tokens)
        (moment,) = (each for each in model.moments(scheme, 3) if each.name == "output layer")
        tokens = chunk_tokens or 2**30 / 4 / columns
        for num_tokens in (tokens / 2, 2 * tokens):
            logits = moment.bytes_with(num_tokens) - moment.fixed_bytes
            logits -= moment.bytes_per_token * num_tokens
            assert logits == pytest.approx(6 * columns * min(num_tokens, tokens), rel=1e-3)
            fitting = moment.tokens_in(moment.bytes_with(num_tokens), 0.0)
            assert fitting == pytest.approx(num_tokens)


def test_the_output_layer_hardly_limits_a_row() -> None:
    """As many logits as of whole rows would cost a third of the tokens, with recomputation."""
    wide = replace(LLAMA_7B, vocab_size=128_256)
    chunked = replace(memory(wide), recompute=EVERY_LAYER)
    whole = replace(chunked, loss_chunk_tokens=10**9)
    small = replace(chunked, shape=replace(wide, vocab_size=256))
    limits = [model.max_tokens(Scheme(tp=2)) for model in (whole, chunked, small)]
    assert limits[0] < 0.7 * limits[1]
    assert 0.9 * limits[2] < limits[1] < limits[2]


def test_what_recompute_keeps_by_hand() -> None:
    # Stage 0 of four, 8 layers, 4 micro-batches in flight, bf16, no tensor parallelism.
    scheme, shape = Scheme(pp=4), LLAMA_7B
    hidden, mlp = 2 * HIDDEN, 2 * 3 * shape.ffn_hidden_size
    always = 4 * (hidden + OF_MICRO_BATCH) + hidden + 4 * 2 * shape.ffn_hidden_size
    table = 4 * ROTARY_TABLE
    uniform = partial(Recompute, granularity="full", method="uniform")
    cases = {
        EVERY_LAYER: table + 4 * 8 * hidden + LAYER,
        uniform(num_layers=3): table + 4 * 3 * hidden + 3 * LAYER,
        uniform(num_layers=20): table + 4 * hidden + 8 * LAYER,
        # The layers that keep everything come last, and so run backward first.
        Recompute(granularity="full", method="block", num_layers=3): (
            table + 4 * (3 * hidden + 5 * LAYER)
        ),
        Recompute(granularity="selective", modules=("mlp",)): (
            4 * 8 * (LAYER - mlp) + mlp + hidden
        ),
        # Queries, keys and values as given; no number per head.
        Recompute(granularity="selective", modules=("core_attn",)): 4 * 8 * (LAYER - 4 * HEADS),
    }
    for recompute, expected in cases.items():
        found = per_token(replace(memory(), recompute=recompute), scheme)
        assert found["activation of the MLP"] == pytest.approx(expected + always), recompute


def test_recomputed_attention_keeps_a_copy_of_grouped_queries() -> None:
    again = Recompute(granularity="selective", modules=("core_attn",))
    grouped = replace(LLAMA_7B, num_query_groups=8)
    usual = per_token(memory(grouped), Scheme())
    recomputed = per_token(replace(memory(grouped), recompute=again), Scheme())
    more = LLAMA_7B.num_layers * (2 * HIDDEN - 4 * HEADS)
    assert recomputed["loss"] - usual["loss"] == pytest.approx(more)


def test_gradients_of_keys_by_head_above_2_gib_are_added_up_in_fp32() -> None:
    grouped = memory(replace(LLAMA_7B, num_layers=4, num_query_groups=8))
    scheme = Scheme(cp=8)  # a rank attends to 8.5 tokens for each of its own
    *_, usual, many = grouped.moments(scheme, 0)
    key = grouped.shape.num_query_groups * grouped.shape.kv_channels
    assert many.bytes_per_token - usual.bytes_per_token == pytest.approx(4 * 8.5 * key)
    above = 2**31 / (2 * HIDDEN * 8.5)
    assert many.bytes_with(above) == 0.0
    assert many.bytes_with(above + 1) > usual.bytes_with(above + 1)
    assert many.tokens_in(usual.bytes_with(above), 0.0) == many.above_tokens == above
    assert above < many.tokens_in(2 * many.bytes_with(above + 1), 0.0)
    for other in (
        memory(replace(LLAMA_7B, num_layers=4)),
        replace(grouped, precision=Precision.FP32),
    ):
        assert many.name not in per_token(other, scheme)


def test_norms_of_queries_and_keys_keep_the_fused_output() -> None:
    grouped = replace(LLAMA_7B, num_query_groups=8)
    usual = per_token(memory(grouped), Scheme())
    found = per_token(replace(memory(grouped), qk_norms=True), Scheme())
    # It with a copy of the queries, but no copy of the values; two numbers a head.
    key = grouped.num_query_groups * grouped.kv_channels
    more = 2 * (2 * HIDDEN + 2 * key) - 2 * key + 2 * 4 * HEADS
    assert found["loss"] - usual["loss"] == pytest.approx(LLAMA_7B.num_layers * more)


WORKSPACES = 64 * 2**20


def test_state_of_one_rank_counts_every_parameter() -> None:
    one = memory(num_ranks=1)
    # bf16 weight, fp32 gradient, 12 bytes of canonical shard; staging is two layers in fp32, what
    # the rank sends and what it receives.
    # The shard's gradient is where gradients were sent from, save as much as the largest layer.
    expected = 18 * LLAMA_7B.num_parameters + 12 * LLAMA_7B.num_parameters_per_layer + WORKSPACES
    assert one.state_bytes(Scheme(), 0) - expected == pytest.approx(0, abs=1e-6 * expected)
    # Without an optimizer the canonical shard has the bf16 parameter alone.
    saved = expected - replace(one, has_optimizer=False).state_bytes(Scheme(), 0)
    in_shard = 8 * LLAMA_7B.num_parameters + 4 * LLAMA_7B.num_parameters_per_layer
    assert saved == pytest.approx(6 * LLAMA_7B.num_parameters + in_shard, rel=1e-5)
    more = replace(one, accumulates=True).state_bytes(Scheme(), 0) - expected
    assert more == pytest.approx(12 * LLAMA_7B.num_parameters - in_shard, rel=1e-5)


@pytest.mark.parametrize(
    ("texts", "shares"), [(["16*tp4"], 1 / 4), (["16*tp4", "8*tp8"], 3 / 8), (["8*tp8"], 1 / 8)]
)
def test_transformer_engine_has_a_workspace_and_a_tensor_of_each_shape_of_a_weight(
    texts: list[str], shares: float
) -> None:
    pool = Pool.of(*(Strategy.parse(text, 64, ranks_per_node=8) for text in texts))
    local = replace(memory(), pool=PoolFootprint.of(pool, LLAMA_7B))
    scheme = pool.strategies[0].replicas[0].scheme
    more = replace(local, has_te_layers=True).state_bytes(scheme, 0) - local.state_bytes(scheme, 0)
    matrices = 2 * LLAMA_7B.num_matrix_parameters_per_layer
    assert more == pytest.approx(WORKSPACES / 2 + 1024 + shares * matrices)


def test_transformer_engine_gathers_into_memory_that_is_freed() -> None:
    scheme, shape = Scheme(tp=8, pp=2), LLAMA_7B
    te = replace(memory(), has_te_layers=True)
    local, found = per_token(memory(), scheme), per_token(te, scheme)
    # The buffer of local layers stays.
    assert local["activation of the MLP"] - found["activation of the MLP"] == 2 * HIDDEN
    # Input and its gradient gathered, the gradient scattered; gradients of two of three tensors.
    mlp = 2 * shape.ffn_hidden_size / 8
    first, activation = found["first matrix of the MLP"], found["activation of the MLP"]
    assert first - (activation - 4 * mlp) == pytest.approx(2 * 2 * HIDDEN + 2 * HIDDEN / 8 - mlp)


def test_transformer_engine_recomputes_the_norm_with_the_mlp() -> None:
    again = replace(memory(), recompute=Recompute(granularity="selective", modules=("mlp",)))
    local = per_token(again, Scheme())["activation of the MLP"]
    found = per_token(replace(again, has_te_layers=True), Scheme())["activation of the MLP"]
    # Of all layers, but for the one whose backward runs.
    assert local - found == pytest.approx((LLAMA_7B.num_layers - 1) * 2 * HIDDEN)


def test_a_ring_of_transformer_engine_does_not_hold_the_row() -> None:
    grouped = replace(LLAMA_7B, num_query_groups=8)
    ring = replace(memory(grouped), has_te_attention=True, cp_comm_type="p2p")
    found = [per_token(ring, Scheme(cp=cp))["attention"] for cp in (2, 16)]
    assert found[0] == found[1]
    # Keys and values of this rank's tokens and of the next one's, with their gradients, and a
    # step's gradients of both; cuDNN's sums of them per head.
    key, query = 2 * grouped.num_query_groups * grouped.kv_channels, 2 * HIDDEN
    alone = replace(ring, cp_comm_type="a2a")
    assert found[0] - per_token(alone, Scheme())["attention"] == pytest.approx(4 * 2 * key)
    # Who gathers has sums for the row.
    gathers = replace(ring, cp_comm_type="all_gather")
    of_row = per_token(gathers, Scheme(cp=16))["attention"]
    assert of_row - found[1] == pytest.approx((4 * 16 - 5) * 2 * key + query + 15 * 4 * query)


def test_the_limit_leaves_memory_to_the_stream_of_a_ring() -> None:
    ring = replace(memory(), has_te_attention=True)
    scheme = Scheme(tp=2, cp=8)
    limit = ring.max_tokens(scheme)
    # A step's output, and as many keys and values, in bf16 over tp 2.
    of_token = 2 * 3 * HIDDEN / 2 / 8
    more = limit + 2 * 2 * 8
    assert ring.peak_bytes(scheme, 0, limit) + of_token * limit <= ring.usable_bytes
    assert ring.peak_bytes(scheme, 0, more) + of_token * more > ring.usable_bytes


def test_layers_of_transformer_engine_with_another_attention_gather_the_row() -> None:
    local, scheme = memory(), Scheme(tp=2, cp=8)
    te = replace(local, has_te_layers=True)
    difference = per_token(te, scheme)["attention"] - per_token(local, scheme)["attention"]
    assert difference == pytest.approx(-2 * HIDDEN)  # the buffer of local layers


@pytest.mark.parametrize(
    ("settings", "num_bytes"), [({"has_te_layers": True}, 2), ({"has_wide_norms": True}, 4)]
)
def test_norms_that_copy_queries_and_keys_do_not_keep_the_fused_output(
    settings: dict[str, bool], num_bytes: int
) -> None:
    grouped = replace(LLAMA_7B, num_query_groups=8)
    usual = replace(memory(grouped), **settings)  # type: ignore[arg-type]
    again = replace(usual, recompute=Recompute(granularity="selective", modules=("core_attn",)))
    key = grouped.num_query_groups * grouped.kv_channels
    copies = num_bytes * (HIDDEN + key) + 2 * 4 * HEADS
    for model, more in (
        (usual, copies),
        # Normed queries and keys instead of the copy of queries.
        (again, copies + 2 * (HIDDEN + key) - 2 * HIDDEN),
    ):
        found = per_token(replace(model, qk_norms=True), Scheme())["loss"]
        expected = LLAMA_7B.num_layers * more
        assert found - per_token(model, Scheme())["loss"] == pytest.approx(expected)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("tp", [1, 4])
def test_staging_of_an_owner_is_its_part_for_every_copy(precision: Precision, tp: int) -> None:
    model = replace(memory(num_ranks=8), precision=precision)
    role = LLAMA_7B.num_parameters / tp * (precision.num_bytes + 4)
    # And the gradient of what is owned of the last bucket.
    canonical = (12 * LLAMA_7B.num_parameters + 4 * LLAMA_7B.num_embedding_parameters / 4) / 8
    # Gradients, fp32. An all-gather has a role's part too, but one copy of the owner's.
    staging = 4 * LLAMA_7B.num_parameters_per_layer * (1 / tp if tp > 1 else 1 + 1 / 8)
    found = model.state_bytes(Scheme(tp=tp), 0)
    # Norms are on every tp rank, and the last owner sends them to all.
    assert found == pytest.approx(role + canonical + staging + WORKSPACES, rel=2e-3)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # 3 copies of a set of 3 layers on 64 ranks, and 1.5 layers of the stage that has a part of
        # the embedding; roles of tp 8 rearrange, as parameters have 16 atoms.
        (["tp16+2*tp8pp3"], (9 / 64, 1.5 / 8, 0)),
        # The owner of norms has more copies than others.
        (["8*tp8"], (1 / 8, 0, 0)),
        # Two copies in a node: relayed there, and so in another order.
        (["16*tp4"], (2 / 8, 1 / 4, 1 / 8)),
        (["8*tp1cp8"], (1 / 64, 1, 0)),
        # In a set also a layer of the other stage, which four nodes need.
        (["4*tp1cp8pp2"], (1 + 4 / 64, 1, 1 / 8)),
        # The largest of each.
        (["8*tp8", "16*tp4"], (2 / 8, 1 / 4, 1 / 8)),
    ],
)
def test_staging_of_a_pool(texts: list[str], expected: tuple[float, ...]) -> None:
    pool = Pool.of(*(Strategy.parse(text, 64, ranks_per_node=8) for text in texts))
    found = PoolFootprint.of(pool, LLAMA_7B)
    shares = (found.share_as_owner, found.share_as_role, found.share_relayed)
    assert shares == pytest.approx(expected, rel=0.03)


WITH_EXPERTS = replace(
    LLAMA_7B,
    num_layers=4,
    num_experts=8,
    experts_per_token=2,
    num_expert_layers=4,
    expert_ffn_hidden_size=LLAMA_7B.ffn_hidden_size,
)
SMALL = replace(LLAMA_7B, num_layers=4, hidden_size=1024, ffn_hidden_size=1024)


def test_a_first_stage_has_the_layers_before_the_first_with_experts() -> None:
    mixed = replace(WITH_EXPERTS, num_expert_layers=3)
    known, scheme = replace(mixed, num_first_mlp_layers=1), Scheme(pp=2)
    least = replace(WITH_EXPERTS, num_layers=2, num_expert_layers=1)
    for stage in (0, 1):
        models = memory(mixed), memory(known)
        states = [model.role_bytes(scheme, stage) for model in models]
        fewer = WITH_EXPERTS.num_expert_entries - WITH_EXPERTS.num_mlp_entries
        # Parameters and gradients.
        assert states[0] - states[1] == (stage == 0) * 6 * fewer
        kept = [model.activation_bytes(scheme, stage, 1000) for model in models]
        assert (kept[0] > kept[1]) == (stage == 0)
    alone = memory(least).activation_bytes(Scheme(), 0, 1000)
    end = 1000 * 2 * HIDDEN  # the output of the last stage
    first_of_two = memory(known).activation_bytes(scheme, 0, 1000) / 2
    assert first_of_two == pytest.approx(alone - end)


WITH_LATENTS = replace(
    LLAMA_7B,
    num_layers=4,
    kv_channels=192,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (WITH_EXPERTS, "4*tp1cp4ep4"),
        (WITH_EXPERTS, "2*tp1cp8ep8"),
        (WITH_EXPERTS, "2*tp2cp4ep4"),
        (WITH_EXPERTS, "2*tp2cp2ep4pp2"),
        (WITH_EXPERTS, "tp2cp4ep4+tp4cp2ep8"),
        (replace(WITH_EXPERTS, shared_expert_ffn_hidden_size=8192), "4*tp2cp2ep4"),
        (replace(WITH_EXPERTS, num_query_groups=4, ffn_hidden_size=1024), "4*tp1cp4ep4"),
        # The layer without experts is larger, or ranks hold more of it.
        (replace(WITH_EXPERTS, num_expert_layers=3, expert_ffn_hidden_size=1024), "4*tp2cp2ep4"),
        (replace(WITH_EXPERTS, num_expert_layers=3, ffn_hidden_size=22016), "2*tp1cp8ep8"),
        # A part of the embedding is.
        (replace(SMALL, vocab_size=2**17), "4*tp4"),
        (WITH_LATENTS, "4*tp4"),
        (WITH_LATENTS, "8*tp2"),
        (WITH_LATENTS, "tp8+2*tp4"),
    ],
)
def test_staging_of_parts_with_unequal_numbers_of_holders(shape: ModelShape, text: str) -> None:
    """Owners and relays send, and roles receive, what they do by the transfer plan."""
    strategy = Strategy.parse(text, 16, ranks_per_node=4)
    pool = Pool.of(strategy)
    parameters = model_parameters(shape, 8 if shape.num_experts else 1)
    layout = CanonicalLayout.build(parameters, num_atoms=pool.tp_lcm, num_ranks=16)
    roles = roles_of(strategy, 4, False, shape.num_experts)
    amounts = StrategyAmounts(LayoutAmounts(layout, 4), roles)
    kind = collective_of(amounts)
    sent, received = [], []
    for call in calls_of(kind, amounts, strategy):
        by_source, by_destination = Counter[int](), Counter[int]()
        for index in call:
            bucket = layout.buckets[index]
            plan, _ = bucket_plans(kind, layout, bucket, roles, ranks_per_node=4)
            assert isinstance(plan, TransferPlan | TwoStepPlan)
            steps = plan.steps if isinstance(plan, TwoStepPlan) else (plan,)
            for rank in range(16):
                sent_in = [sum(t.num_elements for t in step.sent_by(rank)) for step in steps]
                by_source[rank] += max(sent_in)  # a bucket's steps share a buffer
                arrives = steps[-1].received_by(rank)
                by_destination[rank] += sum(t.num_elements for t in arrives)
        sent.append(max(by_source.values()))
        received.append(max(by_destination.values()))
    largest = max(bucket.num_elements for bucket in layout.buckets if bucket.unit.is_layer)
    found = PoolFootprint.of(pool, shape)
    assert (found.share_relayed > 0) == (kind is Collective.TWO_STEP)
    # Rows are cut a little differently for another number of groups of experts.
    assert found.share_as_owner == pytest.approx(max(sent) / largest, rel=1e-4)
    assert found.share_as_role in (0, pytest.approx(max(received) / largest, rel=1e-4))


def test_tp_ranks_that_route_in_fp32_add_up_outputs_of_experts_in_fp32() -> None:
    model = memory(WITH_EXPERTS)
    wide = replace(model, router_bytes=4)
    for scheme, number in ((Scheme(tp=4), 2 + 1 + 1 / 4), (Scheme(tp=4, cp=2, ep=8), 0.0)):
        extra = (
            next(m for m in of.moments(scheme, 0) if m.name == "outputs of experts").bytes_per_token
            for of in (wide, model)
        )
        copies = WITH_EXPERTS.experts_per_token * WITH_EXPERTS.hidden_size * 2
        assert next(extra) - next(extra) == pytest.approx(number * copies)


def test_staging_of_a_role_with_whole_experts() -> None:
    routed = WITH_EXPERTS.num_routed_entries / WITH_EXPERTS.num_parameters_per_layer
    found = PoolFootprint.of(Pool.of(Strategy.parse("tp2cp2ep4", 4)), WITH_EXPERTS)
    num_whole = WITH_EXPERTS.num_router_entries + 2 * WITH_EXPERTS.hidden_size
    whole = num_whole / WITH_EXPERTS.num_parameters_per_layer
    part = whole + (1 - whole - routed) / 2 + routed / 4
    # A whole expert has two atoms, which travel one after the other and lie side by side.
    assert found.share_as_role == found.share_sent_by_role == pytest.approx(part)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Packed for the wire in any order; received in place as before.
        ("8*tp8", (1 / 8, 0, 1 / 8, 0)),
        ("16*tp4", (2 / 8, 1 / 4, 1 / 4, 1 / 8)),
        # No reduce-scatter: relays between nodes.
        ("8*tp1cp8", (1, 1, 1, 1 / 8)),
    ],
)
def test_staging_of_gradients_in_bf16(text: str, expected: tuple[float, ...]) -> None:
    pool = Pool.of(Strategy.parse(text, 64, ranks_per_node=8))
    found = PoolFootprint.of(pool, LLAMA_7B, gradient_bytes=2)
    shares = (found.share_as_owner, found.share_as_role, found.share_sent_by_role)
    assert (*shares, found.share_relayed) == pytest.approx(expected, rel=0.03)
    scheme = pool.strategies[0].replicas[0].scheme
    in_fp32, in_bf16 = (
        replace(memory(), pool=footprint).state_bytes(scheme, 0)
        for footprint in (PoolFootprint.of(pool, LLAMA_7B), found)
    )
    # Relays and copies for them are more than one fp32 layer, which a reduce-scatter needs.
    assert (in_bf16 < in_fp32) == (scheme.tp > 1)


@pytest.mark.parametrize(
    ("scheme", "as_owner", "as_role", "relayed", "number"),
    [
        (Scheme(tp=8), 1 / 8, 0, 0, 3),
        # Two copies of a set of four layers.
        (Scheme(tp=8, pp=4), 8 / 64, 0, 0, 4),
        # Every rank holds everything.
        (Scheme(), 1 / 64, 1, 0, 2),
        (Scheme(cp=8), 1 / 64, 1, 0, 3),
        # The ranks of a node hold two, eight and four copies of a layer, of one stage.
        (Scheme(tp=4), 2 / 8, 1 / 4, 1 / 8, 3),
        (Scheme(cp=8, pp=2), 1 + 4 / 64, 1, 1 / 8, 4),
        (Scheme(pp=2), 4 / 8, 1, 1 / 8, 3),
        # They belong to up to four replicas, but three have the same stage there; a rank is idle.
        (Scheme(pp=3), 3 / 8, 1, 1 / 8, 3),
    ],
    ids=str,
)
def test_a_scheme_alone_takes_what_a_job_of_it_takes(
    scheme: Scheme, as_owner: float, as_role: float, relayed: float, number: int
) -> None:
    found = replace(memory(num_ranks=64), ranks_per_node=8).footprint(scheme)
    # The owner of norms has more copies than others.
    assert found.share_as_owner == pytest.approx(as_owner, rel=0.02)
    assert found.share_as_role == found.share_sent_by_role == pytest.approx(as_role, rel=1e-3)
    assert found.share_relayed == pytest.approx(relayed, rel=1e-3)
    assert (found.weight_shapes, found.num_communicators) == (1 / scheme.tp, number)


@pytest.mark.parametrize(
    ("texts", "num_communicators", "connection_bytes"),
    [
        # All ranks gather and reduce together.
        (["64*tp1"], 2, 0.0),
        # So do these, but in attention they send to each other.
        (["8*tp1cp8"], 3, 3.3e9),
        (["32*tp1cp2"], 3, 3.3e9 / 7),
        (["32*tp2"], 3, 3.3e9),
        (["64*tp1", "32*tp2", "16*tp4", "8*tp8", "8*tp1cp8~"], 5, 3.3e9),
    ],
)
def test_a_job_keeps_memory_free_for_what_its_pool_has(
    texts: list[str], num_communicators: int, connection_bytes: float
) -> None:
    pool = Pool.of(*(Strategy.parse(text, 64, ranks_per_node=8) for text in texts))
    model = replace(memory(), pool=PoolFootprint.of(pool, LLAMA_7B))
    reserve = model.reserve
    assert reserve.communicator_bytes == pytest.approx(num_communicators * 0.3e9)
    assert reserve.connection_bytes == pytest.approx(connection_bytes)
    unknown = memory().reserve
    assert unknown.num_bytes == pytest.approx(11e9)
    parts = (reserve.context_bytes, reserve.fragment_bytes)
    assert parts == (unknown.context_bytes, unknown.fragment_bytes)
    assert model.usable_bytes == pytest.approx(
        model.device.memory_bytes - sum((*parts, num_communicators * 0.3e9, connection_bytes))
    )
    # Gradients in bf16 are sent to their owners.
    in_bf16 = PoolFootprint.of(pool, LLAMA_7B, gradient_bytes=2)
    assert replace(model, pool=in_bf16).reserve.connection_bytes == pytest.approx(3.3e9)


def test_a_reserve_given_as_a_whole_replaces_its_parts() -> None:
    device = replace(memory().device, reserve_bytes=20e9)
    model = replace(memory(), device=device, pool=SMALL_POOL)
    assert model.reserve_bytes == model.reserve.as_a_whole_bytes == 20e9
    assert model.max_tokens(Scheme(tp=2)) < memory().max_tokens(Scheme(tp=2))


SMALL_POOL = PoolFootprint.of(Pool.of(Strategy.parse("32*tp2", 64, ranks_per_node=8)), LLAMA_7B)


def test_communicators_of_a_rank() -> None:
    # The job's and regrouping's; tp and pp; of cp4~ groups of 4 and 2; tp.
    texts = ["4*tp4pp2", "8*tp1cp4~", "2*tp16"]
    counts = [
        num_communicators(Pool.of(Strategy.parse(text, 32, ranks_per_node=8))) for text in texts
    ]
    assert counts == [4, 4, 3]
    pool = Pool.of(*(Strategy.parse(text, 32, ranks_per_node=8) for text in texts))
    # Of tp 4 and cp 4, which have the same ranks, pp, cp 2 and tp 16.
    assert num_communicators(pool) == 2 + 4


@pytest.mark.parametrize(
    ("which", "number"),
    [
        (["--schemes", "tp2", "tp2cp4pp2", "--num-ranks", "64"], 5),
        (["--pool", "examples/pool_64_ranks.json"], None),
    ],
    ids=["schemes", "pool"],
)
def test_estimate_reports_communicators(
    which: list[str], number: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "examples/model_llama32b.json", "--device", "a800-80"]
    assert main(["estimate", *model, *which]) == 0
    if number is None:
        number = num_communicators(Pool.read(which[1]))
    assert f"a rank makes up to {number} communicators" in capsys.readouterr().out


def test_tied_embeddings_are_held_once_by_one_stage_and_twice_by_two() -> None:
    tied = replace(LLAMA_7B, tied_embeddings=True)
    saved = memory().state_bytes(Scheme(), 0) - memory(tied).state_bytes(Scheme(), 0)
    num_embedding = LLAMA_7B.num_embedding_parameters
    # Of the shard, the gradient is in place in both.
    assert saved == pytest.approx((6 + 12 / 64) * num_embedding, rel=0.02)
    last = Scheme(pp=2)
    states, staged = zip(
        *(
            (
                model.state_bytes(last, 1),
                model.footprint(last).staging_bytes(LLAMA_7B.num_parameters_per_layer, 2),
            )
            for model in (memory(), memory(tied))
        ),
        strict=True,
    )
    only_canonical = states[0] - states[1] - (staged[0] - staged[1])
    assert only_canonical == pytest.approx(16 / 64 * num_embedding)
