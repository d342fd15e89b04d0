"""Megatron's fused functions are compiled at their first call, not while they are imported.

Upstream decorates them by `torch.compile`, which imports torch's compiler: about 2 s of CPU time in
every process, also in those that never call such a function, as is the case without CUDA.
`megatron.core` takes the decorator from torch while it is imported. `megatron.hydraulis` lets
Python import it within `deferred_compile`, where the decorator waits; torch is left unchanged.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hydraulis_patches.hashes import JIT_FUSER_HASHES
from hydraulis_patches.registry import Patch, installed_version

JIT_FUSER = Patch(
    name="jit_fuser",
    targets=JIT_FUSER_HASHES,
    reason="upstream calls torch.compile while it is imported, and that imports torch's compiler "
    "into every process, also where nothing is compiled; it is called at the first call instead",
    removable_when="upstream or torch imports the compiler only when something is compiled",
)


def compile_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled by its first call. Code that is being compiled sees the original.

    TORCH_COMPILE_DISABLE=1 and upstream's --disable-jit-fuser leave it as it is. Torch imports its
    compiler in spite of the former, and upstream applies the latter only to functions that are
    imported later.
    """
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1" or _is_fuser_disabled()
        if torch.compiler.is_compiling() or is_disabled:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call


def _is_fuser_disabled() -> bool:
    """True if upstream's `disable_jit_fuser` has been called."""
    jit = sys.modules["megatron.core.jit"]
    return jit.jit_fuser is jit.noop_decorator


@contextmanager
def deferred_compile() -> Iterator[None]:
    """Import `megatron.core` within; its functions get the decorator that waits.

    Nothing happens if it is not a version that the patch was written for.
    """
    if installed_version() not in JIT_FUSER.versions:
        yield
        return
    torch_compile = torch.compile

    def decorate(model: Any = None, **options: Any) -> Any:
        if model is None or options:
            return torch_compile(model, **options)
        return compile_at_first_call(model)

    torch.compile = decorate  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = torch_compile
