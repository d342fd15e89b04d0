"""How upstream and torch are imported: without known warnings, and without garbage collection."""

import atexit
import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def silence_warnings_of_imports() -> None:
    """Call it before importing them.

    A dozen warnings per rank, that Apex, Transformer Engine or a CUDA runtime are absent, would
    hide an error, which is one line.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)\b.*")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


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
