"""Transformer Engine's selection of kernels, run on the stand-in: the table in docs/gpu.md and what
``--core-attention auto`` does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_stand_in.te.selection import Kernels, all_kernels, table

DOCS = Path(__file__).resolve().parents[3] / "docs"


pytestmark = pytest.mark.timeout(900)
Both = tuple[dict[int, Kernels], dict[int, Kernels]]


@pytest.fixture(scope="module")
def both() -> Both:
    return all_kernels()


def test_docs_have_the_table(both: Both) -> None:
    assert table(*both) in (DOCS / "gpu.md").read_text()


def test_auto_takes_it_where_it_has_a_kernel_of_linear_memory(both: Both) -> None:
    for kernels in [kernels for by_capability in both for kernels in by_capability.values()]:
        for key, (kernel, auto) in kernels.items():
            is_large = kernel in ("none", "unfused") or (kernel == "cuDNN" and " 104 " in key)
            if not key.startswith("padded"):  # which auto does not ask about
                assert auto == ("torch" if is_large else "te"), key
