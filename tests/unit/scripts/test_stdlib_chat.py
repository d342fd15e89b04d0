"""The data that ``scripts/finetune.sh`` trains on, and the model that it begins with."""

import json
from pathlib import Path

import pytest

from megatron.hydraulis.data.chat import ConversationEncoder
from megatron.hydraulis.data.documents import read_documents
from megatron.hydraulis.data.tokenizer import DocumentEncoder, TokenizerSettings, build_tokenizer
from megatron.hydraulis.errors import DataError
from scripts import stdlib_chat

SOURCE = '''
class Box:
    """A box.

    It may be empty.
    """

    def open(self):
        """Open it."""

    def _hidden(self):
        """Not shown."""

    def close(self):
        pass

def empty():
    pass

def shake(box):
    """Shake   a
    box."""
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    (root / "boxes.py").write_text(SOURCE)
    folder = tmp_path_factory.mktemp("made")
    assert stdlib_chat.build(folder, root, vocab_size=300)
    assert not stdlib_chat.build(folder, root, vocab_size=300), "kept"
    return folder


def test_conversations_are_questions_and_documentation(folder: Path) -> None:
    lines = (folder / "conversations.jsonl").read_text().splitlines()
    texts = [[turn["content"] for turn in json.loads(line)["messages"]] for line in lines]
    assert texts == [
        ["What is boxes.Box?", "A box.\n\nIt may be empty.", "And what does open do?", "Open it."],
        ["What is boxes.shake?", "Shake a box."],
    ]


def test_the_template_marks_answers_and_their_end(folder: Path) -> None:
    settings = TokenizerSettings(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "model")
    )
    documents = DocumentEncoder(build_tokenizer(settings), append_eod=False)
    encoder = ConversationEncoder(documents)
    document, _ = read_documents(folder / "conversations.jsonl", json_key=None)
    example, _ = encoder.encode(document)
    assert example is not None
    assert encoder.marked(example).plain == (
        "<|im_start|>user\nWhat is boxes.Box?<|im_end|>\n"
        "<|im_start|>assistant\n⟦A box.\n\nIt may be empty.<|im_end|>⟧\n"
        "<|im_start|>user\nAnd what does open do?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Open it.<|im_end|>⟧\n"
    )


def test_an_answer_is_only_what_the_model_adds(folder: Path) -> None:
    answer = stdlib_chat.answer(folder / "model", "What is boxes.Box?")
    assert "What is" not in answer


def test_a_library_without_documentation(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="made of the documentation in"):
        stdlib_chat.build(tmp_path / "out", tmp_path)
