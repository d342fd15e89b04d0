"""Findings of the pre-flight about drivers, speeds and nodes."""

import json
import resource
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.loop.preflight import (
    Facts,
    compare_ranks,
    driver_problem,
    installed_driver,
    memory_lock_problem,
    slow_ranks,
)
from tests.support.counted_store import CountedStore


@pytest.mark.parametrize(
    ("driver", "cuda", "is_available", "says"),
    [
        ("570.86.15", "13.0", False, "needs driver 580 or newer for CUDA 13.0 but this node has"),
        ("520.61", "12.8", False, "needs driver 525 or newer"),
        ("580.65.06", "13.0", False, "torch finds no GPU; see nvidia-smi"),
        ("580.65.06", None, False, "torch is built without CUDA"),
        ("600.1", "14.0", False, "torch finds no GPU"),
        ("570.86.15", "13.0", True, None),  # with a forward-compatibility package
        (None, "13.0", False, None),
    ],
)
def test_a_node_whose_gpus_torch_cannot_use(
    driver: str | None, cuda: str | None, is_available: bool, says: str | None
) -> None:
    problem = driver_problem(driver, cuda, is_available=is_available)
    assert problem is None if says is None else problem is not None and says in problem


def test_the_driver_is_read_from_its_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert installed_driver(path) is None
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16\nGCC version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    ):
        path.write_text(text)
        assert installed_driver(path) == "570.86.15"
    path.write_text("something else")
    assert installed_driver(path) is None


def test_a_node_with_infiniband_whose_ranks_may_lock_little_memory(tmp_path: Path) -> None:
    adapters = tmp_path / "infiniband"
    assert memory_lock_problem(65536, adapters) is None
    adapters.mkdir()
    assert memory_lock_problem(65536, adapters) is None
    (adapters / "mlx5_0").touch()
    assert memory_lock_problem(resource.RLIM_INFINITY, adapters) is None
    problem = memory_lock_problem(65536, adapters)
    assert problem is not None
    assert "a rank may lock 65536 bytes" in problem


def test_a_rank_at_less_than_half_the_speed_of_the_median_is_slow() -> None:
    assert slow_ranks([1.0, 1.1, 0.9, 1.9]) == []
    assert slow_ranks([1.0, 3.0, 1.0, 2.5, 1.0]) == [1, 3]


FACTS: Facts = {"torch": "2.13", "driver": "", "device_memory_gib": 0}


@pytest.mark.parametrize("num_ranks", [2, 16])
def test_only_rank_0_reads_what_all_ranks_run_on(num_ranks: int) -> None:
    shared = dist.HashStore()
    stores = [CountedStore(shared) for _ in range(num_ranks)]
    hosts: dict[int, list[str]] = {}

    def compare(rank: int) -> None:
        hosts[rank] = compare_ranks(FACTS, stores[rank], rank, num_ranks)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(hosts.values()) == [[socket.gethostname()] * num_ranks] * num_ranks
    for store in stores[1:]:
        assert dict(store.num_requests) == {"ours set": 1, "ours get": 1}


def test_a_rank_does_not_wait_for_rank_0_without_a_limit() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(HydraulisError, match=r"rank 1 waited 0 s for the comparison of ranks"):
        compare_ranks(FACTS, store, 1, 2)


def test_rank_0_names_ranks_that_do_not_say_what_they_run_on() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=0.1))
    store.set("hydraulis/preflight/1", json.dumps(["node0", FACTS]))
    with pytest.raises(HydraulisError, match=r"all 3 ranks .* these did not: 2; see their logs"):
        compare_ranks(FACTS, store, 0, 3)
    with pytest.raises(HydraulisError, match=r"these did not: 2"):
        compare_ranks(FACTS, store, 1, 3)


def test_ranks_that_only_meet_import_no_megatron_core() -> None:
    script = (
        "import sys, megatron.hydraulis.loop.preflight\nassert 'megatron.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
