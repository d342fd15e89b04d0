"""An engine with adapters: what it exports, alone and merged, and its own reference policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.adapters import Adapters
from tests.distributed.test_engine_from_hf import nll, sequences
from tests.support.gloo_pool import pool_of
from tests.support.huggingface_folders import assert_same_tensors, make_folder, tensors_of

pytestmark = pytest.mark.distributed

LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "linear_fc1", "down_proj", "lm_head"))
TOLERANCE = 1e-5
Tensors = dict[str, Tensor]


def run_adapters(folder: Path) -> tuple[dict[str, Tensors], list[list[np.ndarray]]]:
    """After two updates: tensors by content, and log-probabilities with adapters and without."""
    given: dict[str, Any] = {
        "pool": "tp2+tp1",
        "optimizer": AdamWSettings(lr=1e-2),
        "max_tokens_per_micro_batch": 32,
        "lora": LORA,
    }
    with pytest.raises(ConfigurationError, match="the model has none for lm_head"):
        Engine.from_hf(folder, value_head=True, **given)
    engine = Engine.from_hf(folder, **given)
    for _ in range(2):
        engine.train_step(sequences(), nll)
    tensors = {name: dict(engine.hf_tensors(name)) for name in ("merged", "base", "adapters")}
    with pytest.raises(ConfigurationError, match="content is 'all'"):
        engine.hf_tensors("all")
    with pytest.raises(ConfigurationError, match="without adapters but lora is rank 3"):
        engine.hf_shards()
    batch = engine.plan(sequences())
    with patch.object(Adapters, "forward", side_effect=AssertionError("a product is computed")):
        without = engine.forward(batch, adapters=False)["log_probs"]
    log_probs = [engine.forward(batch)["log_probs"], without]
    engine.close()
    return tensors, [[each.numpy() for each in found] for found in log_probs]


def log_probs_of(model: Any) -> list[np.ndarray]:
    found = []
    for tokens in map(torch.from_numpy, sequences()):
        with torch.no_grad():
            logs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(logs.gather(1, tokens[1:, None])[:, 0].numpy())
    return found


def test_tensors_are_those_of_peft(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "qwen3", "qwen3")
    runs = pool_of(3).run(run_adapters, folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    base, merged, adapted = (load(folder, dtype=torch.float32) for _ in range(3))
    tensors, log_probs = runs[0]
    merged.load_state_dict(tensors["merged"])
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    model = peft.get_peft_model(
        adapted, peft.LoraConfig(r=LORA.rank, lora_alpha=6, target_modules=targets)
    )
    result: Any = peft.set_peft_model_state_dict(model, tensors["adapters"])
    assert not result.unexpected_keys
    expected = [log_probs_of(each) for each in (model, merged, base)]
    assert max(np.abs(a - b).max() for a, b in zip(expected[0], expected[2], strict=True)) > 0.01
    for tensors, log_probs in runs:
        assert_same_tensors(tensors_of(folder), tensors["base"])
        assert_same_tensors(runs[0][0]["merged"], tensors["merged"])
        for found, (with_, of_merged, without) in zip(
            zip(*log_probs, strict=True), zip(*expected, strict=True), strict=True
        ):
            np.testing.assert_allclose(found[0][1:], with_, TOLERANCE, TOLERANCE)
            np.testing.assert_allclose(found[0][1:], of_merged, TOLERANCE, TOLERANCE)
            np.testing.assert_allclose(found[1][1:], without, TOLERANCE, TOLERANCE)
