"""All processes of these tests can import Transformer Engine, on a device that it supports best."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda_stand_in.te.launch import settings


@pytest.fixture(scope="session", autouse=True)
def transformer_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings().items():
            patch.setenv(name, value)
        patch.setenv("STAND_IN_MAJOR", "9")
        patch.setenv("STAND_IN_LOG_KERNELS", "1")
        yield
