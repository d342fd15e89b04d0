"""Memory, times and regrouping of a model whose adapters alone are trained."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.cost_model.regrouping import Hiding
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.transfer.canonical import Contribution, model_parameters
from tests.support.planning import LLAMA_7B
from tests.support.simulation import SMALL_SHAPE, regroup_costs, simulator, work_of

H100 = device_constants("h100")
LORA = Lora.resolve(16, 32, (), LLAMA_7B)
SMALL_LORA = Lora.resolve(4, 8, ("linear_qkv", "down_proj"), SMALL_SHAPE)
NUM_TRAINED = 4 * 4 * (3 * (32 + 32) + 64 + 32)
"""Of these adapters: A and B of queries, keys and values, and of the second matrix of the MLP."""
WITH_EXPERTS = replace(
    SMALL_SHAPE,
    num_experts=4,
    num_expert_layers=3,
    num_first_mlp_layers=1,
    experts_per_token=2,
    expert_ffn_hidden_size=16,
    shared_expert_ffn_hidden_size=24,
)


def around(lora: Lora | None, shape: ModelShape = LLAMA_7B) -> Frozen:
    return Frozen.around(lora, shape)


def model(lora: Lora | None = LORA) -> AnalyticCostModel:
    return AnalyticCostModel(
        shape=LLAMA_7B, device=H100, cluster=H100.cluster(8, 8), frozen=around(lora)
    )


def memory(lora: Lora | None = LORA) -> MemoryModel:
    return model(lora).memory


@pytest.mark.parametrize("shape", [SMALL_SHAPE, WITH_EXPERTS])
def test_all_but_the_adapters_is_frozen(shape: ModelShape) -> None:
    lora = Lora.resolve(4, 8, ("all-linear", "output_layer"), shape)
    parameters = model_parameters(shape, frozen=around(lora, shape))
    trained = [each for each in parameters if not each.is_frozen]
    frozen = [each.num_elements for each in parameters if each.is_frozen]
    assert sum(frozen) == sum(each.num_elements for each in model_parameters(shape))
    assert sum(each.num_elements for each in trained) == lora.num_parameters(shape)
    assert {each.contribution for each in trained} == {Contribution.PARTIAL}
    if shape is WITH_EXPERTS:  # a layer with an MLP, 64 wide, and three with shared experts
        of_widths = (64, *3 * (24,))
        of_attention = 4 * 4 * (3 * (32 + 32) + 64)
        assert lora.num_parameters(shape) == of_attention + 4 * (
            sum(3 * (32 + width) for width in of_widths) + 32 + 64
        )


class TestMemory:
    def test_a_frozen_parameter_has_one_copy_here_and_one_over_all_ranks(self) -> None:
        frozen, trained = LLAMA_7B.num_parameters, LORA.num_parameters(LLAMA_7B)
        for found in (memory(), replace(memory(), accumulates=True)):
            role_bytes = found.role_bytes(Scheme(), 0)
            assert role_bytes == 2 * frozen + 6 * trained
            pool = PoolFootprint.of(
                Pool.of(Strategy.parse("8*tp1", 8)), LLAMA_7B, frozen=around(LORA)
            )
            others = found.state_bytes(Scheme(), 0) - role_bytes - 2 * 2**25
            staging = pool.staging_bytes(LLAMA_7B.num_parameters_per_layer, 2)
            assert others - staging == pytest.approx((2 * frozen + 16 * trained) / 8)

    def test_every_tp_rank_has_all_adapters(self) -> None:
        of_one, of_four = (memory().role_bytes(Scheme(tp=tp), 0) for tp in (1, 4))
        adapters = 6 * LORA.num_parameters(LLAMA_7B)
        norms = 2 * 4096 * (2 * 32 + 1)
        assert (of_one - adapters - norms) / 4 == of_four - adapters - norms

    @pytest.mark.parametrize("scheme", [Scheme(), Scheme(cp=8), Scheme(pp=4), Scheme(tp=2, cp=4)])
    def test_more_tokens_fit(self, scheme: Scheme) -> None:
        assert memory().max_tokens(scheme) > memory(None).max_tokens(scheme)
        of_output = Lora.resolve(256, 32, ("all-linear", "output_layer"), LLAMA_7B)
        assert memory(of_output).max_tokens(scheme) < memory().max_tokens(scheme)

    def test_column_layers_keep_the_part_of_their_input_that_sequence_parallelism_leaves(
        self,
    ) -> None:
        of_one = replace(LORA, rank=1)
        kept = [memory(lora).activation_bytes(Scheme(tp=4), 0, 1024) for lora in (of_one, None)]
        assert kept[0] < kept[1]

    def test_the_first_layer_keeps_nothing_before_its_first_adapter(self) -> None:
        found = memory(Lora.resolve(16, 32, "linear_fc1", LLAMA_7B))
        first, second = (found.activation_bytes(Scheme(pp=2), stage, 1024) for stage in (0, 1))
        # In flight are twice as many micro-batches, of which a token keeps bf16 and fp32 numbers:
        # queries, keys, values, the output and inputs of both norms; per head, and of norms.
        spared = 6 * 4096 * 2 + 32 * 4 + 2 * 8
        final_norm = 4096 * 2
        assert first / 2 == second - 1024 * (spared + final_norm)

    def test_adapters_that_are_larger_than_a_layer_of_the_wire_have_room(self) -> None:
        large = Lora.resolve(1024, 32, (), LLAMA_7B)
        pool = Pool.of(Strategy.parse("tp8", 8))
        per_layer = LLAMA_7B.num_parameters_per_layer
        staged = PoolFootprint.of(pool, LLAMA_7B, frozen=around(large)).staging_bytes(per_layer, 2)
        # An owner receives an eighth of each rank's gradient, after the rank has sent all of it.
        assert staged == 2 * 4 * large.num_parameters(LLAMA_7B) / 32


class TestTimes:
    def test_frozen_matrices_have_one_product_in_the_backward(self) -> None:
        few = replace(LORA, targets=("k_proj",), rank=1)
        for scheme in (Scheme(), Scheme(tp=4), Scheme(cp=2)):
            forward = model(few).forward_terms(scheme)["matmul"].per_token_s
            both, of_all = (
                each.stage_terms(scheme, each.usual_layers(1), is_last=False)["matmul"].per_token_s
                for each in (model(few), model(None))
            )
            assert both == pytest.approx(2 * forward, rel=0.05)
            assert both == pytest.approx(2 / 3 * of_all, rel=0.05)
        assert 0.4 < model().coefficients(Scheme()).forward_share < 0.5

    def test_adapters_take_time(self) -> None:
        of_rank = [
            model(replace(LORA, rank=rank)).coefficients(Scheme()).b_ms_per_token
            for rank in (1, 16, 512)
        ]
        assert of_rank == sorted(of_rank)
        assert of_rank[1] < model(None).coefficients(Scheme()).b_ms_per_token < of_rank[2]

    def test_column_layers_gather_the_channels_between_both_products(self) -> None:
        def messages_s(lora: Lora | None, **changes: bool) -> float:
            found = replace(model(lora), **changes)  # type: ignore[arg-type]
            return found.forward_terms(Scheme(tp=4))["tensor_parallel"].per_token_s

        hidden_s = messages_s(None) / 4
        channels = 5 * LORA.rank  # of queries, keys and values, gate and up
        added_s = messages_s(LORA) - messages_s(None)
        share = channels / 4096  # smaller messages take longer for a byte
        assert share * hidden_s < added_s < 4 * share * hidden_s
        for lora, changes in (
            (replace(LORA, targets=("o_proj", "down_proj")), {}),
            (LORA, {"sequence_parallel": False}),
        ):
            assert messages_s(lora, **changes) == messages_s(None, **changes)

    def test_operations_that_mathematics_needs(self) -> None:
        entries = 4 * SMALL_SHAPE.num_matrix_parameters_per_layer + 64 * 32
        trained = SMALL_LORA.num_parameters(SMALL_SHAPE)
        assert trained == NUM_TRAINED
        attention = 6 * 4 * 32 * 10**2
        found = around(SMALL_LORA, SMALL_SHAPE).causal_flops(SMALL_SHAPE, [10])
        assert found == 10 * (4 * entries + 6 * trained) + attention


class TestRegrouping:
    costs = replace(regroup_costs(4, ranks_per_node=4), frozen=around(SMALL_LORA, SMALL_SHAPE))

    @pytest.mark.parametrize("text", ["2*tp2", "tp4"])
    def test_adapters_alone_travel_while_a_strategy_stays(self, text: str) -> None:
        strategy = Strategy.parse(text, 4)
        times = self.costs.times(strategy)
        # All but a rank's own quarter arrives in bf16, and the gradients of the others in fp32.
        assert times.received_bytes == 3 / 4 * (2 + 4) * NUM_TRAINED
        assert 0 < times.skipped_bytes < 2 * SMALL_SHAPE.num_parameters
        assert self.costs.times(strategy, strategy) is times

    @pytest.mark.parametrize("text", ["2*tp2", "tp4", "2*pp2", "tp2+2*tp1"])
    def test_frozen_ones_travel_where_roles_change(self, text: str) -> None:
        strategy, before = Strategy.parse(text, 4), Strategy.parse("4*tp1", 4)
        stays, changes = self.costs.times(strategy), self.costs.times(strategy, before)
        assert changes.skipped_bytes == 0
        all_bytes = stays.received_bytes + stays.skipped_bytes
        assert changes.received_bytes == pytest.approx(all_bytes)
        assert changes.total_ms > stays.total_ms
        scatters = [[call.scatter_ms for call in times.calls] for times in (stays, changes)]
        assert scatters[0] == scatters[1]
        trained = self.costs.times(strategy).units
        assert not any(unit.is_frozen for unit in trained)

    def test_without_adapters_the_strategy_before_does_not_matter(self) -> None:
        costs, strategy = regroup_costs(4), Strategy.parse("2*tp2", 4, ranks_per_node=2)
        before = Strategy.parse("4*tp1", 4, ranks_per_node=2)
        assert costs.times(strategy, before) is costs.times(strategy)
        assert costs.times(strategy).skipped_bytes == 0

    @pytest.mark.parametrize("hiding", Hiding)
    def test_simulated_iterations_take_longer_after_a_change(self, hiding: Hiding) -> None:
        costs = replace(regroup_costs(4, hiding=hiding), frozen=around(SMALL_LORA, SMALL_SHAPE))
        tp, dp = (
            work_of(text, [[1]] * num, num_ranks=4) for text, num in (("2*tp2", 2), ("4*tp1", 4))
        )
        run = simulator(regroup=costs, shape=SMALL_SHAPE).run([dp, dp, tp, tp])
        times_ms = [end.end_ms - start.end_ms for start, end in itertools.pairwise(run)]
        assert times_ms[1] > times_ms[2]
        gathers_ms = [sum(call.gather.duration_ms for call in each.calls) for each in run]
        assert gathers_ms[0] == gathers_ms[1] < gathers_ms[2] > gathers_ms[3]


def test_a_profile_is_for_one_kind_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"]
    shape += ["--padded-vocab-size", "1024", "--swiglu", "--bf16"]
    job = ["--device", "h100", "--num-ranks", "4"]
    lora = ["--lora-rank", "8", "--lora-targets", "q_proj", "linear_fc1"]
    plain, adapted = tmp_path / "plain.json", tmp_path / "adapted.json"
    assert main(["estimate", *shape, *job, "--out", str(plain)]) == 0
    assert main(["estimate", *shape, *job, *lora, "--out", str(adapted)]) == 0
    capsys.readouterr()
    assert "lora" not in json.loads(plain.read_text())["model"]
    assert json.loads(adapted.read_text())["model"]["lora"] == "rank 8 of q_proj gate_proj up_proj"
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n" * 16)
    propose = ["propose", "--lengths", str(lengths), *shape, *job, "--global-batch-size", "8"]
    propose += ["--num-batches", "2", "--out", str(tmp_path / "pool.yaml")]
    for profile, words in ((plain, lora), (adapted, [])):
        assert main([*propose, *words, "--cost-profile", str(profile)]) != 0
        assert "rank 8 of q_proj gate_proj up_proj" in capsys.readouterr().err
    assert main([*propose, *lora, "--cost-profile", str(adapted)]) == 0
