"""One rank of a check: joins the job, runs a function of this folder.

    python -m benchmarks.gpu.rank [--small] -- MODULE FUNCTION FOLDER [ARGUMENT …]

The function gets a `Place` and the arguments. A launcher sets RANK and the like.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from benchmarks.gpu.runner import append_line, measured_line
from benchmarks.gpu.sizes import Sizes, add_size_options, chosen_sizes
from megatron.hydraulis.loop.faults import quieten_upstream
from megatron.hydraulis.loop.memory_safety import use_expandable_segments

TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Place:
    """The sizes that a check runs with, and the folder of its figures."""

    sizes: Sizes
    folder: Path

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the job."""
        return dist.get_world_size()

    def measured(self, key: str, value: float, **details: Any) -> None:
        """Keep a figure; of all ranks only rank 0's counts."""
        self._append(measured_line(key, value, **details))

    def lacks(self, key: str, why: str) -> None:
        """Keep why there is no figure."""
        self._append({"key": key, "why_not": why})

    def _append(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            append_line(self.folder / "figures.jsonl", line)
            print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rank", description=__doc__)
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("folder", type=Path)
    add_size_options(parser)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args(argv)
    use_expandable_segments()
    quieten_upstream(int(os.environ["RANK"]))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=TIMEOUT)
    # Upstream keeps a state for random numbers that tp ranks do not share.
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    module = importlib.import_module(f"benchmarks.gpu.{options.module}")
    place = Place(chosen_sizes(options), options.folder)
    getattr(module, options.function)(place, *options.arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
