"""Imported, trained and exported, a model has transformers' loss, which shares no code with ours.

The checkpoint is loaded by the flags that the command prints, on ranks that share the model.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.hugging_face.export_hf import Content, export_checkpoint
from megatron.hydraulis.checkpoint.hugging_face.import_hf import import_folder, lora_flags
from megatron.hydraulis.checkpoint.hugging_face.model import model_flags
from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.checkpoint.manifest import model_of
from megatron.hydraulis.checkpoint.names import StoredModel
from megatron.hydraulis.checkpoint.saving import CheckpointSaver, SavedState, upstream_entries
from megatron.hydraulis.checkpoint.torch_dist import LAYERS, StoredCheckpoint
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.library.building import definition_of
from megatron.hydraulis.runtime.executor import make_forward_step
from tests.support.adapter_folders import make_adapter
from tests.support.checkpoints import make_engine, whole_tensors
from tests.support.gloo_pool import pool_of
from tests.support.huggingface_folders import (
    make_folder,
    tensors_of,
    transformers_loss,
    transformers_loss_and_norm,
)
from tests.support.plain_checkpoints import on_plain_ranks, train_and_save
from tests.unit.flags.argument_command import parse

pytestmark = pytest.mark.distributed

SAME_LOSS = 1e-5
ITERATION = 5


@pytest.mark.parametrize(
    ("variant", "strategy"),
    [
        ("llama", "tp2"),
        ("llama, tied, one head a group, biases", "pp2"),
        ("llama, stretched", "tp2"),
        ("qwen2", "tp2"),
        ("qwen3, tied", "tp2"),
        ("mistral", "tp2"),
        ("nemotron", "pp2"),
        ("nemotron, biases, whole heads", "tp2"),
        ("smollm3", "pp2"),
        ("smollm3, untied, biases", "tp2"),
        ("deepseek_v2", "tp2"),
        ("deepseek_v3", "tp2"),
        ("deepseek_v3, as Moonlight", "pp2"),
        ("qwen2, YaRN", "tp2"),
        ("ministral", "pp2"),
        ("gpt_oss", "tp2"),
        ("gpt_oss, other layers, rounded", "pp2"),
        ("mixtral, window, tied", "tp2"),
        ("qwen2_moe", "tp2"),
        ("qwen3_moe", "pp2"),
        ("qwen3_moe, some dense, tied", "tp2"),
    ],
)
def test_the_same_loss_before_and_after_training(
    variant: str, strategy: str, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "hf", variant)
    mega = tmp_path / "mega"
    flags = model_flags(import_folder(source, mega).model)
    batch = batch_of(61)
    losses = pool_of(2).run(load_train_save, flags, strategy, str(mega), batch)[-1]
    loss, norm = transformers_loss_and_norm(source, batch)
    assert losses[0] == pytest.approx(loss, rel=SAME_LOSS)
    assert losses[2] == pytest.approx(norm, rel=SAME_LOSS)
    assert abs(losses[1] - losses[0]) > 100 * SAME_LOSS  # another model
    back = tmp_path / "back"
    exported = export_checkpoint(mega, back, max_file_bytes=1 << 30)
    assert exported.checkpoint.name == f"iter_{ITERATION:07d}"
    assert tensors_of(back).keys() == tensors_of(source).keys()
    assert losses[1] == pytest.approx(transformers_loss(back, batch), rel=SAME_LOSS)


@pytest.mark.parametrize(
    ("variant", "targets", "strategy"),
    [
        ("qwen3", "all-linear", "tp2"),
        ("llama", ("q_proj", "v_proj", "down_proj"), "pp2"),
        ("mixtral", ("q_proj", "k_proj", "o_proj"), "tp2"),
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "tp2"),
        ("qwen2_moe", ("o_proj", "gate_proj", "down_proj"), "pp2"),
    ],
)
def test_an_adapter_of_peft_before_and_after_training(
    variant: str, targets: Any, strategy: str, tmp_path: Path
) -> None:
    base = make_folder(tmp_path / "base", variant)
    adapter = make_adapter(tmp_path / "adapter", base, targets)
    mega, back, merged = (tmp_path / name for name in ("mega", "back", "merged"))
    done = import_folder(base, mega, adapter=adapter)
    assert done.lora is not None
    flags = [*model_flags(done.model), *lora_flags(done.lora)]
    batch = batch_of(61)
    losses = pool_of(2).run(load_train_save, flags, strategy, str(mega), batch)[-1]
    assert losses[0] == pytest.approx(transformers_loss(adapter, batch), rel=SAME_LOSS)
    assert abs(losses[1] - losses[0]) > 100 * SAME_LOSS
    export_checkpoint(mega, back, max_file_bytes=1 << 30, content=Content.ADAPTER, like=base)
    assert losses[1] == pytest.approx(transformers_loss(back, batch), rel=SAME_LOSS)
    export_checkpoint(mega, merged, max_file_bytes=1 << 30, content=Content.MERGED)
    assert losses[1] == pytest.approx(transformers_loss(merged, batch), rel=SAME_LOSS)


def batch_of(vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, size=length + 1) for length in (100, 31, 2)]


def load_train_save(
    flags: list[str], strategy: str, root: str, batch: list[np.ndarray]
) -> list[float]:
    """On every rank: losses before and after one step, after which the model is saved, and the norm
    of its gradient."""
    words = [word for flag in flags for word in shlex.split(flag)]
    with tempfile.TemporaryDirectory() as folder:
        resolved = parse(Path(folder), *words, num_ranks=1)
    engine = make_engine(definition_of(resolved, "sdpa"), (strategy,), seed=99)
    model = model_of(resolved.args, resolved.vocabulary.size)
    loaded = load_checkpoint(Path(root) / "release", engine, model)
    assert not loaded.with_optimizer
    stored = StoredCheckpoint(loaded.path)._metadata.state_dict_metadata
    assert (
        set(StoredModel.of(engine.definition).objects) <= stored.keys()
    )  # so that Megatron can load it
    losses, norms = [], []
    for _ in range(2):
        outcome = engine.train_step(strategy, [pack(batch, 2)], make_forward_step())
        losses.append(outcome.loss.mean)
        norms.append(outcome.gradient_norm or 0.0)
        if len(losses) == 1:
            saver = CheckpointSaver(CheckpointFolder(Path(root)), engine)
            upstream = upstream_entries(resolved.args, ITERATION, engine.optimizer, engine.pool)
            saver.save(SavedState(ITERATION, model, {}, {}, upstream))
            saver.finish()
    return losses + norms


def test_plain_megatron_reads_what_was_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_folder(tmp_path / "hf", "qwen2")
    assert main(["import-hf", str(source), str(tmp_path / "mega")]) == 0
    read = pool_of(1).run(read_by_upstream, str(tmp_path / "mega" / "release"))[0]
    assert read["args"].num_layers == 3
    assert read["args"].add_qkv_bias
    assert read["iteration"] == 0
    embedding = read["embedding.word_embeddings.weight"]
    assert embedding.shape == (128, 32)
    assert (embedding[:61] == tensors_of(source)["model.embed_tokens.weight"].numpy()).all()


def read_by_upstream(path: str) -> dict[str, object]:
    """On a rank: everything, by upstream's code alone."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    # Upstream's load_plain_tensors would ask for the same, but fails with torch 2.15: it passes
    # a stored property that torch.empty does not know.
    wanted = {
        key: dist_checkpointing.ShardedTensor.from_rank_offsets(
            key, torch.empty(stored.size, dtype=stored.properties.dtype)
        )
        for key, stored in FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    tensors = dist_checkpointing.load(wanted, path)
    return dist_checkpointing.load_common_state_dict(path) | {
        key: tensor.numpy() for key, tensor in tensors.items() if hasattr(tensor, "numpy")
    }


def test_checkpoints_of_plain_megatron_ranks_are_read_layer_by_layer(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    on_plain_ranks(2, train_and_save, 2, 1, str(source), 1, "fully_reshardable")
    stored = StoredCheckpoint(source)
    expected = whole_tensors(source)
    assert set(stored.parameters) == {key for key in expected if not key.startswith("optimizer.")}
    assert stored.common_state()["args"].num_layers == 2
    for key in stored.parameters:
        is_layers = key.startswith(LAYERS)
        for layer in range(2) if is_layers else [None]:
            found = stored.read(key.removeprefix(LAYERS), layer)
            wanted = expected[key] if layer is None else expected[key][layer]
            assert torch.equal(found, wanted), (key, layer)
