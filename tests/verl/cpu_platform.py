"""A platform of verl without an accelerator; verl has only CUDA, NPU and ROCm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

from hydraulis_patches.cpu_backend import CpuCuda


class _Device(CpuCuda):
    def get_device_name(self, device: Any = None) -> str:
        """verl knows no such device's operations per second."""
        return "CPU"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes: not measured on a CPU."""
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Gloo and the CPU; `device_module` answers as `torch.cuda` would."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _Device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def _nothing(self, *_: Any) -> None:
        """There is no device to set, seed, or wait for."""

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing


def average_with_gloo() -> None:
    """Give `all_reduce` the mean, which gloo lacks and verl asks for."""
    all_reduce = dist.all_reduce

    def with_mean(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **kw: Any
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op, group, **kw)
        all_reduce(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))

    dist.all_reduce = with_mean  # type: ignore[assignment]
