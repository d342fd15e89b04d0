"""A critic: values, losses, norms and updates are those of transformers' model in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor

from megatron.hydraulis.checkpoint.hugging_face.export_hf import Content, export_checkpoint
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.library.batches import TokenSequence
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from tests.distributed.test_engine_verbs import in_strategy
from tests.support.gloo_pool import pool_of
from tests.support.huggingface_folders import assert_same_tensors, make_folder, tensors_of

pytestmark = pytest.mark.distributed

STRATEGIES = ("4*tp1", "tp2pp2", "2*cp2", "tp2cp2", "cp4~", "cp4fs")
LENGTHS = (9, 4, 14, 7)
LR = 1e-3
EPSILON = 1e-4
"""So large that the rounding of a gradient near 0 does not become an update of `LR`."""
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
CLIP_RANGE = 0.2
TOLERANCE = 1e-5
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Critic:
    """What a rank has seen."""

    first: Tensors
    values: list[list[np.ndarray]]
    """By strategy, before its update."""
    losses: list[float]
    norms: list[float | None]
    last: Tensors
    of_batch: tuple[float, float]
    """Loss of a batch, by `forward_backward` and by `batch_loss`, which has the same."""


def sequences() -> list[TokenSequence]:
    rng = np.random.default_rng(2)
    found = []
    for length in LENGTHS:
        weights = np.ones(length, dtype=np.float32)
        weights[:2] = 0  # a prompt
        inputs = {
            name: torch.from_numpy(rng.normal(size=length)).float() for name in ("old", "returns")
        }
        found.append(TokenSequence(rng.integers(0, 61, size=length), weights, inputs))
    return found


def clipped(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    near = old + (values - old).clamp(-CLIP_RANGE, CLIP_RANGE)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def value_loss(log_probs: Any, entropy: Any, inputs: Mapping[str, Tensor], _: Any) -> Tensor:
    assert log_probs is entropy is None
    return clipped(inputs["values"], inputs["old"], inputs["returns"])


def make_engine(folder: Path, *strategies: str, lora: Lora | None = None) -> Engine:
    return Engine.from_hf(
        folder,
        pool=list(strategies),
        optimizer=AdamWSettings(lr=LR, weight_decay=0.1, eps=EPSILON),
        max_tokens_per_micro_batch=32,
        lora=lora,
        value_head=True,
        options=("--distributed-timeout-minutes", "1"),
    )


def run_critic(folder: Path, saved: Path) -> Critic:
    engine = make_engine(folder, *STRATEGIES)
    first = dict(engine.hf_tensors())
    found = sequences()
    values, losses, norms = [], [], []
    for name in STRATEGIES:
        one = in_strategy(engine, name)
        batch = one.plan(found)
        values.append([each.numpy() for each in one.forward(batch, "values")["values"]])
        losses.append(one.forward_backward(batch, value_loss).loss_sum)
        norms.append(one.optim_step())
    last = dict(engine.hf_tensors())
    engine.save(saved)
    by_token = engine.forward_backward(engine.plan(found), value_loss).loss_sum
    engine.discard_gradients()

    def loss_of_batch(outputs: Mapping[str, list[Tensor]]) -> Tensor:
        terms = [
            torch.from_numpy(each.weights)
            @ clipped(row, each.inputs["old"], each.inputs["returns"])
            for row, each in zip(outputs["values"], found, strict=True)
        ]
        return torch.stack(terms).sum()

    of_batch = by_token, engine.batch_loss(engine.plan(found), loss_of_batch, "values")
    engine.discard_gradients()
    with pytest.raises(ConfigurationError, match="some of values, each once, but log_probs was"):
        engine.forward(batch)
    with pytest.raises(ConfigurationError, match="must depend on values but has no gradient"):
        engine.forward_backward(batch, lambda a, b, inputs, c: inputs["old"])
    of_user = batch.with_inputs(values=[each.inputs["old"] for each in found])
    with pytest.raises(ConfigurationError, match="rename it, for example to 'old_values'"):
        engine.forward_backward(of_user, value_loss)
    again = make_engine(folder, "pp2tp2")
    again.load(saved)
    assert_same_tensors(last, dict(again.hf_tensors()))
    engine.close()
    again.close()
    return Critic(first, values, losses, norms, last, of_batch)


def updates(model: Any) -> Iterator[tuple[list[Tensor], float, float]]:
    """Values by sequence, loss and norm, before each update of what is trained."""
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPSILON)
    for _ in STRATEGIES:
        values, losses, weight_sum = [], [], 0.0
        for each in sequences():
            values.append(model(torch.from_numpy(each.tokens)[None, :-1]).logits[0, :, 0])
            terms = clipped(values[-1], each.inputs["old"][1:], each.inputs["returns"][1:])
            losses.append(torch.from_numpy(each.weights[1:]) @ terms)
            weight_sum += float(each.weights[1:].sum())
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        (loss / weight_sum).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        optimizer.step()
        yield [each.detach() for each in values], loss.item(), norm


@pytest.mark.parametrize(
    "variant", ["qwen3", pytest.param("qwen3, tied", marks=pytest.mark.nightly)]
)
def test_a_critic_is_that_of_one_process(tmp_path: Path, variant: str) -> None:
    base = make_folder(tmp_path / "base", variant)
    folder = tmp_path / "critic"
    model: Any = transformers.AutoModelForTokenClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    model.score.bias.data.fill_(0.3)
    model.save_pretrained(folder)
    runs = pool_of(4).run(run_critic, folder, tmp_path / "saved")
    for run in runs:
        assert_same_tensors(tensors_of(folder), run.first)
    for i, (values, loss, norm) in enumerate(updates(model)):
        for run in runs:
            for found, expected in zip(run.values[i], values, strict=True):
                np.testing.assert_allclose(
                    found[1:], expected, TOLERANCE, TOLERANCE, err_msg=STRATEGIES[i]
                )
                assert found[0] == 0
            assert run.losses[i] == pytest.approx(loss, rel=TOLERANCE), STRATEGIES[i]
            assert run.norms[i] == pytest.approx(norm, rel=TOLERANCE), STRATEGIES[i]
    export_checkpoint(tmp_path / "saved", tmp_path / "exported", max_file_bytes=10**9)
    exported = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "exported", dtype=torch.float32
    )
    own = model.state_dict()
    for run in runs:
        assert_same_tensors(run.last, dict(exported.state_dict()))
        assert run.of_batch[1] == pytest.approx(run.of_batch[0], rel=TOLERANCE)
        for name, tensor in run.last.items():
            torch.testing.assert_close(tensor, own[name], rtol=TOLERANCE, atol=TOLERANCE)


def run_adapted(
    folder: Path, saved: Path
) -> tuple[list[float], list[float | None], Tensors, Tensors]:
    """Losses and norms by strategy, and adapters before and the merged tensors after."""
    engine = make_engine(folder, *STRATEGIES, lora=LORA)
    adapters = dict(engine.hf_tensors("adapters"))
    losses, norms = [], []
    for name in STRATEGIES:
        one = in_strategy(engine, name)
        losses.append(one.forward_backward(one.plan(sequences()), value_loss).loss_sum)
        norms.append(one.optim_step())
    merged = dict(engine.hf_tensors())
    engine.save(saved)
    again = make_engine(folder, "pp2tp2", lora=LORA)
    again.load(saved)
    assert_same_tensors(merged, dict(again.hf_tensors()))
    engine.close()
    again.close()
    return losses, norms, adapters, merged


def test_the_head_is_trained_whole_next_to_adapters(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "qwen3")
    folder = tmp_path / "critic"
    model: Any = transformers.AutoModelForTokenClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    model.save_pretrained(folder)
    runs = pool_of(4).run(run_adapted, folder, tmp_path / "saved")
    config = peft.LoraConfig(
        r=LORA.rank,
        lora_alpha=int(LORA.alpha),
        target_modules=list(LORA.targets),
        modules_to_save=["score"],
    )
    adapted: Any = peft.get_peft_model(model, config)
    _, _, first, _ = runs[0]
    own = adapted.state_dict()
    missing: Any = adapted.load_state_dict(
        {name.replace(".weight", ".default.weight"): value for name, value in first.items()},
        strict=False,
    )
    assert not missing.unexpected_keys
    assert len(first) == sum("lora_" in name for name in own)
    for i, (_, loss, norm) in enumerate(updates(adapted)):
        for losses, norms, *_ in runs:
            assert losses[i] == pytest.approx(loss, rel=TOLERANCE), STRATEGIES[i]
            assert norms[i] == pytest.approx(norm, rel=TOLERANCE), STRATEGIES[i]
    expected = adapted.merge_and_unload().state_dict()
    exported = tmp_path / "exported"
    with pytest.raises(ConfigurationError, match="a value head was trained with them; give --mer"):
        export_checkpoint(
            tmp_path / "saved", exported, max_file_bytes=10**9, content=Content.ADAPTER
        )
    export_checkpoint(tmp_path / "saved", exported, max_file_bytes=10**9, content=Content.MERGED)
    for *_, merged in runs:
        assert_same_tensors(merged, tensors_of(exported))
        assert merged.keys() == expected.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


def run_fresh(folder: Path) -> Tensors:
    engine = make_engine(folder, "2*tp1")
    found = dict(engine.hf_tensors())
    engine.close()
    return found


def test_a_model_without_a_head_gets_a_new_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "qwen3", "qwen3")
    for found in pool_of(2).run(run_fresh, folder):
        assert 0.001 < found.pop("score.weight").std() < 0.1
        assert not found.pop("score.bias").any()
        expected = tensors_of(folder)
        del expected["lm_head.weight"]
        assert_same_tensors(expected, found)
