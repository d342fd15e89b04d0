"""Prints which kernel Transformer Engine's rules select for packed rows, as a table:

    python -m tests.cuda_stand_in.te.selection

Its Python rules, those of its library and those of cudnn-frontend run as they are. Whether cuDNN
has an engine for a graph is the stand-in's answer: once yes, once no.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cuda_stand_in.te.launch import environment

CAPABILITIES = (8, 9, 10)
HEAD_SIZES = (64, 104, 128, 256)
FLASH_ATTENTION = "2.8.3"
ROWS: dict[str, dict[str, Any]] = {
    "alone": {},
    "shared, p2p": {"way": "p2p"},
    "shared, all_gather": {"way": "all_gather"},
    "shared, a2a": {"way": "a2a"},
    "padded": {"pad_between_seqs": True},
    "padded and shared": {"way": "p2p", "pad_between_seqs": True},
}
"""Kinds of rows; those with declared padding are for comparison."""

_NUM_HEADS, _NUM_GROUPS, _CONTEXT_SIZE = 8, 4, 2


Kernels = dict[str, tuple[str, str]]
"""By row, head size and whether there is flash-attn: Transformer Engine's kernel, and the core
attention that ``auto`` takes."""


def kernels_here() -> Kernels:
    """The kernels that are selected on this process's device; runs on the stand-in."""
    import torch
    import transformer_engine.pytorch  # noqa: F401
    from packaging.version import Version
    from transformer_engine.pytorch.attention.dot_product_attention.utils import (
        FlashAttentionUtils,
    )

    from megatron.hydraulis.runtime.core_attention import (
        RowKind,
        choose,
        current_environment,
        te_kernel,
    )

    found: Kernels = {}
    for has_flash in (False, True):
        if has_flash:  # as on import of flash-attn
            FlashAttentionUtils.version = Version(FLASH_ATTENTION)
            FlashAttentionUtils.set_flash_attention_version()
        for name, arguments in ROWS.items():
            way = arguments.get("way")
            row = RowKind(_NUM_HEADS, _NUM_GROUPS, _CONTEXT_SIZE if way else 1)
            for head_size in HEAD_SIZES:
                kernel = te_kernel(
                    row,
                    way,
                    dtype=torch.bfloat16,
                    head_size=head_size,
                    pad_between_seqs=arguments.get("pad_between_seqs", False),
                )
                here = current_environment(
                    dtype=torch.bfloat16,
                    head_size=head_size,
                    rows=[row],
                    cp_comm_type=way or "auto",
                )
                key = _key(name, head_size, has_flash)
                found[key] = kernel or "none", choose("auto", here).name
    return found


def kernels_of(major: int, *, refuses: bool = False) -> Kernels:
    """`kernels_here` in a process on a device of compute capability ``major``.0.

    Args:
        major: of the compute capability.
        refuses: whether the stand-in's cuDNN has no engine for any graph.
    """
    more = {"STAND_IN_CUDNN_REFUSES": 1} if refuses else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_stand_in.te.selection", "--here"],
        env=environment(devices=1, STAND_IN_MAJOR=major, **more),
        check=True,
        stdout=subprocess.PIPE,
    )
    return {key: (kernel, auto) for key, (kernel, auto) in json.loads(done.stdout).items()}


def all_kernels() -> tuple[dict[int, Kernels], dict[int, Kernels]]:
    """`kernels_of` every compute capability where cuDNN agrees, and where it refuses."""
    asked = [(major, refuses) for refuses in (False, True) for major in CAPABILITIES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda at: kernels_of(at[0], refuses=at[1]), asked))
    agreed, refused = found[: len(CAPABILITIES)], found[len(CAPABILITIES) :]
    return (
        dict(zip(CAPABILITIES, agreed, strict=True)),
        dict(zip(CAPABILITIES, refused, strict=True)),
    )


def table(agreed: dict[int, Kernels], refused: dict[int, Kernels]) -> str:
    """Transformer Engine's kernels, in Markdown.

    Args:
        agreed: by compute capability, where cuDNN has an engine for every graph.
        refused: where it has none.
    """
    names_of: dict[str, list[str]] = {}
    for name in ROWS:
        for has_flash in (False, True):
            cells = [
                _cell(name, has_flash, agreed[major], refused[major]) for major in CAPABILITIES
            ]
            line = f"{'yes' if has_flash else 'no'} | {' | '.join(cells)} |"
            names_of.setdefault(line, []).append(name)
    head = "| row | flash-attn | " + " | ".join(f"{major}.0" for major in CAPABILITIES) + " |"
    rows = [f"| {'; '.join(names)} | {line}" for line, names in names_of.items()]
    return "\n".join([head, "|---|---" + "|---" * len(CAPABILITIES) + "|", *rows])


def _key(name: str, head_size: int, has_flash: bool) -> str:
    return f"{name} {head_size} {has_flash}"


def _cell(name: str, has_flash: bool, agreed: Kernels, refused: Kernels) -> str:
    """The kernel of every head size; where cuDNN's word decides, with what follows a no."""
    sizes_of: dict[str, list[str]] = {}
    for head_size in HEAD_SIZES:
        key = _key(name, head_size, has_flash)
        (kernel, _), (without, _) = agreed[key], refused[key]
        text = kernel if kernel == without else f"{kernel}, else {without}"
        sizes_of.setdefault(text, []).append(str(head_size))
    if len(sizes_of) == 1:
        return next(iter(sizes_of))
    return "; ".join(f"{', '.join(sizes)}: {text}" for text, sizes in sizes_of.items())


def main() -> None:
    """Print the table, or with --here what is selected in this process, as JSON."""
    if "--here" in sys.argv:
        print(json.dumps(kernels_here()))
        return
    print(table(*all_kernels()))


if __name__ == "__main__":
    main()
