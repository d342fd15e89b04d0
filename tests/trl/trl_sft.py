"""TRL's SFT trainer trains the same tokens of conversations, with the same loss and gradients.

TRL is no dependency of this project: ``make trl-test`` installs it and runs this file.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from megatron.hydraulis.data.chat import ConversationEncoder, WeightedTokens
from megatron.hydraulis.data.documents import read_documents
from megatron.hydraulis.data.tokenizer import DocumentEncoder, TokenizerSettings, build_tokenizer
from megatron.hydraulis.library.batches import TokenSequence
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from scripts.stdlib_chat import TEMPLATE
from tests.support.chat_tokenizer import make_chat_model
from tests.support.gloo_pool import pool_of

TOLERANCE = 1e-5
CONVERSATIONS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a long question?"},
        {"role": "assistant", "content": "This one."},
        {"role": "user", "content": "Grüße"},
        {"role": "assistant", "content": "Bye."},
    ],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of random weights and a tokenizer of bytes whose template has marks."""
    return make_chat_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def encoded(folder: Path, tmp_path: Path) -> list[WeightedTokens]:
    """The conversations as ``preprocess --chat`` stores them."""
    file = tmp_path / "chats.jsonl"
    Dataset.from_list([{"messages": turns} for turns in CONVERSATIONS]).to_json(file)
    settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    encoder = ConversationEncoder(DocumentEncoder(build_tokenizer(settings), append_eod=False))
    found = [encoder.encode(line)[0] for line in read_documents(file, json_key=None)]
    return [example for example in found if example is not None]


def test_the_same_tokens_loss_and_gradient_norm(folder: Path, tmp_path: Path) -> None:
    examples = encoded(folder, tmp_path)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            assistant_only_loss=True,
            per_device_train_batch_size=len(CONVERSATIONS),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"messages": turns} for turns in CONVERSATIONS]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    batch: Any = next(iter(trainer.get_train_dataloader()))
    theirs = {
        (tuple(ids[is_token].tolist()), tuple((labels[is_token] != -100).tolist()))
        for ids, labels, is_token in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True
        )
    }
    ours = {(tuple(each.tokens.tolist()), tuple((each.weights > 0).tolist())) for each in examples}
    assert ours == theirs

    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])
    for found_loss, found_norm in pool_of(3).run(loss_and_norm, folder, examples):
        assert found_loss == pytest.approx(loss.item(), rel=TOLERANCE)
        assert found_norm == pytest.approx(norm.item(), rel=TOLERANCE)


def loss_and_norm(folder: Path, examples: list[WeightedTokens]) -> tuple[float, float]:
    """On every rank: mean loss and gradient norm of a step with unequal replicas."""
    engine = Engine.from_hf(
        folder,
        pool="tp2+tp1",
        optimizer=AdamWSettings(lr=1e-3),
        max_tokens_per_micro_batch=256,
        options=("--distributed-timeout-minutes", "1"),
    )
    sequences = [TokenSequence(each.tokens.astype(np.int64), each.weights) for each in examples]
    outcome = engine.train_step(sequences, lambda log_probs, *_: -log_probs)
    engine.close()
    assert outcome.gradient_norm is not None
    return outcome.loss.mean, outcome.gradient_norm
