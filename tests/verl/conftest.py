"""A model for the tests with verl."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of random weights and a tokenizer of bytes."""
    from tests.support.chat_tokenizer import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("model"))
