"""Adapters of peft to a checkpoint and back, and merged: as peft itself computes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint.hugging_face.config import read_model
from megatron.hydraulis.checkpoint.hugging_face.export_hf import Content, export_checkpoint
from megatron.hydraulis.checkpoint.hugging_face.import_hf import import_folder
from megatron.hydraulis.checkpoint.hugging_face.tensors import adapter_rows
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.loop.hugging_face import FolderOfRun
from megatron.hydraulis.lora import Lora, adapters
from tests.support.adapter_folders import (
    TENSORS,
    change_adapter,
    change_adapter_config,
    logits_of,
    logits_with,
    make_adapter,
)
from tests.support.checkpoints import whole_tensors
from tests.support.full_disk import largest_file
from tests.support.huggingface_folders import (
    VARIANTS,
    assert_same_tensors,
    make_folder,
    tensors_of,
)

GB = 1 << 30
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TOKENS = torch.arange(60).view(2, 30)
PREFIX = "base_model.model.model.layers."


@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        ("qwen3", "all-linear"),
        ("llama, tied, one head a group, biases", ("v_proj", "down_proj", "gate_proj")),
        ("llama", ("q_proj", "lm_head")),
        ("mixtral", ATTENTION),
        ("nemotron", ("up_proj", "k_proj")),
        ("qwen2_moe", (*ATTENTION, *MLP)),
        ("deepseek_v3", LATENTS),
        ("deepseek_v2", ("q_proj", "kv_b_proj")),
    ],
)
def test_of_peft_and_back(variant: str, targets: Any, tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", variant)
    adapter = make_adapter(tmp_path / "adapter", base, targets)
    done = import_folder(base, tmp_path / "mega", adapter=adapter)
    back, merged = tmp_path / "back", tmp_path / "merged"
    export_checkpoint(done.checkpoint, back, max_file_bytes=GB, content=Content.ADAPTER, like=base)
    theirs = tensors_of(adapter)
    theirs.pop("base_model.model.lm_head.base_layer.weight", None)  # a copy of the model's
    assert_same_tensors(theirs, tensors_of(back))
    given, ours = (
        json.loads((each / "adapter_config.json").read_text()) for each in (adapter, back)
    )
    assert set(ours["target_modules"]) == set(given["target_modules"])
    assert ours.keys() <= given.keys()
    assert all(ours[key] == given[key] for key in ours.keys() - {"target_modules"}), ours
    expected = logits_with(base, adapter, TOKENS, merged=False)
    assert (expected - logits_of(base, TOKENS)).abs().max() > 0.1
    torch.testing.assert_close(logits_with(base, back, TOKENS, merged=False), expected)
    torch.testing.assert_close(logits_of(back, TOKENS), expected)  # by the name of its base
    export_checkpoint(done.checkpoint, merged, max_file_bytes=GB, content=Content.MERGED)
    expected = logits_with(base, adapter, TOKENS, merged=True)
    torch.testing.assert_close(logits_of(merged, TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in bf16 and an adapter in fp32, as peft trains them."""
    path = tmp_path_factory.mktemp("folders")
    base = make_folder(path / "base", "qwen3", torch.bfloat16)
    return base, make_adapter(path / "adapter", base, ("q_proj", "v_proj", "up_proj"))


@pytest.fixture(scope="module")
def checkpoint(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, adapter = folders
    return import_folder(base, tmp_path_factory.mktemp("mega") / "m", adapter=adapter).checkpoint


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_adapter_of_a_family_has_its_sizes(variant: str, tmp_path: Path) -> None:
    """By the table that training goes by."""
    model = import_folder(make_folder(tmp_path / "hf", variant), tmp_path / "mega").model
    there = list(adapters(model.shape()))
    if not model.untie_embeddings_and_output_weights:
        with pytest.raises(ConfigurationError, match=r"embeddings are tied: .* leave lm_head out"):
            adapter_rows(model, Lora(3, 1.0, ("q_proj", "lm_head")))
        there = [each for each in there if each.target != "lm_head"]
    lora = Lora(3, 1.0, tuple(each.target for each in there))
    found = adapter_rows(model, lora)
    assert {a.place.key for a, _ in found.values()} == {
        f"{each.module}.adapters.{each.target}.lora_A" for each in there
    }
    for a, b in found.values():
        sizes = {
            (each.num_inputs, each.num_outputs)
            for each in there
            if a.place.key == f"{each.module}.adapters.{each.target}.lora_A"
        }
        assert sizes == {(a.shape[1], b.shape[0])}, a.name
        assert a.shape[0] == b.shape[1] == 3


def test_places_in_a_checkpoint(folders: tuple[Path, Path], checkpoint: Path) -> None:
    ours, theirs = whole_tensors(checkpoint), tensors_of(folders[1])
    found = {key: tensor for key, tensor in ours.items() if ".adapters." in key}
    at = "decoder.layers.self_attention.linear_qkv.adapters"
    assert found.keys() == {
        f"{module}.{name}"
        for module in (
            f"{at}.q_proj",
            f"{at}.v_proj",
            "decoder.layers.mlp.linear_fc1.adapters.up_proj",
        )
        for name in ("lora_A", "lora_B")
    }
    assert found[f"{at}.q_proj.lora_A"].dtype == torch.float32
    for layer in range(3):
        expected = theirs[f"{PREFIX}{layer}.self_attn.v_proj.lora_B.weight"]
        assert torch.equal(found[f"{at}.v_proj.lora_B"][layer], expected)


def test_merged_weights_are_rounded_once(
    folders: tuple[Path, Path], checkpoint: Path, tmp_path: Path
) -> None:
    base, adapter = map(tensors_of, folders)
    export_checkpoint(checkpoint, tmp_path / "out", max_file_bytes=GB, content=Content.MERGED)
    merged = tensors_of(tmp_path / "out")
    assert merged.keys() == base.keys()
    for name, before in base.items():
        expected = before.float()
        linear = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{linear}.lora_A.weight" in adapter:
            a, b = (adapter[f"{linear}.lora_{each}.weight"] for each in "AB")
            expected += 2.0 * b @ a
        assert torch.equal(merged[name], expected.bfloat16()), name


def test_commands_name_flags_and_what_to_choose(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = folders
    mega, back = tmp_path / "mega", tmp_path / "back"
    assert main(["import-hf", str(base), str(mega), "--adapter", str(adapter)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("\\", "").split())
    assert "--lora-rank 4 --lora-alpha 8 --lora-targets q_proj v_proj up_proj" in printed
    assert main(["export-hf", str(mega), str(back)]) != 0
    message = capsys.readouterr().err
    assert all(word in message for word in ("q_proj, v_proj, up_proj", "--adapter", "--merge"))
    assert main(["export-hf", str(mega), str(back), "--adapter"]) == 0
    assert "adapters of 3 layers, rank 4" in capsys.readouterr().out
    assert json.loads((back / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    import_folder(base, tmp_path / "plain")
    for option in ("--adapter", "--merge"):
        assert main(["export-hf", str(tmp_path / "plain"), str(tmp_path / "x"), option]) != 0
        assert f"{option} is for adapters but the run trained none" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


A, B = (f"{PREFIX}1.self_attn.q_proj.lora_{each}.weight" for each in "AB")


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda path: change_adapter_config(path, **changes)


def tensor(name: str, change: Callable[[Any], torch.Tensor]) -> Callable[[Path], None]:
    return lambda path: change_adapter(path, lambda t: t.update({name: change(t.get(name))}))


BAD_ADAPTERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "kind": (config(peft_type="LOHA"), ["peft_type must be LORA", "LOHA"]),
    "rslora": (config(use_rslora=True), ["use_rslora is True", "merge_and_unload"]),
    "dora": (config(use_dora=True), ["use_dora is True", "merge_and_unload"]),
    "dropout": (config(lora_dropout=0.1), ["lora_dropout is 0.1", "set lora_dropout to 0"]),
    "two": (
        config(lora_dropout=0.1, lora_bias=True),
        ["lora_dropout is 0.1", "lora_bias is True", "merge_and_unload"],
    ),
    "biases": (config(bias="lora_only"), ["bias is lora_only"]),
    "whole modules": (config(modules_to_save=["lm_head"]), ["modules_to_save is ['lm_head']"]),
    "ranks": (config(rank_pattern={"q_proj": 2}), ["rank_pattern is {'q_proj': 2}"]),
    "alphas": (config(alpha_pattern={"q_proj": 2}), ["alpha_pattern"]),
    "some layers": (config(layers_to_transform=[1]), ["layers_to_transform is [1]"]),
    "transposed": (config(fan_in_fan_out=True), ["fan_in_fan_out is True"]),
    "parameters": (config(target_parameters=["experts.down_proj"]), ["target_parameters"]),
    "another base": (config(init_lora_weights="pissa"), ["init_lora_weights is pissa"]),
    "of the future": (config(use_new_idea=True), ["use_new_idea is True"]),
    "rank": (config(r=2), ["lora_A.weight is (4, 32) instead of (2, 32)", "rank 2"]),
    "no rank": (config(r=0), ["rank of at least 1"]),
    "text": (config(r="4"), ["r must be", "'4'"]),
    "missing": (lambda path: change_adapter(path, lambda t: t.__delitem__(B)), [B, "missing"]),
    "shape": (
        tensor(B, lambda t: t[:-1].contiguous()),
        [B, "(63, 4) instead of (64, 4)", "the model that it was trained with, "],
    ),
    "experts": (
        tensor(f"{PREFIX}0.mlp.experts.3.w1.lora_A.weight", lambda _: torch.ones(2)),
        ["experts.3.w1.lora_A.weight have no counterpart", "adapters can be of q_proj, k_proj"],
    ),
    "magnitude": (
        tensor(f"{PREFIX}0.self_attn.q_proj.lora_magnitude_vector", lambda _: torch.ones(2)),
        ["lora_magnitude_vector have no counterpart"],
    ),
    "no adapter": (
        lambda path: change_adapter(path, lambda t: [t.pop(name) for name in list(t)]),
        ["adapters can be of q_proj, k_proj", "there are none"],
    ),
    "two dtypes": (tensor(A, lambda t: t.half()), ["one dtype", "float16"]),
    "no configuration": (lambda path: (path / "adapter_config.json").unlink(), ["adapter_config"]),
    "pickled": (
        lambda path: (path / TENSORS).rename(path / "adapter_model.bin"),
        ["adapter_model.bin", "not read"],
    ),
    "nothing": (shutil.rmtree, ["no such folder"]),
}


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_adapters_that_cannot_be_imported(
    case: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = folders[0], tmp_path / "adapter"
    shutil.copytree(folders[1], adapter)
    damage, words = BAD_ADAPTERS[case]
    damage(adapter)
    with pytest.raises((ConfigurationError, CheckpointError)) as caught:
        import_folder(base, tmp_path / "mega", adapter=adapter)
    message = str(caught.value)
    assert all(word in message for word in (*words, "; ")), message
    assert not (tmp_path / "mega").exists()


def test_an_adapter_is_no_model(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, adapter = folders
    assert main(["import-hf", str(adapter), str(tmp_path / "out")]) == 2
    said = f"hydraulis import-hf MODEL OUT --adapter {adapter},"
    assert said in " ".join(capsys.readouterr().err.split())
    for read in (read_model, lambda path: FolderOfRun.named_in(["--hf", str(path)])):
        with pytest.raises(ConfigurationError, match="this is an adapter of "):
            read(adapter)


def test_an_adapter_of_another_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_folder(tmp_path / "other", "llama")
    words = rf"q_proj.lora_B.weight is \(64, 4\) instead of \(32, 4\).*{re.escape(str(folders[0]))}"
    with pytest.raises(CheckpointError, match=words):
        import_folder(other, tmp_path / "mega", adapter=folders[1])


@pytest.mark.parametrize("content", [Content.ADAPTER, Content.MERGED])
def test_a_full_disk_and_an_existing_folder(
    content: Content, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"

    def export() -> None:
        export_checkpoint(checkpoint, output, max_file_bytes=GB, content=content)

    with largest_file(4_000), pytest.raises(CheckpointError, match="cannot be written"):
        export()
    assert list(tmp_path.iterdir()) == []
    export()
    with pytest.raises(CheckpointError, match="there is something"):
        export()
