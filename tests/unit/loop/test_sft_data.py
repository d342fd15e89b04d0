"""``--sft`` trains the tokens that upstream's ``SFTDataset`` trains."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core.datasets.utils import Split
from megatron.training.datasets.sft_dataset import SFTDataset

from megatron.hydraulis.data.corpus import Corpus, DocumentRange
from megatron.hydraulis.data.dataset import read_index
from megatron.hydraulis.data.tokenizer import build_tokenizer
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.loop.sft_data import convert_data, write_dataset
from tests.support.chat_tokenizer import PROMPT, TEMPLATE, make_chat_tokenizer

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
SYSTEM = {"role": "system", "content": "Be brief."}
LINES = [
    [SYSTEM, QUESTION, ANSWER],
    [
        QUESTION,
        ANSWER,
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Ja"},
    ],
    [SYSTEM, QUESTION, ANSWER, SYSTEM, {"role": "user", "content": "Bye"}, ANSWER],
]
SEQ_LENGTH = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
    return make_chat_tokenizer(tmp_path_factory.mktemp("sft_tokenizer"), special)


def arguments(model: Path, prompt_format: str, data: Path) -> Any:
    return SimpleNamespace(
        tokenizer_type="SFTTokenizer",
        tokenizer_model=str(model),
        sft_tokenizer_prompt_format=prompt_format,
        metadata_path=None,
        vocab_file=None,
        pad_vocab_size=False,
        data_path=["0.5", str(data), "0.5", str(data)],
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        rank=0,
    )


def upstream_samples(
    tokenizer: Any, lines: list[list[dict[str, str]]], seq_length: int = SEQ_LENGTH
) -> list[dict[str, Any]]:
    """What upstream trains, a row of ``seq_length`` tokens a line."""
    config = SimpleNamespace(
        tokenizer=tokenizer,
        sequence_length=seq_length,
        reset_position_ids=False,
        context_parallel_size=1,
        create_attention_mask=False,
        reset_attention_mask=False,
    )
    dataset = SFTDataset.__new__(SFTDataset)
    vars(dataset).update(
        dataset=lines, indices=np.arange(len(lines)), num_samples=len(lines), config=config
    )
    assert Split.train is not None
    return [dataset[i] for i in range(len(lines))]


@pytest.mark.parametrize(
    "prompt_format", ["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"]
)
def test_the_same_tokens_and_mask_as_upstream(
    prompt_format: str, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps({"messages": line}) + "\n" for line in LINES))
    args = arguments(model, prompt_format, data)
    convert_data(args, tmp_path / "run", None)
    assert args.data_path[0] == args.data_path[2] == "0.5"
    prefix = args.data_path[1]
    corpus = Corpus(
        [DocumentRange.whole(read_index(prefix))], seq_length=SEQ_LENGTH, long_sequences="error"
    )
    tokenizer = build_tokenizer(args)
    sequence = 0
    for sample in upstream_samples(tokenizer, LINES):
        borders = sample["cu_seqlens"].unique().tolist()
        for first, end in itertools.pairwise(borders):
            # The row ends in padding, which upstream adds to its last conversation.
            end = min(end, first + int(corpus.lengths[sequence]) + 1)
            tokens = corpus.tokens(sequence)
            assert tokens.tolist() == sample["tokens"][first:end].tolist()
            mask = corpus.token_weights(sequence)[1:].tolist()
            assert mask == sample["loss_mask"][first : end - 1].tolist()
            assert sum(mask) > 0
            sequence += 1
    assert sequence == corpus.num_sequences == 4


def test_a_dataset_is_made_once_and_again_for_other_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": LINES[0]}) + "\n")
    prefixes = []
    for _ in range(2):
        args = arguments(model, "identity", data)
        convert_data(args, tmp_path / "run", None)
        prefixes.append(args.data_path[1])
    assert prefixes[0] == prefixes[1]
    assert capsys.readouterr().out.count("1 conversations of") == 1
    data.write_text(json.dumps({"messages": LINES[1]}) + "\n")
    args = arguments(model, "identity", data)
    convert_data(args, tmp_path / "run", None)
    assert args.data_path[1] != prefixes[0]


def test_a_dataset_is_made_again_for_another_tokenizer_in_the_same_place(
    model: Path, tmp_path: Path
) -> None:
    data, folder = tmp_path / "chat.jsonl", tmp_path / "tokenizer"
    data.write_text(json.dumps({"messages": LINES[0]}) + "\n")
    shutil.copytree(model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = (folder / "tokenizer.json").read_text()
    swapped = tokenizer.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    prefixes = set()
    for template, content in ((TEMPLATE, tokenizer), (PROMPT, tokenizer), (PROMPT, swapped)):
        config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(content)
        args = arguments(folder, "identity", data)
        convert_data(args, tmp_path / "run", None)
        prefixes.add(args.data_path[1])
    assert len(prefixes) == 3


def test_one_label_more_than_upstream_is_trained_at_the_cut(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": LINES[0]}) + "\n")
    args = arguments(model, "identity", data)
    convert_data(args, tmp_path / "run", None)
    corpus = Corpus(
        [DocumentRange.whole(read_index(args.data_path[1]))],
        seq_length=8,
        long_sequences="truncate",
    )
    (sample,) = upstream_samples(build_tokenizer(args), LINES[:1], seq_length=8)
    assert corpus.tokens(0)[:-1].tolist() == sample["tokens"].tolist()
    labels, mask = corpus.tokens(0)[1:].tolist(), sample["loss_mask"].tolist()
    assert labels[:-1] == sample["labels"][:-1].tolist()
    assert mask == [1] * 7 + [0]
    assert corpus.token_weights(0)[1:].tolist() == [1] * 8


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"text": "a"}, "a list of turns under 'messages' but here is NoneType"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"refuses the conversation \(Wrong role"),
        ({"messages": [ANSWER, ANSWER]}, "an answer follows user or tool"),
        (
            {"messages": [{"role": "user", "content": "a"}, ANSWER | {"weight": 0}]},
            "turn 2 of 2 has weight 0 or train false .*preprocess --chat",
        ),
    ],
)
def test_a_line_that_upstream_refuses(value: Any, says: str, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": LINES[0]}) + "\n" + json.dumps(value) + "\n")
    tokenizer = build_tokenizer(arguments(model, "nemotron-h-aligned", data))
    with pytest.raises(DataError, match=f"chat.jsonl, line 2: .*{says}"):
        write_dataset(str(data), str(tmp_path / "out"), tokenizer)
    assert not (tmp_path / "out.idx").exists()
    store = dist.HashStore()
    for rank in range(2):  # the others raise what rank 0 has found
        args = arguments(model, "nemotron-h-aligned", data)
        args.rank = rank
        with pytest.raises(DataError, match=f"chat.jsonl, line 2: .*{says}"):
            convert_data(args, tmp_path / "run", store)
