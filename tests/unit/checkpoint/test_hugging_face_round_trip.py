"""Hugging Face folder to checkpoint and back, and the reverse: equal in every bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.hugging_face.export_hf import export_checkpoint
from megatron.hydraulis.checkpoint.hugging_face.import_hf import import_folder
from megatron.hydraulis.checkpoint.hugging_face.model import model_flags
from megatron.hydraulis.checkpoint.manifest import Manifest
from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from tests.support.checkpoints import whole_tensors, write_tensors
from tests.support.huggingface_folders import (
    VARIANTS,
    assert_same_tensors,
    change_config,
    make_folder,
    tensors_of,
)

CONFIG_KEYS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)


COMPANIONS = (
    *("chat_template.jinja", "generation_config.json", "merges.txt", "preprocessor_config.json"),
    *("special_tokens_map.json", "tokenizer_config.json", "vocab.json"),
)
NO_COMPANIONS = (
    *("README.md", "adapter_config.json", "embed_tokens.safetensors", "pytorch_model.bin"),
    *("tokens.index.json", "trainer_state.json", "tokenization_other.py"),
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_import_export_and_import_again(variant: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if "tied" in variant else torch.float32
    source = make_folder(tmp_path / "hf", variant, dtype)
    imported = import_folder(source, tmp_path / "mega", vocab_divisor=16)
    back = tmp_path / "back"
    exported = export_checkpoint(tmp_path / "mega", back, max_file_bytes=1 << 30)
    assert exported.model == imported.model
    assert exported.dtype_name == str(dtype).removeprefix("torch.")
    assert_same_tensors(tensors_of(source), tensors_of(back))
    before, after = (json.loads((p / "config.json").read_text()) for p in (source, back))
    keys = [key for key in CONFIG_KEYS if key in before]
    assert len(keys) >= len(CONFIG_KEYS) - 1  # Nemotron has no rms_norm_eps
    assert {key: before[key] for key in keys} == {key: after[key] for key in keys}
    import_folder(back, tmp_path / "again", vocab_divisor=16)
    assert_same_tensors(
        whole_tensors(tmp_path / "mega" / "release"), whole_tensors(tmp_path / "again" / "release")
    )


def test_rows_are_placed_as_in_megatron(tmp_path: Path) -> None:
    """By the layout that Megatron's own modules have, spelled out."""
    source = make_folder(tmp_path / "hf", "qwen2")
    import_folder(source, tmp_path / "mega", vocab_divisor=16)
    theirs, ours = tensors_of(source), whole_tensors(tmp_path / "mega" / "release")
    layer, size = 1, 8  # two groups of two query heads
    for kind in ("weight", "bias"):
        q, k, v = (theirs[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        expected = torch.cat([q[: 2 * size], k[:size], v[:size], q[2 * size :], k[size:], v[size:]])
        found = ours[f"decoder.layers.self_attention.linear_qkv.{kind}"][layer]
        assert torch.equal(found, expected)
    gate, up = (theirs[f"model.layers.{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    fc1 = ours["decoder.layers.mlp.linear_fc1.weight"]
    assert fc1.shape == (3, 96, 32)
    assert torch.equal(fc1[layer], torch.cat([gate, up]))
    for key, name in [
        ("embedding.word_embeddings", "model.embed_tokens"),
        ("output_layer", "lm_head"),
    ]:
        rows = ours[f"{key}.weight"]
        assert rows.shape == (64, 32)
        assert torch.equal(rows[:61], theirs[f"{name}.weight"])
        assert not rows[61:].any()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_in_one_tensor_a_layer(family: str, tmp_path: Path) -> None:
    """As transformers computes with them, and can write them."""
    source = make_folder(tmp_path / "hf", family)
    fused = make_folder(tmp_path / "fused", family, save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors_of(fused))
    import_folder(fused, tmp_path / "mega")
    export_checkpoint(tmp_path / "mega", tmp_path / "back", max_file_bytes=1 << 30)
    assert_same_tensors(tensors_of(source), tensors_of(tmp_path / "back"))


def test_experts_are_placed_as_in_megatron(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", "qwen3_moe, some dense, tied")
    import_folder(source, tmp_path / "mega")
    theirs, ours = tensors_of(source), whole_tensors(tmp_path / "mega" / "release")
    fc1 = ours["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"]
    assert fc1.shape == (4, 24, 32)
    prefix = "model.layers.2.mlp.experts.3."
    parts = [theirs[f"{prefix}{each}_proj.weight"] for each in ("gate", "up")]
    assert torch.equal(fc1[3], torch.cat(parts))
    assert "decoder.layers.2.pre_mlp_layernorm.weight" in ours
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in ours


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", "llama", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    import_folder(source, tmp_path / "mega")
    limit = 20_000
    export_checkpoint(tmp_path / "mega", tmp_path / "back", max_file_bytes=limit)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert set(index["weight_map"].values()) == {file.name for file in files}
    tensors = tensors_of(tmp_path / "back")
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    assert index["metadata"]["total_size"] == num_bytes
    assert all(file.stat().st_size < limit + 4096 for file in files)
    assert_same_tensors(tensors_of(source), tensors)


def test_a_checkpoint_with_tensors_for_every_layer(tmp_path: Path) -> None:
    """As upstream writes layers that differ."""
    source = make_folder(tmp_path / "hf", "qwen3")
    path = import_folder(source, tmp_path / "mega").checkpoint
    tensors = {}
    for key, tensor in whole_tensors(path).items():
        if key.startswith("decoder.layers."):
            for layer in range(3):
                tensors[key.replace("layers.", f"layers.{layer}.")] = tensor[layer]
        else:
            tensors[key] = tensor
    apart = CheckpointFolder(tmp_path / "apart").path_of(7)
    write_tensors(apart, tensors, StoredCheckpoint(path).common_state())
    export_checkpoint(apart, tmp_path / "back", max_file_bytes=1 << 30)
    assert_same_tensors(tensors_of(source), tensors_of(tmp_path / "back"))


def test_commands_print_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "hf", "qwen2, tied, one group", torch.bfloat16)
    mega, back = tmp_path / "mega", tmp_path / "back"
    capsys.readouterr()
    assert main(["import-hf", str(source), str(mega)]) == 0
    printed = capsys.readouterr().out
    assert "PARAMETERS ONLY" in printed
    assert "a new optimizer" in printed
    assert "--add-qkv-bias" in printed
    assert "--bf16" in printed
    assert "--untie" not in printed
    assert (mega / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert Manifest.read(mega / "release").model["vocab_size"] == 61
    assert main(["export-hf", str(mega), str(back), "--max-file-gb", "0.00002"]) == 0
    assert "qwen2, 3 layers, 61 tokens" in capsys.readouterr().out
    assert len(list(back.glob("*.safetensors"))) > 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_layers_of_multi_token_prediction_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "hf", "deepseek_v3")
    stored = tensors_of(folder)
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    further = {f"model.layers.{num_layers}.{name}": torch.ones(2) for name in ("a", "mlp.b")}
    save_file(stored | further, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_nextn_predict_layers=1)
    assert main(["import-hf", str(folder), str(tmp_path / "checkpoints")]) == 0
    assert "left out: layers of multi-token prediction (1)" in capsys.readouterr().out
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "again", max_file_bytes=10**9)
    assert_same_tensors(stored, tensors_of(tmp_path / "again"))
    assert json.loads((tmp_path / "again/config.json").read_text())["num_nextn_predict_layers"] == 0
    change_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(ConfigurationError, match=f"layers.{num_layers}.a.*no counterpart"):
        import_folder(folder, tmp_path / "others")


def test_layers_of_multi_token_prediction_come_and_go(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "deepseek_v3")
    stored = tensors_of(folder)
    config = json.loads((folder / "config.json").read_text())
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, start = f"model.layers.{number - 1}.", f"model.layers.{number}."
    stored |= {
        name.replace(last, start): torch.randn_like(tensor)
        for name, tensor in stored.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        stored[f"{start}{name}.weight"] = torch.randn(hidden)
    stored[f"{start}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    stored[f"{start}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"{start}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, num_nextn_predict_layers=1)
    done = import_folder(folder, tmp_path / "mega", predictions=True)
    assert "--mtp-num-layers 1" in model_flags(done.model)
    export_checkpoint(tmp_path / "mega", tmp_path / "back", max_file_bytes=10**9)
    assert_same_tensors(stored, tensors_of(tmp_path / "back"))
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1
    stored[f"{start}shared_head.head.weight"][0, 0] += 1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"shared_head.head.weight differs from lm_head"):
        import_folder(folder, tmp_path / "other", predictions=True)


def test_companions_of_another_folder(folder_with_tokenizer: Path, tmp_path: Path) -> None:
    source = folder_with_tokenizer
    path = import_folder(source, tmp_path / "mega").checkpoint
    back = tmp_path / "back"
    export_checkpoint(path, back, max_file_bytes=1 << 30, like=source)
    assert (back / "tokenizer.json").read_text() == "made up"
    for name in COMPANIONS:
        assert (back / name).read_bytes() == (source / name).read_bytes(), name
    assert {path.name for path in back.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", *COMPANIONS)
    }
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, [60, 4])
    (source / "generation_config.json").write_text('{"eos_token_id": 61}')
    with pytest.raises(ConfigurationError, match=r"generation_config.*eos_token_id .* 61"):
        export_checkpoint(path, tmp_path / "other", max_file_bytes=1 << 30, like=source)
    change_config(source, eos_token_id=[61])
    with pytest.raises(ConfigurationError, match=r"eos_token_id must be a token below the .* 61"):
        export_checkpoint(path, tmp_path / "other", max_file_bytes=1 << 30, like=source)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        export_checkpoint(path, tmp_path / "other", max_file_bytes=1 << 30, like=tmp_path)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def folder_with_tokenizer(tmp_path: Path) -> Path:
    source = make_folder(tmp_path / "hf", "llama")
    change_config(source, bos_token_id=3, eos_token_id=[60, 4])
    (source / "tokenizer.json").write_text("made up")
    for name in (*COMPANIONS, *NO_COMPANIONS):
        (source / name).write_text('{"eos_token_id": [60, 4]}')
    (source / "tokenizer").mkdir()
    return source
