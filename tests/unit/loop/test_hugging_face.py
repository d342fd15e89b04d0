"""``--hf``: flags that a Hugging Face folder stands for, and those that contradict it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.flags.parser import FlagParser
from megatron.hydraulis.loop.hugging_face import FolderOfRun
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.huggingface_folders import change_config, make_folder

NULL = ("--tokenizer-type", "NullTokenizer")
RUN = (
    *("--seq-length", "64", "--train-iters", "3", "--lr", "1e-3", "--global-batch-size", "4"),
    *("--strategy", "2*tp1"),
)


@pytest.fixture(scope="module")
def flag_parser() -> FlagParser:
    return FlagParser()


def resolve(path: Path, flag_parser: FlagParser, *words: str) -> Resolved:
    """The command line of a folder, completed and checked as by the program."""
    command = ["--hf", str(path), *RUN, "--dry-run", *words]
    folder = FolderOfRun.named_in(command)
    assert folder is not None
    resolved = parse_arguments(
        [*folder.flags, *command],
        num_ranks=2,
        rank=0,
        flag_parser=flag_parser,
        needs_data=False,
    )
    folder.check(resolved)
    return resolved


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama, stretched",
        "mistral",
        "nemotron",
        "smollm3",
        "deepseek_v2",
        "deepseek_v3, as Moonlight",
        "qwen2_moe",
        "qwen3_moe, some dense, tied",
    ],
)
def test_a_folder_does_not_contradict_its_own_flags(
    variant: str, tmp_path: Path, flag_parser: FlagParser
) -> None:
    resolved = resolve(make_folder(tmp_path, variant), flag_parser, *NULL)
    assert resolved.args.num_layers == 3
    assert resolved.vocabulary.size == 61
    assert not resolved.args.bf16
    assert resolved.hydraulis.hf == tmp_path


def test_tokenizer_and_dtype_are_those_of_the_folder(
    tmp_path: Path, flag_parser: FlagParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "hf", "mistral", torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"--hf hf: a tokenizer .*--tokenizer-model"):
        FolderOfRun.named_in(["--hf", "hf"])
    make_chat_tokenizer(folder)
    given = FolderOfRun.named_in(["--hf=hf"])
    assert given is not None
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder))
    assert given.flags[-5:] == ("--bf16", *tokenizer)
    sft = FolderOfRun.named_in(["--tokenizer-type", "SFTTokenizer", "--hf", "hf"])
    assert sft is not None
    assert sft.flags == given.flags
    other = FolderOfRun.named_in(["--hf", "hf", *NULL])
    assert other is not None
    assert "--tokenizer-model" not in other.flags
    assert resolve(folder, flag_parser, *NULL).args.bf16
    assert FolderOfRun.named_in(["--lr", "1"]) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num-layers 2", r"--num-layers 2 contradict .*num_layers is 3 there and 2 here"),
        ("--norm-epsilon 1e-3", r"--norm-epsilon 1e-3 contradict .*layernorm_epsilon is"),
        ("--add-qkv-bias", r"--add-qkv-bias contradict .*add_qkv_bias is False there and True"),
        ("--rotary-base 500", r"--rotary-base 500 contradict .*rotary_base is 10000 there"),
        ("--vocab-size 100", r"--vocab-size 100 contradict .*vocab_size is 61 there and 100"),
        ("--window-size 9,0", r"--window-size 9,0 contradict .*window_size is \[6, 0\] there"),
    ],
)
def test_flags_that_the_weights_do_not_allow(
    words: str, says: str, tmp_path: Path, flag_parser: FlagParser
) -> None:
    folder = make_folder(tmp_path, "mistral")
    with pytest.raises(ConfigurationError, match=rf"--hf {tmp_path} and {says}"):
        resolve(folder, flag_parser, *NULL, *words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--max-position-embeddings 32", None),
        ("--seq-length 512", "--max-position-embeddings 256"),
        ("--num-query-groups 3", "--num-attention-heads 4"),
        ("--squared-relu", "--swiglu"),
    ],
)
def test_an_error_says_which_flags_come_from_the_folder(
    words: str, named: str | None, tmp_path: Path, flag_parser: FlagParser
) -> None:
    path, command = make_folder(tmp_path, "mistral"), words.split()
    folder = FolderOfRun.named_in(["--hf", str(path), *NULL])
    assert folder is not None
    with pytest.raises(ConfigurationError) as caught, folder.blamed_for_its_flags(command):
        resolve(path, flag_parser, *NULL, *command)
    hint = "" if named is None else f"\n(from --hf {path}: {named})"
    message = str(caught.value)
    assert message.endswith(hint), message
    assert ("(from" in message) == (named is not None)


def test_other_flags_win(tmp_path: Path, flag_parser: FlagParser) -> None:
    words = ["--max-position-embeddings", "64", "--num-layers", "3", "--bf16"]
    args = resolve(make_folder(tmp_path, "mistral"), flag_parser, *NULL, *words).args
    assert args.max_position_embeddings == 64
    assert args.bf16


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_emptied, r"config\.json"),
        (_without("config.json"), r"config\.json"),
        (lambda folder: change_config(folder, model_type="gpt2"), "mistral.*'gpt2'"),
        (_without("model.safetensors"), r"model\.safetensors or .* neither"),
        (_without("tokenizer.json"), r"has none, such as tokenizer\.json"),
        (
            lambda folder: change_config(folder, quantization_config={"quant_method": "fp8"}),
            "quantized .*'fp8'.*bf16",
        ),
    ],
    ids=["empty", "no config", "another family", "no weights", "no tokenizer", "fp8"],
)
def test_a_folder_that_no_run_can_begin_with(
    change: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    folder = make_chat_tokenizer(make_folder(tmp_path, "mistral"))
    assert FolderOfRun.named_in(["--hf", str(folder)]) is not None
    change(folder)
    with pytest.raises((CheckpointError, ConfigurationError), match=says) as refused:
        FolderOfRun.named_in(["--hf", str(folder)])
    assert str(folder) in str(refused.value)


def test_weights_in_fp16_need_another_dtype(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "mistral", torch.float16)
    with pytest.raises(ConfigurationError, match=r"these weights are fp16; add --bf16"):
        FolderOfRun.named_in(["--hf", str(folder), *NULL])
    given = FolderOfRun.named_in(["--hf", str(folder), *NULL, "--bf16"])
    assert given is not None
    assert "--fp16" not in given.flags


def test_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no such folder.*Hub.*download"):
        FolderOfRun.named_in(["--hf", str(tmp_path / "nowhere")])
