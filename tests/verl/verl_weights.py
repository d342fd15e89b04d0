"""verl's checkpoint engine sends a rollout engine what has changed in our engine's weights.

Its transport needs GPUs and cupy: what it would send is recorded.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import left_right_2_no_padding

from megatron.hydraulis.library.verl_engine import HydraulisEngineConfig
from tests.support.gloo_pool import pool_of
from tests.verl.one_process import NUM_RANKS, TIMEOUT_S, rollout, use_as_verl_rank

NUM_SYNCS = 3
LR_OF_FEW_CHANGES = 1e-6
"""Most weights stay the same in bf16."""

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def checkpoint_engine(received: dict[str, Tensor]) -> Any:
    """verl's checkpoint engine, whose flushes go to a rollout engine's weights."""
    absent = [name for name in ("cupy", "zmq") if name not in sys.modules]
    sys.modules.update({name: MagicMock() for name in absent})
    from verl.checkpoint_engine.delta_checkpoint_engine import DeltaShardedCheckpointEngine

    for name in absent:
        del sys.modules[name]

    class Recorded(DeltaShardedCheckpointEngine):
        def _publish_values_flush(self, params: Any, values: Tensor, **_: Any) -> None:
            for each in params:
                received[each.name] = values[each.val_start : each.val_end].view(each.shape).clone()

        def _publish_flush(self, flush: Any, **_: Any) -> None:
            for each in flush.params:
                places = flush.positions_cpu[each.pos_start : each.pos_end].view(torch.int32)
                values = flush.values_gpu[each.val_start : each.val_end]
                assert values.dtype == received[each.name].dtype
                received[each.name].view(-1)[places.long()] = values

        def _start_zmq_server(self, *_: Any) -> None:
            """There is no transport."""

        _publish_terminal = _release_staging_pool = _start_zmq_server

    is_master = dist.get_rank() == 0
    engine = Recorded(bucket_size=5000, is_master=is_master, batch_gather=4)
    engine.rank = 0 if is_master else -1
    return engine


def loss(model_output: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
    return -model_output["log_probs"].values().sum(), {}


def send_weights(folder: Path) -> tuple[list[Any], list[bool]]:
    """The share of elements that each synchronisation sent after an update, and whether the rollout
    engine had the weights then, bit by bit."""
    use_as_verl_rank()
    engine = EngineRegistry.new(
        "language_model",
        "hydraulis",
        model_config=HFModelConfig(path=str(folder)),
        engine_config=HydraulisEngineConfig(pool=["tp2+2*tp1", "pp2+tp2"], dtype="bf16"),
        optimizer_config=FSDPOptimizerConfig(lr=LR_OF_FEW_CHANGES),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    received: dict[str, Tensor] = {}
    sender = checkpoint_engine(received)
    found, same = [], []
    for _ in range(NUM_SYNCS):
        data = left_right_2_no_padding(rollout(20)[2 * dist.get_rank() :][:2])
        engine.train_batch(data, loss)
        engine.to("another device", optimizer=False)
        metrics = asyncio.run(sender.send_weights(engine))
        found.append((metrics or {}).get("checkpoint_engine/changed_ratio"))
        whole = dict(engine.get_per_tensor_param()[0])
        same.append(
            received.keys() == whole.keys()
            and all(torch.equal(received[name], whole[name].bfloat16()) for name in whole)
        )
    engine.engine.close()
    return found, same


def test_what_has_changed_is_sent(folder: Path) -> None:
    (shares, same), *_ = pool_of(NUM_RANKS).run(send_weights, folder, timeout_s=TIMEOUT_S)
    assert shares[0] == 1.0
    for share in shares[1:]:
        assert 0.0 < share < 0.5
    assert same == [True] * NUM_SYNCS
