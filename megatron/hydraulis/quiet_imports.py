"""Upstream and torch without messages that are of no use here, imported without collections and
without torch's compiler."""

import atexit
import gc
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

from megatron.hydraulis.errors import NotInstalledError

_ONLY_ERRORS = (
    "megatron.core.models.gpt.gpt_model",  # announces every model that is built
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.rerun_state_machine",  # announces a mode that is always the same here
)
_ONLY_WARNINGS = (
    "matplotlib",
    "megatron.core.num_microbatches_calculator",  # counts micro-batches of one data-parallel group
    "megatron.core.tokenizers.utils.build_tokenizer",  # the padded vocabulary, also in a dry run
)


def silence_warnings_of_imports() -> None:
    """Call it before importing them.

    A dozen warnings per rank, that Apex, Transformer Engine or a CUDA runtime are absent, would
    hide an error, which is one line.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)\b.*")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def silence_upstream(rank: int) -> None:
    """Silence upstream's messages before iteration 1 that are of no use to a user here.

    Raises the levels of single loggers; log lines, validation and errors are not affected.
    """
    for name in _ONLY_ERRORS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _ONLY_WARNINGS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if rank != 0:
        # Every rank would report the same process groups.
        logging.getLogger("megatron.hydraulis").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\b.*")
    # Upstream's barriers name no device; they use the current one, which is this rank's.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under")


@contextmanager
def explained_if_only_planning_is_installed() -> Iterator[None]:
    """Raise NotInstalledError for a module that is missing because [train] is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if find_spec("torch") is not None:
            raise
        raise NotInstalledError(error.name) from error


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import packages within; what they define is left out of later collections.

    Imports make many objects and hardly any garbage, but as their number grows the collector
    visits all of them repeatedly, which takes a sixth of a rank's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else triton, at the end of the process, reports leaks
        if was_enabled:
            gc.enable()


class _UpstreamFinder:
    """Lets `megatron.core` be imported within `deferred_compile`, whoever imports it first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "megatron.core" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_deferred(module: ModuleType) -> None:
            from hydraulis_patches.deferred_compile import deferred_compile

            with deferred_compile():
                execute(module)

        spec.loader.exec_module = execute_deferred  # type: ignore[method-assign]
        return spec


def import_upstream_without_compiler() -> None:
    """Call it before anything imports Megatron; takes no time."""
    if "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, _UpstreamFinder())
