"""An engine for the model of a Hugging Face folder: weights in and out, checkpoints, offload."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.hugging_face.export_hf import Content, export_checkpoint
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.library.batches import Batch
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.library.plans import estimate
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.forked_job import run_job
from tests.support.gloo_pool import pool_of
from tests.support.huggingface_folders import assert_same_tensors, make_folder, tensors_of

pytestmark = pytest.mark.distributed

NUM_RANKS = 3
LENGTHS = (9, 4, 14, 7)
Tensors = dict[str, torch.Tensor]


def make_engine(
    folder: Path, pool: str | Pool, *, trains: bool = True, lora: Lora | None = None
) -> Engine:
    """A pool that is an object brings a cost profile that is one, too."""
    profile = estimate(folder, "h100", pool, fp32=True) if isinstance(pool, Pool) else None
    return Engine.from_hf(
        folder,
        pool=pool,
        cost_profile=profile,
        optimizer=AdamWSettings(lr=1e-2) if trains else None,
        max_tokens_per_micro_batch=32,
        lora=lora,
        options=("--distributed-timeout-minutes", "1"),
    )


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 61, size=length) for length in LENGTHS]


def nll(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return -log_probs


def run_verbs(
    folder: Path, saved: Path, pool: str
) -> tuple[Tensors, list[np.ndarray], Tensors, Tensors]:
    """On every rank: tensors and log-probabilities of the folder, and tensors after two steps, of
    which one follows an offload; the latter once more from a checkpoint, on another pool."""
    noisy = logging.getLogger("megatron.core.models.gpt.gpt_model")
    noisy.setLevel(logging.NOTSET)
    engine = make_engine(folder, pool)
    assert noisy.level == logging.ERROR
    first = dict(engine.hf_tensors())
    log_probs = [each.numpy() for each in engine.forward(engine.plan(sequences()))["log_probs"]]
    with pytest.raises(HydraulisError, match="sequence 0: the model has"):
        engine.plan([np.zeros(10**6, dtype=np.int64)])
    engine.train_step(sequences(), nll)
    engine.save(saved)
    engine.offload()
    assert not engine.runtime.shards.parameters.untyped_storage().nbytes()
    engine.onload(optimizer=False)
    dict(engine.hf_tensors())
    for use in (lambda: engine.save(saved), lambda: engine.load(saved), engine.optim_step):
        with pytest.raises(HydraulisError, match="moments are on the host after offload"):
            use()
    engine.offload()
    with pytest.raises(HydraulisError, match="parameters are on the host after offload"):
        dict(engine.hf_tensors())
    with pytest.raises(HydraulisError, match="call onload first"):
        engine.train_step(sequences(), nll)
    engine.onload()
    engine.train_step(sequences(), nll)
    engine.save(saved)
    again = make_engine(folder, Pool.of(Strategy.parse("pp3", NUM_RANKS)))
    assert again.runtime.pool.strategies[0].name == "pp3"
    again.load(saved)
    after = dict(engine.hf_tensors())
    loaded = dict(again.hf_tensors())
    check_shards(engine, after)
    assert int(again.runtime.optimizer.num_steps) == 2
    check_reference(make_engine(folder, "2*tp1+idle", trains=False), engine, saved)
    losses = [each.train_step(sequences(), nll).loss.mean for each in (engine, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    engine.close()
    again.close()
    return first, log_probs, after, loaded


def check_shards(engine: Engine, whole: Tensors) -> None:
    """Each element of each tensor is in one rank's part."""
    names = set()
    for shard in engine.hf_shards():
        places = shard.places(torch.arange(len(shard.values)))
        values = torch.zeros(whole[shard.name].numel()).index_add(0, places, shard.values)
        counts = torch.bincount(places, minlength=len(values))
        for each in (values, counts):
            dist.all_reduce(each)
        assert (counts == 1).all()
        assert torch.equal(values.view(shard.shape), whole[shard.name])
        names.add(shard.name)
    assert names == whole.keys()


def check_reference(reference: Engine, engine: Engine, saved: Path) -> None:
    """An engine without optimizer has parameters alone, which are those of the checkpoint."""
    shards = reference.runtime.shards
    assert shards.parameters.numel() == shards.gradients.numel() == 0
    assert shards.frozen.numel()
    assert shards.frozen.dtype == reference.runtime.dtype
    assert reference._built is not None
    cost_model = reference._built.planning.cost_model
    assert isinstance(cost_model, AnalyticCostModel)
    assert not cost_model.has_optimizer
    reference.load(saved)
    reference.offload()
    assert not shards.frozen.untyped_storage().nbytes()
    reference.onload()
    found, expected = (
        each.forward(each.plan(sequences()))["log_probs"] for each in (reference, engine)
    )
    torch.testing.assert_close(found, expected)
    for use in (
        lambda: reference.forward_backward(reference.plan(sequences()), nll),
        lambda: reference.train_step(sequences(), nll),
        lambda: reference.save(saved),
    ):
        with pytest.raises(HydraulisError, match="made with optimizer=None"):
            use()
    reference.discard_gradients()
    reference.close()


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "qwen3", pytest.param("qwen2_moe", marks=pytest.mark.nightly)],
)
def test_weights_go_in_and_out_and_checkpoints_continue(family: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / family, family)
    pool = "tp2+tp1" if family == "qwen3" else "tp2ep2+tp1"
    runs = pool_of(NUM_RANKS).run(run_verbs, folder, tmp_path / "saved", pool)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = tensors_of(folder)
    for first, log_probs, after, loaded in runs:
        assert_same_tensors(stored, first)
        assert_same_tensors(after, loaded)
        assert any(not torch.equal(stored[name], after[name]) for name in stored)
        for tokens, found in zip(sequences(), log_probs, strict=True):
            with torch.no_grad():
                logits = model(torch.from_numpy(tokens)[None]).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
            np.testing.assert_allclose(found[1:], expected, rtol=1e-5, atol=1e-5)
            assert found[0] == 0
    export_checkpoint(tmp_path / "saved", tmp_path / "exported", max_file_bytes=10**9)
    assert_same_tensors(runs[0][2], tensors_of(tmp_path / "exported"))


def train_adapters(folder: Path, saved: Path) -> list[np.ndarray]:
    """On every rank: log-probabilities after two updates of adapters alone."""

    def log_probs(engine: Engine) -> list[torch.Tensor]:
        return engine.forward(engine.plan(sequences()))["log_probs"]

    def adapted(pool: str) -> Engine:
        lora = Lora(rank=2, alpha=3.0, targets=("linear_qkv", "down_proj", "lm_head"))
        return make_engine(folder, pool, lora=lora)

    engine = adapted("tp2+tp1")
    before, stored = log_probs(engine), tensors_of(folder)
    torch.testing.assert_close(before, log_probs(make_engine(folder, "pp3", trains=False)))
    for _ in range(2):
        engine.train_step(sequences(), nll)
    after = log_probs(engine)
    assert not any(torch.allclose(*each, atol=1e-3) for each in zip(before, after, strict=True))
    assert_same_tensors(stored, dict(engine.hf_tensors("base")))
    engine.save(saved)
    again = adapted("pp3")
    again.load(saved)
    torch.testing.assert_close(after, log_probs(again))
    return [each.numpy() for each in after]


def test_adapters_are_trained_saved_and_exported(tmp_path: Path) -> None:
    from peft import PeftModel

    folder = make_folder(tmp_path / "qwen3", "qwen3")
    runs = pool_of(NUM_RANKS).run(train_adapters, folder, tmp_path / "saved")
    adapter = tmp_path / "adapter"
    export_checkpoint(
        tmp_path / "saved", adapter, max_file_bytes=10**9, content=Content.ADAPTER, like=folder
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter))
    for tokens, found in zip(sequences(), runs[0], strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
        np.testing.assert_allclose(found[1:], expected, rtol=1e-5, atol=1e-5)


def run_page(folder: Path, example: str, saved: Path) -> list[str]:
    """On one rank: the example, in a folder for its checkpoints."""
    os.chdir(saved)
    given = sequences()
    names: dict[str, Any] = {
        "folder": folder,
        "pool": "tp1",
        "sequences": given,
        "advantages": [torch.ones(len(each)) for each in given],
    }
    exec(example, names)
    assert names["norm"] > 0
    return names["names"]


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", "llama")
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (names,) = pool_of(1).run(run_page, folder, example, tmp_path)
    assert set(names) == set(tensors_of(folder))
    assert CheckpointFolder(tmp_path / "checkpoints").latest() == 2


def change_while_taking_tensors(folder: Path, saved: Path) -> list[str]:
    """On every rank: the messages, and what does not change parameters."""
    engine = make_engine(folder, "2*tp1")
    engine.save(saved)
    before = dict(engine.hf_tensors())
    found = []

    def train() -> None:
        engine.train_step(sequences(), nll)

    for change in (train, lambda: engine.load(saved), engine.offload, engine.close):
        engine_stream = engine.hf_tensors()
        next(engine_stream)
        change()
        with pytest.raises(HydraulisError) as error:
            next(engine_stream)
        found.append(str(error.value))
        if change == engine.offload:
            engine.onload()
            stream = engine.hf_tensors()
            tensors = dict([next(stream)])
            batch = engine.plan(sequences())
            engine.forward(batch)
            engine.forward_backward(batch, nll)
            engine.discard_gradients()
            assert_same_tensors(before, tensors | dict(stream))
    return found


def test_tensors_are_of_one_update(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", "llama")
    of_ranks = pool_of(2).run(change_while_taking_tensors, folder, tmp_path / "saved")
    for after_update, after_load, after_offload, after_close in of_ranks:
        assert "the parameters changed after the first 1" in after_update
        assert after_load == after_update
        assert "on the host after offload" in after_offload
        assert "this one is closed" in after_close


def close_engines(folder: Path) -> list[int]:
    """Open files of this process after each of several engines, whose names outlive `close`."""
    found, kept = [], []
    for _ in range(4):
        engine = make_engine(folder, "tp2")
        batch = engine.plan(sequences())
        engine.train_step(sequences(), nll)
        for _ in range(2):
            engine.close()
        kept.append((engine, batch))
        check_refusals(engine, batch, folder)
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def check_refusals(engine: Engine, batch: Batch, folder: Path) -> None:
    """Every call after `close` is refused."""
    for use in (
        lambda: engine.plan(sequences()),
        lambda: engine.forward(batch),
        lambda: engine.forward_backward(batch, nll),
        lambda: engine.batch_loss(batch, lambda of: of["log_probs"][0].sum()),
        lambda: engine.train_step(sequences(), nll),
        engine.optim_step,
        engine.discard_gradients,
        engine.hf_tensors,
        engine.hf_shards,
        engine.offload,
        engine.onload,
        lambda: engine.save(folder),
        lambda: engine.load(folder),
    ):
        with pytest.raises(HydraulisError, match="this one is closed; make another one"):
            use()


def test_a_closed_engine_keeps_no_files_and_refuses_every_call(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", "llama")
    for num_open in pool_of(2).run(close_engines, folder):
        assert num_open[1:] == [num_open[1]] * 3


def errors(folder: Path) -> list[str]:
    """On every rank: the messages of wrong arguments."""
    found = []
    options = ("--clip-grad", "0.5", "--loss-normalization", "sequence", "--seed", "1")
    wrong: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
        (folder / "nothing", "tp1+2*tp1", {}),
        (folder, "tp2", {}),
        (folder, "3*tp1", {"options": options}),
        (folder, "3*tp1", {"dtype": torch.float16}),
        (folder, "3*tp1", {"optimizer": 1e-3}),
        (folder, "3*tp1", {"options": "--bf16"}),
        (folder, "3*tp1", {"options": ["--seed", 1]}),
        (folder, "3*tp1", {"cost_profile": {"schemes": []}}),
        (5, "3*tp1", {}),
        (folder, 5, {}),
        (folder, "3*tp1", {"options": ["--seed", str(1 + dist.get_rank())]}),
    )
    for name, pool, more in wrong:
        given: dict[str, Any] = {"optimizer": AdamWSettings(lr=1e-2), **more}
        with pytest.raises(HydraulisError) as error:
            Engine.from_hf(name, pool=pool, **given)
        found.append(str(error.value))
    return found


def test_wrong_arguments_raise_on_every_rank(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", "llama")
    of_ranks = pool_of(NUM_RANKS).run(errors, folder)
    assert of_ranks == of_ranks[:1] * NUM_RANKS
    assert "there is no such folder" in of_ranks[0][0]
    assert "3 ranks" in of_ranks[0][1] or "the job has 3" in of_ranks[0][1]
    assert "options has --clip-grad, --loss-normalization; leave them out" in of_ranks[0][2]
    assert "dtype is torch.float16; give dtype=torch.bfloat16" in of_ranks[0][3]
    assert "optimizer holds AdamWSettings, or None" in of_ranks[0][4]
    assert "options is a list of words but this is '--bf16'" in of_ranks[0][5]
    assert "options is a list of words but this is ['--seed', 1]" in of_ranks[0][6]
    assert "cost_profile is a ProfileCostModel or its path but this is {" in of_ranks[0][7]
    assert "named by its path but this is 5" in of_ranks[0][8]
    assert "pool is a list of strategies, a Pool or the path" in of_ranks[0][9]
    assert "same arguments but ranks [1, 2] have others" in of_ranks[0][10]


def test_a_loss_that_raises_on_one_rank_ends_all(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", "llama")

    def program(argv: Sequence[str]) -> None:
        engine = make_engine(folder, "2*tp1")

        def loss(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
            if log_probs.any() and engine.runtime.rank == 1:  # not in the check before
                raise RuntimeError("a bug in the loss")
            return -log_probs

        engine.train_step(sequences(), loss)

    # Without a launcher: the other ends because the failing rank's connections are closed.
    outcome = run_job([], 2, tmp_path, program=program, ends_others=False, timeout_s=45.0)
    assert not outcome.timed_out
    assert [outcome.ranks[rank].status for rank in range(2)] == [1, 1]
    assert "a bug in the loss" in outcome.ranks[1].stderr
    assert "onnection" in outcome.ranks[0].stderr
