"""A Hugging Face tokenizer of bytes with a chat template, without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START, END = "<|im_start|>", "<|im_end|>"
TURN = START + "{{ m.role }}\n{{ m.content }}" + END + "\n"
PROMPT = "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
TEMPLATE = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
"""ChatML, without marks."""


def make_chat_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a small Qwen3 of random weights with the tokenizer; returns the folder."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(make_chat_tokenizer(folder))
    tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_chat_tokenizer(folder: Path, special_tokens: Sequence[str] = ()) -> Path:
    """Write it with the special tokens of ChatML and further ones; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, *special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
