"""Settings of every test: one thread a process, hypothesis profiles, quiet logs, pools closed, what
garbage collection leaves out, and which worker of pytest-xdist runs which files on which cores."""

import logging
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

# Read when torch is first imported, by the tests below and by the workers forked from here: more
# threads than cores would only make gloo ranks wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
# As --disable-jit-fuser, the program's default without CUDA: each worker would compile for seconds.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from megatron.hydraulis.quiet_imports import without_garbage_collection

# No deadline and no complaint of slowness: both are statements about the machine's load.
common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", common, max_examples=30)
settings.register_profile("nightly", common, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Upstream announces HybridModel at every GPTModel built, in every worker.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist stays on its share of the cores, with the ranks that it starts.

    Ranks wake one another thousands of times a second, which costs most between cores: on the two
    of a virtual machine, test_random_pools.py takes 34 s of CPU time, and 20 s on one of them.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, cores[number % len(cores) :: worker["workercount"]])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Half a million objects are imported, which no collection need visit."""
    with without_garbage_collection():
        return (yield)


ONE_WORKER_EACH = ("tests/cuda_stand_in/", "tests/distributed/training_program/")
"""Folders whose files share hosts on the stand-in or jobs, which every worker would start again."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These folders begin first: each takes longer than any other file."""
    items.sort(key=lambda item: not item.nodeid.startswith(ONE_WORKER_EACH))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` also runs the files of a folder of `ONE_WORKER_EACH` on one worker."""
    from xdist.scheduler import LoadFileScheduling

    class FolderScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folders = [folder for folder in ONE_WORKER_EACH if nodeid.startswith(folder)]
            return folders[0] if folders else super()._split_scope(nodeid)

    return FolderScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Idle workers use CPU time, and few tests of the other folders need any."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _end_gloo_workers()


@pytest.fixture(scope="session", autouse=True)
def _no_worker_left_behind() -> Iterator[None]:
    yield
    _end_gloo_workers()


def _end_gloo_workers() -> None:
    """Asks `sys.modules`, as most tests never import torch."""
    gloo_pool = sys.modules.get("tests.support.gloo_pool")
    if gloo_pool is not None:
        gloo_pool.close_pools()
