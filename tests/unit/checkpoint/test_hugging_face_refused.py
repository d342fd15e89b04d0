"""What cannot be exported or imported: an error with rule, numbers and fix, and no files."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.checkpoint.hugging_face.export_hf import export_checkpoint
from megatron.hydraulis.checkpoint.hugging_face.import_hf import import_folder
from megatron.hydraulis.checkpoint.hugging_face.model import (
    HuggingFaceModel,
    model_from_arguments,
)
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from tests.support.checkpoints import whole_tensors, write_tensors
from tests.support.full_disk import largest_file
from tests.support.huggingface_folders import change_config, changed_file, flip_a_byte, make_folder

GB = 1 << 30
TENSORS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hf") / "hf", "qwen2, tied, one group")


@pytest.fixture(scope="module")
def checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_folder(folder, tmp_path_factory.mktemp("mega") / "mega").checkpoint


def refusal(source: Path, tmp_path: Path) -> str:
    """The error of an import, which leaves no files."""
    with pytest.raises((ConfigurationError, CheckpointError)) as caught:
        import_folder(source, tmp_path / "mega")
    assert not (tmp_path / "mega").exists()
    return str(caught.value)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / TENSORS)
    change(tensors)
    save_file(tensors, path / TENSORS, metadata={"format": "pt"})


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda path: change_config(path, **changes)


def tensor(name: str, change: Callable[[Any], torch.Tensor]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda t: t.update({name: change(t.get(name))}))


def file(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: changed_file(path / TENSORS, change)


def index(**weight_map: str) -> Callable[[Path], Any]:
    content = json.dumps({"weight_map": weight_map})
    return lambda path: (path / f"{TENSORS}.index.json").write_text(content)


NORM = "model.layers.1.input_layernorm.weight"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
OTHER_LLAMA3 = {"type": "llama3", "high_freq_factor": 8.0} | LLAMA3
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "architecture": (
        config(model_type="gemma"),
        ["deepseek_v3, gpt_oss, llama, ministral, ", "'gemma'"],
    ),
    "left out": (config(model_type="olmo3"), ["'olmo3', which has norms after attention"]),
    "task": (config(architectures=["Qwen2ForTokenClassification"]), ["Qwen2ForCausalLM"]),
    "activation": (config(hidden_act="gelu"), ["hidden_act", "silu", "'gelu'"]),
    "window": (config(use_sliding_window=True), ["use_sliding_window", "False"]),
    "layer types": (config(layer_types=["sliding_attention"] * 3), ["layer_types"]),
    "quantized": (config(quantization_config={"bits": 4}), ["quantization_config", "bits"]),
    "yarn": (config(rope_parameters=YARN), ["original_max_position_embeddings"]),
    "other limits of llama3": (
        config(rope_parameters=None, rope_scaling=OTHER_LLAMA3),
        ["high_freq_factor", "4.0", "8.0"],
    ),
    "broken base": (config(rope_parameters={"rope_theta": 10000.5}), ["rope_theta", "10000.5"]),
    "stretched by a fraction": (
        config(rope_parameters={"rope_type": "linear", "factor": 1.5}),
        ["whole factor", "1.5"],
    ),
    "part of a head": (config(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    "heads": (config(num_key_value_heads=3), ["4 heads", "3 query groups"]),
    "no size": (config(intermediate_size=None), ["'intermediate_size'"]),
    "text for a number": (config(hidden_size="32"), ["hidden_size", "'32'"]),
    "more layers than tensors": (
        config(num_hidden_layers=4, layer_types=None),
        ["model.layers.3", "missing"],
    ),
    "a billion layers": (
        config(num_hidden_layers=10**9, layer_types=None),
        ["num_hidden_layers", "at most 10,000", "1000000000"],
    ),
    "another shape": (config(vocab_size=60), ["embed_tokens", "(60, 32)", "(61, 32)"]),
    "untied": (config(tie_word_embeddings=False), ["lm_head.weight", "missing"]),
    "missing": (lambda path: rewrite(path, lambda t: t.__delitem__(NORM)), [NORM, "missing"]),
    "shape": (tensor(NORM, lambda t: t[1:].contiguous()), [NORM, "(32,)", "(31,)"]),
    "unknown": (tensor("model.extra", lambda _: torch.ones(2)), ["model.extra", "no counterpart"]),
    "two dtypes": (tensor(NORM, lambda t: t.half()), ["one dtype", "float16"]),
    "no floats": (tensor(NORM, lambda t: t.to(torch.int8)), [NORM, "I8", "quantization"]),
    "another output layer": (
        tensor("lm_head.weight", lambda _: torch.ones(61, 32)),
        ["lm_head.weight", "tie_word_embeddings"],
    ),
    "cut off": (file(lambda data: data[:-100]), [TENSORS, "must be a safetensors file"]),
    "header": (
        file(lambda data: b"\xff" * 8 + data[8:]),
        [TENSORS, "must be a safetensors file"],
    ),
    "pickles only": (
        lambda path: (path / TENSORS).rename(path / "pytorch_model.bin"),
        ["pytorch_model.bin", "not read"],
    ),
    "file of the index": (index(**{NORM: "two.safetensors"}), ["two.safetensors", "no such file"]),
    "tensor of the index": (index(**{"model.nothing": TENSORS}), ["model.nothing", "missing"]),
    "file elsewhere": (index(**{NORM: "../other.safetensors"}), ["../other.safetensors"]),
    "no configuration": (lambda path: (path / "config.json").unlink(), ["config.json"]),
    "broken configuration": (
        lambda path: (path / "config.json").write_text("{"),
        ["config.json", "line 1"],
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_cannot_be_imported(case: str, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    damage, words = BAD_FOLDERS[case]
    damage(source)
    message = refusal(source, tmp_path)
    assert all(word in message for word in (*words, "; ")), message


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w3.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.1.down_proj.weight"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("qwen2_moe", "model.layers.1.mlp.gate.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_experts_that_are_missing(family: str, missing: str, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", family)
    rewrite(source, lambda tensors: tensors.__delitem__(missing))
    words = rf"has \d+ tensors, .* missing: {re.escape(missing)}; .*get the folder"
    assert re.search(words, refusal(source, tmp_path))


@pytest.mark.parametrize("options", [{}, {"save_original_format": False}])
def test_another_number_of_experts_than_configured(options: dict[str, Any], tmp_path: Path) -> None:
    for number, word in ((5, "experts.4.down_proj.weight"), (3, "have no counterpart")):
        source = make_folder(tmp_path / str(number), "qwen3_moe", **options)
        change_config(source, num_experts=number)
        assert word in refusal(source, tmp_path)


def test_an_output_layer_equal_to_the_embedding_is_imported_as_tied(
    folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    embedding = "model.embed_tokens.weight"
    rewrite(source, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    rewrite(source, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(4)}))
    imported = import_folder(source, tmp_path / "mega")
    assert "output_layer.weight" not in whole_tensors(imported.checkpoint)


def test_other_checkpoints_are_kept(folder: Path, checkpoint: Path) -> None:
    before = sorted(checkpoint.parent.rglob("*"))
    with pytest.raises(CheckpointError, match="without checkpoints"):
        import_folder(folder, checkpoint.parent)
    assert sorted(checkpoint.parent.rglob("*")) == before


@pytest.mark.parametrize("num_bytes", [10_000, 20_000, 20_500, 30_000])
def test_a_full_disk_while_importing(num_bytes: int, folder: Path, tmp_path: Path) -> None:
    """At any place of a tensor's record."""
    message = "cannot be written.*make room for"
    with largest_file(num_bytes), pytest.raises(CheckpointError, match=message):
        import_folder(folder, tmp_path / "mega")
    assert list((tmp_path / "mega").iterdir()) == []
    import_folder(folder, tmp_path / "mega")


def test_a_full_disk_while_exporting(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with largest_file(20_000), pytest.raises(CheckpointError, match="cannot be written"):
        export_checkpoint(checkpoint, output, max_file_bytes=GB)
    assert list(tmp_path.iterdir()) == []
    export_checkpoint(checkpoint, output, max_file_bytes=GB)
    with pytest.raises(CheckpointError, match="there is something"):
        export_checkpoint(checkpoint, output, max_file_bytes=GB)


def test_too_little_disk_space_is_reported_before_writing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000))
    with pytest.raises(CheckpointError, match=r"0\.1 MB are to be written but 0\.0 MB are free"):
        export_checkpoint(checkpoint, tmp_path / "out", max_file_bytes=GB)
    assert list(tmp_path.iterdir()) == []


def leave_files_alone(path: Path) -> None:
    for name in ("hydraulis.json", "metadata.json"):
        (path / name).unlink()


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing file": (lambda path: (path / "__0_0.distcp").unlink(), ["__0_0.distcp is missing"]),
    "flipped byte": (
        lambda path: flip_a_byte(path / "__0_0.distcp"),
        ["__0_0.distcp", "SHA-256"],
    ),
    "half of it": (leave_files_alone, ["torch_dist"]),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_damaged_checkpoints(case: str, checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "mega" / checkpoint.name
    shutil.copytree(checkpoint, source)
    damage, words = BAD_CHECKPOINTS[case]
    damage(source)
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(source, tmp_path / "out", max_file_bytes=GB)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert not (tmp_path / "out").exists()


def test_folders_without_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    half = tmp_path / ".saving-iter_0000003"
    shutil.copytree(checkpoint, half)
    with pytest.raises(CheckpointError, match="interrupted"):
        export_checkpoint(half, tmp_path / "out", max_file_bytes=GB)
    with pytest.raises(CheckpointError, match="no such folder"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "out", max_file_bytes=GB)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(CheckpointError, match="iter_0000003 but that is not there"):
        export_checkpoint(tmp_path, tmp_path / "out", max_file_bytes=GB)


SMALL = HuggingFaceModel(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=1,
    kv_channels=8,
    vocab_size=61,
    max_position_embeddings=256,
    layernorm_epsilon=1e-6,
    rotary_base=10000,
    untie_embeddings_and_output_weights=False,
    add_bias_linear=False,
    add_qkv_bias=True,
)


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}


def test_checkpoints_of_other_models(checkpoint: Path, tmp_path: Path) -> None:
    tensors = whole_tensors(checkpoint)
    arguments = SMALL.to_arguments()
    common = {"args": Namespace(**arguments)}
    write_tensors(tmp_path / "fine", tensors, common)
    assert export_checkpoint(tmp_path / "fine", tmp_path / "out", max_file_bytes=GB).model == SMALL

    def message(name: str, kept: dict[str, torch.Tensor], further_state: dict[str, Any]) -> str:
        write_tensors(tmp_path / name, kept, further_state)
        with pytest.raises((ConfigurationError, CheckpointError)) as caught:
            export_checkpoint(tmp_path / name, tmp_path / f"out of {name}", max_file_bytes=GB)
        return str(caught.value)

    key = "decoder.final_layernorm.weight"
    less = {k: v for k, v in tensors.items() if k != key}
    assert f"of which these are missing: {key}" in message("less", less, common)
    more = tensors | {"decoder.layers.mlp.router.weight": torch.ones(3, 2)}
    assert "router.weight have no counterpart" in message("more", more, common)
    other = tensors | {key: torch.ones(31)}
    assert "(31,) instead of (32,)" in message("other", other, common)
    assert "arguments of the run" in message("silent", tensors, {"iteration": 3})
    unsized = {"args": Namespace(**(arguments | {"vocab_size": None}))}
    assert "--vocab-size" in message("unsized", tensors, unsized)
    large = {"args": Namespace(**(arguments | {"vocab_size": 1000}))}
    assert "1000 tokens" in message("large", tensors, large)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalization": "LayerNorm"}, ["--normalization must be RMSNorm", "LayerNorm"]),
        ({"position_embedding_type": "learned_absolute"}, ["--position-embedding-type", "rope"]),
        ({"swiglu": False}, ["--swiglu must be True"]),
        ({"rotary_percent": 0.5}, ["--rotary-percent", "0.5"]),
        ({"rotary_interleaved": True}, ["rotary_interleaved"]),
        (EXPERTS | {"num_experts": 1}, ["num_experts is 1", "experts_per_token 2"]),
        (EXPERTS, ["Mixtral has --num-experts", "this model --add-qkv-bias and --num-experts 4"]),
        (
            EXPERTS | {"moe_router_pre_softmax": True, "add_qkv_bias": False},
            ["Mixtral has", "--moe-router-pre-softmax"],
        ),
        (EXPERTS | {"moe_router_topk": 1}, ["norm_topk_prob", "passes 1 expert"]),
        (EXPERTS | {"moe_router_score_function": "x"}, ["softmax or sigmoid but is x"]),
        (
            EXPERTS | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
            ["Mixtral has", "--moe-router-num-groups 2"],
        ),
        (
            EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            ["2 experts in 2 groups are not 2 each"],
        ),
        ({"qk_layernorm": True}, ["--qk-layernorm", "Qwen3"]),
        ({"add_qkv_bias": False, "hidden_size": 30}, ["30", "4 heads"]),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
            ["in one way", "--use-rope-scaling and --rotary-seq-len-interpolation-factor"],
        ),
        ({"window_size": (7, 0)}, ["Mistral has", "--add-qkv-bias and --window-size 7,0"]),
        (
            {"window_size": (7, 0), "window_attn_skip_freq": 2},
            ["--window-attn-skip-freq"],
        ),
        ({"no_rope_freq": [0, 1, 0]}, ["SmolLM3", "biases in all linear layers but"]),
        ({"softmax_type": "learnable"}, ["--softmax-type must be vanilla"]),
        ({"squared_relu": True}, ["--normalization must be LayerNorm but is RMSNorm"]),
        ({"layernorm_zero_centered_gamma": True}, ["layernorm-1p must be False but is True"]),
        ({"attention_output_gate": True}, ["output_gate = True"]),
        ({"num_layers": None}, ["num_layers"]),
        ({"kv_channels": 2.5}, ["kv_channels", "2.5"]),
        ({"layernorm_epsilon": "small"}, ["layernorm_epsilon", "'small'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_without_counterpart(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        model_from_arguments(SMALL.to_arguments() | changes, "iter_0000003", vocab_size=61)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "; " in message


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("gpt_oss", {"glu_linear_offset": 0.5}, ["--glu-linear-offset must be 1.0 but is 0.5"]),
        ("gpt_oss", {"position_embedding_type": "rope"}, ["GptOss always has it", "rope"]),
        ("qwen2, YaRN", {"mscale": 0.5}, ["--mscale 1 and --mscale-all-dim 0", "0.5 and 0"]),
        ("qwen2, YaRN", {"rotary_percent": 0.5}, ["all channels", "--rotary-percent 0.5"]),
    ],
)
def test_arguments_of_a_family_without_counterpart(
    variant: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    model = import_folder(make_folder(tmp_path / "hf", variant), tmp_path / "mega").model
    with pytest.raises(ConfigurationError) as caught:
        model_from_arguments(model.to_arguments() | changes, "iter_0000003", vocab_size=61)
    message = str(caught.value)
    assert all(word in message for word in words), message


def test_options_that_latent_attention_ignores_do_not_hinder_an_export(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "deepseek_v3")
    model = import_folder(folder, tmp_path / "mega").model
    ignored = {
        "no_rope_freq": 2,
        "rotary_seq_len_interpolation_factor": 2,
        "use_rope_scaling": True,
    }
    assert model_from_arguments(model.to_arguments() | ignored, "x", vocab_size=61) == model
    with pytest.raises(ConfigurationError, match="--use-rope-scaling and --multi-latent-attention"):
        replace(model, rope_scaling_factor=8.0)


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("mistral", {"attention_bias": True}, ["attention_bias", "False"]),
        ("nemotron", {"hidden_act": "silu"}, ["hidden_act", "relu2"]),
        ("mistral", {"sliding_window": "7"}, ["sliding_window", "'7'"]),
        ("mistral", {"sliding_window": 0}, ["window_tokens must be positive"]),
        ("smollm3", {"use_sliding_window": True}, ["use_sliding_window"]),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, ["topk_method", "greedy"]),
        ("deepseek_v2", {"first_k_dense_replace": 3}, ["first_k_dense_replace", "have experts"]),
        ("deepseek_v3", {"topk_group": 3}, ["4 experts in 3 groups are not 2 each"]),
        ("deepseek_v3", {"num_experts_per_tok": 3}, ["3 experts in 2 groups are not 2 each"]),
        ("deepseek_v3", {"n_group": 3}, ["8 experts and 3 groups, 2 of"]),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            ["8 groups, 4 of them for the 8 experts of a token"],
        ),
        ("deepseek_v3", {"rope_interleave": False}, ["rope_interleave", "True"]),
        (
            "deepseek_v3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            ["original_max", "4096", "8192"],
        ),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            ["rope_type can only be default or yarn but is 'linear'"],
        ),
        ("gpt_oss", {"rope_parameters": None}, ["YaRN, as transformers has it by default"]),
        ("gpt_oss", {"swiglu_alpha": 2.0}, ["swiglu_alpha", "1.702"]),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 2}, ["layer_types", "3 layers"]),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            ["'mxfp4'", "Mxfp4Config", "dequantize=True"],
        ),
        ("mixtral", {"num_experts_per_tok": 1}, ["norm_topk_prob", "passes 1 expert"]),
        ("mixtral", {"num_experts_per_tok": 5}, ["num_experts is 4", "experts_per_token 5"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise", "0.1"]),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, ["mlp_only_layers", "have experts"]),
        ("qwen2_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step", "at least 1 layer"]),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, ["Qwen2Moe has", "shared-expert"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "each of 3 layers"]),
        ("smollm3", {"no_rope_layers": [1, 0, "x"]}, ["no_rope_layers", "0 or 1"]),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            ["no_rope_layer_interval", "at least 1 layer but is 0; "],
        ),
        ("qwen3_moe", {"mlp_only_layers": [0, "1", 2]}, ["mlp_only_layers", "numbers", "'1'"]),
        ("qwen3_moe", {"layer_types": [["full_attention"]] * 3}, ["layer_types"]),
        ("qwen3_moe", {"layer_types": ["linear_attention"] * 3}, ["layer_types"]),
    ],
)
def test_parts_of_other_families_without_counterpart(
    variant: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "hf", variant)
    change_config(source, **changes)
    message = refusal(source, tmp_path)
    assert all(word in message for word in words), message


def test_a_window_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    """Null is none, and an absent key 4,096 tokens."""
    for name, window in (("none", None), ("absent", 4096)):
        source = make_folder(tmp_path / name, "mistral")
        path = source / "config.json"
        content = json.loads(path.read_text())
        del content["sliding_window"]
        if name == "none":
            content["sliding_window"] = None
        path.write_text(json.dumps(content))
        model = import_folder(source, tmp_path / f"mega {name}").model
        assert model.window_tokens == window
        assert model.family == ("llama" if window is None else "mistral")


def test_a_model_whose_layers_all_have_positions_is_a_llama(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", "smollm3")
    change_config(source, no_rope_layers=[1, 1, 1])
    model = import_folder(source, tmp_path / "mega").model
    assert (model.family, model.no_rope_freq) == ("llama", ())


def test_bad_flags_and_errors_of_the_commands(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export-hf", str(checkpoint), out, "--max-file-gb", "0"]) == 2
    assert "--max-file-gb" in capsys.readouterr().err
    assert main(["import-hf", str(folder), out, "--make-vocab-size-divisible-by", "0"]) == 2
    assert "--make-vocab-size-divisible-by" in capsys.readouterr().err
    assert main(["import-hf", str(tmp_path / "nothing"), out]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not Path(out).exists()
