"""A run that begins with the weights of ``--hf``, and goes on with its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.hydraulis.checkpoint.hugging_face.export_hf import Content, export_checkpoint
from megatron.hydraulis.loop.entry import EXIT_STATUS_OF_ERROR
from tests.support.forked_job import run_job
from tests.support.huggingface_folders import assert_same_tensors, make_folder, tensors_of
from tests.support.training_run import Launch

pytestmark = pytest.mark.distributed

OF_THE_FOLDER = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *("--num-query-groups", "--group-query-attention", "--swiglu", "--normalization"),
    *("--disable-bias-linear", "--position-embedding-type", "--vocab-size"),
    "--untie-embeddings-and-output-weights",
)
STAYS = ("--lr", "0", "--min-lr", "0", "--train-iters", "4", "--save-interval", "2")


def exported(checkpoint: Path, folder: Path) -> Path:
    export_checkpoint(checkpoint, folder, max_file_bytes=10**9)
    return folder


def test_weights_are_taken_once(launch: Launch, tmp_path: Path) -> None:
    """Without a step the first checkpoint has the folder's weights; a restart reads that one."""
    folder, saved = make_folder(tmp_path / "hf", "qwen2"), tmp_path / "saved"
    before = tensors_of(folder)
    words = ("--hf", str(folder), "--save", str(saved), "--load", str(saved), *STAYS)
    first = launch("tp2+tp1", 3, *words, "--exit-interval", "2", without=OF_THE_FOLDER)
    assert f"took the weights of {folder}; training begins with iteration 1" in first.outcome.stdout
    assert "from scratch" not in first.outcome.stdout
    assert_same_tensors(before, tensors_of(exported(saved, tmp_path / "first")))
    others = {name: tensor + 1 for name, tensor in before.items()}
    save_file(others, folder / "model.safetensors", {"format": "pt"})
    second = launch("3*tp1", 3, *words, without=OF_THE_FOLDER)
    assert [record.iteration for record in second.records] == [3, 4]
    assert "took the weights" not in second.outcome.stdout
    assert_same_tensors(before, tensors_of(exported(saved, tmp_path / "second")))
    alone = launch("pp3", 3, "--hf", str(folder), "--train-iters", "1", without=OF_THE_FOLDER)
    assert alone.losses[0] > first.losses[0]  # without --load, of the other weights


def test_adapters_begin_with_the_folder_and_go_on(launch: Launch, tmp_path: Path) -> None:
    folder, saved = make_folder(tmp_path / "hf", "qwen2"), tmp_path / "saved"
    words: tuple[str, ...] = (
        "--hf",
        str(folder),
        "--save",
        str(saved),
        "--load",
        str(saved),
        "--save-interval",
        "2",
    )
    words = (*words, "--train-iters", "4", "--lr", "1e-2")
    adapted = (*words, "--lora-rank", "2", "--lora-targets", "linear_qkv", "up_proj", "lm_head")
    first = launch("tp2+tp1", 3, *adapted, "--exit-interval", "2", without=OF_THE_FOLDER)
    assert f"took the weights of {folder}; adapters are new;" in first.outcome.stdout
    assert "rank 2, alpha 32, of q_proj, k_proj, v_proj, up_proj, lm_head" in first.outcome.stdout
    second = launch("3*tp1", 3, *adapted, without=OF_THE_FOLDER)
    assert [record.iteration for record in second.records] == [3, 4]
    assert "are new" not in second.outcome.stdout
    at = second.argv.index("--lora-rank")
    for argv, message in (
        ([*second.argv[:at], *second.argv[at + 6 :]], "has adapters but this run trains the model"),
        ([*second.argv, "--lora-rank", "3"], "lora_rank is 2 there and 3 here"),
    ):
        refused = run_job(argv, 3, tmp_path / message)
        assert EXIT_STATUS_OF_ERROR in refused.statuses
        assert message in refused.stderr
    merged = tmp_path / "merged"
    export_checkpoint(saved, merged, max_file_bytes=10**9, content=Content.MERGED)
    before, after = tensors_of(folder), tensors_of(merged)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    ends = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight", "lm_head.weight")
    assert changed == {name for name in before if name.endswith(ends)}
