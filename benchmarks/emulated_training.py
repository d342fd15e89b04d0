"""The training program on an emulated device: every micro-batch takes its modelled time.

    torchrun --nproc-per-node 8 -m benchmarks.emulated_training --emulate-device COST_PROFILE FLAGS

FLAGS are those of `hydraulis train`. Plans are made with the times of the emulated device. Losses
and trained weights mean nothing: see `benchmarks.emulated_device`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated_device import EmulatedDevice, EmulatedForwardStep, EmulationCount
from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.loop import entry
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.runtime.outcome import LossTotal

COST_PROFILE = "--cost-profile"


class EmulatedEngine(RuntimeEngine):
    """An engine on an emulated device; the other arguments are those of `RuntimeEngine`."""

    def __init__(self, *args: Any, emulated: EmulatedDevice, **named: Any) -> None:
        super().__init__(*args, **named)
        self._emulated = emulated
        self._count = EmulationCount()
        if self.rank == 0:
            print(f"warning: {emulated.notice}", file=sys.stderr, flush=True)

    def forward_backward(
        self,
        strategy_name: str,
        batches: Sequence[PackedBatch],
        forward_step: ForwardStep,
        **named: Any,
    ) -> None:
        super().forward_backward(
            strategy_name,
            self._shortened(strategy_name, batches),
            EmulatedForwardStep(forward_step, count=self._count),
            **named,
        )

    def evaluate(
        self, strategy_name: str, batches: Sequence[PackedBatch], forward_step: ForwardStep
    ) -> LossTotal:
        return super().evaluate(
            strategy_name,
            self._shortened(strategy_name, batches),
            EmulatedForwardStep(forward_step, count=self._count),
        )

    def close(self) -> None:
        """Collective: rank 0 also reports overruns of modelled times."""
        super().close()
        counts: list[EmulationCount] = [EmulationCount()] * dist.get_world_size()
        dist.all_gather_object(counts, self._count)
        total = sum(counts, EmulationCount())
        if total.num_overruns and self.rank == 0:
            print(
                f"warning: emulated device: {total.num_overruns} of {total.num_operations} "
                f"forwards and backwards took longer than their modelled time, by "
                f"{total.overrun_s:.3g} s over all ranks; raise --emulate-scale or use fewer "
                f"layers",
                file=sys.stderr,
                flush=True,
            )

    def _shortened(
        self, strategy_name: str, batches: Sequence[PackedBatch]
    ) -> Sequence[PackedBatch]:
        mine = self.pool.strategy(strategy_name).replica_of(self.rank)
        if mine is None:
            return batches
        return [self._emulated.shorten(batch, mine.scheme) for batch in batches]


def main(argv: Sequence[str] | None = None) -> None:
    """Train; exits with status 2 and one line for flags that cannot be run."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m benchmarks.emulated_training",
        description="Train on an emulated device; all other flags are those of hydraulis train.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--emulate-device",
        type=Path,
        required=True,
        metavar="COST_PROFILE",
        help="times of the device, for plans and for micro-batches",
    )
    parser.add_argument(
        "--emulate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="seconds here for each second of the device (default: %(default)s)",
    )
    parser.add_argument("--memory-trial", default="off", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args(argv)
    path, scale = options.emulate_device, options.emulate_scale
    if any(flag.split("=")[0] == COST_PROFILE for flag in flags):
        parser.error(f"--emulate-device {path} gives the times that plans use: no {COST_PROFILE}")
    if options.memory_trial not in ("auto", "off"):
        parser.error(
            "--memory-trial measures whole micro-batches, but ranks that emulate a device run a "
            f"few tokens of each: no --memory-trial {options.memory_trial}"
        )
    if torch.cuda.is_available():
        parser.error("a rank that emulates a device must not have one: set CUDA_VISIBLE_DEVICES=''")
    try:
        device = EmulatedDevice.read(path, scale)
    except ConfigurationError as error:
        parser.error(str(error))
    with TemporaryDirectory() as folder:
        scaled = Path(folder) / path.name
        name = f"{device.cost_model.device} emulated, times x {scale:g}"
        write_json(scaled, dataclasses.replace(device.cost_model, device=name).to_json())
        entry.main(
            [*flags, COST_PROFILE, str(scaled)],
            entry.UserHooks(
                engine=partial(EmulatedEngine, emulated=device),
                notes=(f"{device.notice[:1].upper()}{device.notice[1:]}.",),
            ),
        )


if __name__ == "__main__":
    main()
