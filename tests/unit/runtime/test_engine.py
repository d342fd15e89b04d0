"""The engine's verbs on one rank: what updates, what does not, and what each of them refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import ConfigurationError, HydraulisError, StrategyError
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.arena import ArenaMemory
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import loss_func, make_forward_step
from megatron.hydraulis.runtime.memory import SharedOutOfMemoryError
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.gloo_pool import prepare_parent
from tests.support.models import SmallModel

MODEL = SmallModel(num_layers=1, hidden_size=16, ffn_hidden_size=16, num_heads=2, num_groups=2)
STEP = make_forward_step()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    prepare_parent()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(world: None) -> Iterator[RuntimeEngine]:
    made = make_engine(AdamWSettings(lr=0.1, clip_grad=0.0))
    yield made
    made.close()


def make_engine(settings: AdamWSettings | None) -> RuntimeEngine:
    pool = Pool.of(Strategy.parse("tp1", 1))
    return RuntimeEngine(MODEL.definition(), pool, settings, seed=1)


def batches(*weights: float) -> list[PackedBatch]:
    """A micro-batch of one sequence for each weight of its tokens."""
    tokens = np.arange(9) % MODEL.vocab_size
    return [pack([tokens], weights=[np.full(9, each, np.float32)]) for each in weights]


def fails(_: Any, model: torch.nn.Module) -> Any:
    raise MemoryError


def with_a_bad_second(mask: Tensor, output: Tensor) -> Any:
    total, weight_sum, report = loss_func(mask, output)
    if mask.max() == 2.0:
        total = total * torch.nan
        report = {"lm loss": report["lm loss"] * torch.tensor([torch.nan, 1.0])}
    return total, weight_sum, report


def test_gradients_of_calls_add_up_and_are_divided_once_by_all_weights(
    engine: RuntimeEngine,
) -> None:
    engine.forward_backward("tp1", batches(1.0), STEP)
    once = engine.shards.gradients.clone()
    engine.forward_backward("tp1", batches(1.0, 2.0), STEP)
    torch.testing.assert_close(engine.shards.gradients, 4 * once)
    before = engine.shards.parameters.clone()
    outcome = engine.optim_step()
    assert outcome.updated
    assert outcome.loss.weight_sum == 8 * 4.0
    assert outcome.loss.trained_tokens == 24
    assert outcome.gradient_norm == pytest.approx((once / 8).norm().item())
    assert engine.num_changes == 1
    assert not torch.equal(engine.shards.parameters, before)
    with pytest.raises(ConfigurationError, match="there were 0 since the last update"):
        engine.optim_step()


def test_the_updated_parameters_are_those_of_the_next_gather(engine: RuntimeEngine) -> None:
    for following in ("tp1", None):
        engine.train_step("tp1", batches(1.0), STEP, next_strategy=following)
        engine.gather("tp1")
        engine.finish_regrouping()
        arena = engine.runtime_of("tp1").arena
        assert arena is not None
        held = sorted(value for each in arena.bound.values() for value in each.values.tolist())
        assert held == sorted(engine.shards.parameters.tolist())


@pytest.mark.parametrize(
    ("step", "weights", "bad"),
    [(STEP, (0.0,), ()), (make_forward_step(with_a_bad_second), (1.0, 2.0), (1,))],
    ids=["no weight", "a loss that is not finite"],
)
def test_nothing_is_updated_without(
    engine: RuntimeEngine, step: Any, weights: tuple[float, ...], bad: tuple[int, ...]
) -> None:
    before = engine.shards.parameters.clone()
    outcome = engine.train_step("tp1", batches(*weights), step)
    assert (outcome.updated, outcome.gradient_norm) == (False, None)
    assert outcome.bad_micro_batches == bad
    assert (engine.num_changes, int(engine.optimizer.num_steps)) == (0, 0)
    assert torch.equal(engine.shards.parameters, before)


def test_a_rank_without_memory_says_so_and_nothing_is_updated(engine: RuntimeEngine) -> None:
    engine.forward_backward("tp1", batches(1.0), STEP)
    outcome = engine.train_step("tp1", batches(1.0, 1.0), fails)
    assert outcome.loss.weight_sum == 8
    assert (outcome.updated, outcome.num_ranks_without_memory) == (False, 1)
    assert outcome.out_of_memory is not None
    assert (outcome.out_of_memory.num_tokens, outcome.out_of_memory.micro_batch) == (8, 0)
    engine.forward_backward("tp1", batches(1.0), fails)
    with pytest.raises(SharedOutOfMemoryError, match="rank 0 ran out of memory in micro-batch 0"):
        engine.discard_gradients()
    assert engine.train_step("tp1", batches(1.0), STEP).updated


def test_a_divisor_replaces_the_weights_and_is_given_once(engine: RuntimeEngine) -> None:
    engine.forward_backward("tp1", batches(1.0), STEP)
    norm = engine.shards.gradients.norm().item()
    with pytest.raises(ConfigurationError, match="positive and finite but is -2"):
        engine.optim_step(divisor=-2.0)
    assert engine.optim_step(divisor=2.0).gradient_norm == pytest.approx(norm / 2)
    engine.forward_backward("tp1", batches(1.0), STEP, is_divided=True)
    with pytest.raises(ConfigurationError, match="divisor 3 and 1 calls"):
        engine.optim_step(divisor=3.0)
    engine.forward_backward("tp1", batches(1.0), STEP)
    with pytest.raises(ConfigurationError, match="1 of 2 have one"):
        engine.optim_step()
    engine.discard_gradients()


def test_offloaded_state_comes_back_bit_by_bit(engine: RuntimeEngine) -> None:
    engine.train_step("tp1", batches(1.0), STEP)
    tensors = (engine.shards.parameters, engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq)
    before = [each.clone() for each in tensors]
    for _ in range(2):  # the second time there is nothing to move
        engine.offload()
    assert {num_bytes(each) for each in (*tensors, engine.shards.gradients)} == {0}
    assert engine.memory.num_bytes == 0
    with pytest.raises(
        HydraulisError, match="parameters are on the host after offload; call onload"
    ):
        engine.forward("tp1", batches(1.0), STEP)
    engine.onload()
    assert all(map(torch.equal, tensors, before))
    engine.forward_backward("tp1", batches(1.0), STEP)
    with pytest.raises(HydraulisError, match=r"gradients of 1 calls .* an offload would lose"):
        engine.offload()
    assert engine.offloaded == set()


def test_parameters_and_optimizer_state_move_separately(engine: RuntimeEngine) -> None:
    """Gradients of several calls survive while the moments are away, and get their memory back."""
    moments = (engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq)
    parameters = engine.shards.parameters
    one = num_bytes(parameters)
    expected = engine.train_step("tp1", batches(1.0), STEP)
    engine.offload(parameters=False)
    assert [num_bytes(each) for each in (parameters, *moments)] == [one, 0, 0]
    assert engine.memory.num_bytes > 0
    engine.forward_backward("tp1", batches(1.0), STEP)
    with pytest.raises(HydraulisError, match="but moments are on the host"):
        engine.optim_step()
    engine.onload()
    assert engine.optim_step().updated
    engine.offload(optimizer=False)
    assert [num_bytes(each) for each in (parameters, *moments)] == [0, one, one]
    assert engine.memory.num_bytes == 0
    engine.offload()
    assert engine.offloaded == {"parameters", "moments"}
    engine.onload(optimizer=False)
    assert [num_bytes(each) for each in (parameters, *moments)] == [one, 0, 0]
    loss = engine.evaluate("tp1", batches(1.0), STEP)
    assert loss.mean < expected.loss.mean
    assert not num_bytes(engine.shards.gradients)
    engine.onload()
    assert engine.train_step("tp1", batches(1.0), STEP).loss == loss


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_get_memory_again_after_an_offload(world: None, accumulates: bool) -> None:
    pool = Pool.of(*(Strategy.parse(text, 1, name=text) for text in ("tp1", "tp1r")))
    engine = RuntimeEngine(
        MODEL.definition(), pool, AdamWSettings(lr=0.1), seed=1, accumulates=accumulates
    )
    norms = []
    for other in ("tp1r", "tp1"):
        engine.forward_backward("tp1", batches(1.0), STEP)
        engine.forward_backward("tp1", batches(2.0), STEP)
        norms.append(engine.shards.gradients.norm().item())
        engine.discard_gradients()
        engine.offload()
        assert not num_bytes(engine.shards.gradients)
        engine.onload()
        engine.evaluate(other, batches(1.0), STEP)  # the first one is built now
        assert not num_bytes(engine.shards.gradients)
    assert norms[0] == norms[1] > 0
    engine.close()


def num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_parameters_alone_run_forward_only(world: None, engine: RuntimeEngine) -> None:
    alone = make_engine(None)
    assert alone.evaluate("tp1", batches(1.0), STEP) == engine.evaluate("tp1", batches(1.0), STEP)
    assert not alone.shards.gradients.numel()
    assert not alone.shards.parameters.numel()
    assert torch.equal(alone.shards.frozen, engine.shards.parameters)
    with pytest.raises(ConfigurationError, match="made with optimizer=None"):
        alone.forward_backward("tp1", batches(1.0), STEP)
    alone.close()


class TestHeldFrozenParameters:
    """What may lose the frozen parameters of an arena makes all ranks gather them again."""

    @pytest.fixture
    def frozen(self, world: None) -> Iterator[RuntimeEngine]:
        pool = Pool.of(*(Strategy.parse(text, 1, name=text) for text in ("tp1", "tp1r")))
        model = replace(MODEL, frozen=("embedding.", "decoder."))
        made = RuntimeEngine(model.definition(), pool, AdamWSettings(lr=0.1), seed=1)
        made.train_step("tp1", batches(1.0), STEP)
        yield made
        made.close()

    def gathers_frozen(self, engine: RuntimeEngine, name: str = "tp1") -> bool:
        """Gather, and compare the arena with the shards; whether frozen buckets travelled."""
        engine.gather(name)
        assert engine._contents.current is not None
        gather = engine._contents.current[1]
        engine.finish_regrouping()
        arena = engine.runtime_of(name).arena
        assert arena is not None
        shards = engine.shards
        for is_frozen, flat in ((False, shards.parameters), (True, shards.frozen)):
            bound = [each for each in arena.bound.values() if (each.gradient is None) == is_frozen]
            held = sorted(value for each in bound for value in each.values.tolist())
            assert held == sorted(flat.tolist())
        buckets = {b.index for b in engine.layout.buckets if b.unit.is_frozen}
        assert buckets & set(gather.buckets) in (set(), buckets)
        return bool(buckets & set(gather.buckets))

    def test_an_update_loses_nothing(self, frozen: RuntimeEngine) -> None:
        assert not self.gathers_frozen(frozen)
        frozen.train_step("tp1", batches(1.0), STEP, next_strategy="tp1")
        assert not self.gathers_frozen(frozen)

    def test_the_first_gather_of_a_strategy(self, frozen: RuntimeEngine) -> None:
        assert self.gathers_frozen(frozen, "tp1r")
        assert not self.gathers_frozen(frozen, "tp1")
        assert not self.gathers_frozen(frozen, "tp1r")

    def test_evaluation_by_another_strategy(self, frozen: RuntimeEngine) -> None:
        frozen.evaluate("tp1r", batches(1.0), STEP)
        assert not self.gathers_frozen(frozen)

    def test_an_offload(self, frozen: RuntimeEngine) -> None:
        frozen.offload()
        frozen.onload()
        assert self.gathers_frozen(frozen)

    def test_other_values(self, frozen: RuntimeEngine) -> None:
        frozen.finish_regrouping()
        frozen.shards.frozen.add_(1.0)
        frozen.parameters_changed()
        assert self.gathers_frozen(frozen)

    def test_a_gather_that_finds_no_memory(
        self, frozen: RuntimeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        frozen.evaluate("tp1r", batches(1.0), STEP)

        def fail(num_elements: int) -> None:
            ArenaMemory.size_parameters(frozen.memory, 0)
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(frozen.memory, "size_parameters", fail)
            with pytest.raises(MemoryError):
                frozen.gather("tp1")
        assert self.gathers_frozen(frozen, "tp1r")

    def test_a_lack_of_memory(self, frozen: RuntimeEngine) -> None:
        frozen.train_step("tp1", batches(1.0), fails)
        frozen.train_step("tp1", batches(1.0), STEP)
        assert self.gathers_frozen(frozen)


def test_a_strategy_outside_the_pool_is_refused(engine: RuntimeEngine) -> None:
    with pytest.raises(StrategyError, match=r"'pp2': not among the pool's 1 strategies; use one"):
        engine.gather("pp2")


def test_atoms_are_a_multiple_of_those_of_the_pool(world: None) -> None:
    pool = Pool.of(Strategy.parse("tp1", 1))
    with pytest.raises(ConfigurationError, match=r"num_atoms is 0 .* multiple 1;"):
        RuntimeEngine(MODEL.definition(), pool, None, seed=1, num_atoms=0)
