"""Run on the stand-in by test_device.py: what the device answers, as JSON."""

import ctypes
import json
from typing import Any

import torch

from tests.cuda_stand_in import device

INVALID_VALUE, NOT_SUPPORTED = 1, 801
MIB = 2**20


def memory() -> dict[str, Any]:
    """Allocated, reserved and freed bytes of tensors of known sizes."""
    small = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    large = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    found: dict[str, Any] = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": device.used_bytes(0),
        "free": torch.cuda.mem_get_info()[0],
        "total": torch.cuda.mem_get_info()[1],
    }
    try:
        torch.empty(160 * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["out of memory"] = str(error)
    del small, large
    torch.cuda.empty_cache()
    found |= {"left": torch.cuda.memory_allocated(), "used at the end": device.used_bytes(0)}
    found["peak"] = torch.cuda.max_memory_allocated()
    # What was freed can be had again.
    torch.empty(160 * MIB, dtype=torch.uint8, device="cuda")
    return found


def copies() -> dict[str, Any]:
    """Values that only copies bring to the device and back."""
    values = torch.arange(1000.0).pin_memory()
    on_device = values.to("cuda", non_blocking=True)
    back = torch.zeros(1000)
    back.copy_(on_device)
    return {"equal": torch.equal(values, back), "zero": on_device.zero_().sum().device.type}


def refusals() -> dict[str, Any]:
    """Calls that a real device would refuse."""
    library = device.driver()
    number = (ctypes.c_char * 8)()
    on_device = torch.empty(1024, dtype=torch.uint8, device="cuda")
    inside = ctypes.c_void_p(on_device.data_ptr() + 512)
    host_to_device = 1
    far = ctypes.c_void_p(on_device.data_ptr() + 64 * MIB)
    return {
        "free of host memory": library.cudaFree(ctypes.byref(number)),
        "free of an inner address": library.cudaFree(inside),
        "copy to host memory as to a device": library.cudaMemcpy(
            ctypes.byref(number), inside, ctypes.c_size_t(8), host_to_device
        ),
        "copy to unmapped memory": library.cudaMemcpy(
            far, ctypes.byref(number), ctypes.c_size_t(8), host_to_device
        ),
        "copy to the device": library.cudaMemcpy(
            inside, ctypes.byref(number), ctypes.c_size_t(8), host_to_device
        ),
        "an unsupported function": library.cudaMallocAsync(None, 0, None),
    }


def events() -> dict[str, Any]:
    """Elapsed times exist between recorded events with times, and between no others."""
    start, end, never = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    end.record()
    found: dict[str, Any] = {"ms": start.elapsed_time(end)}
    for name, other in {"never recorded": never, "no timing": torch.cuda.Event()}.items():
        if name == "no timing":
            other.record()
        try:
            start.elapsed_time(other)
            found[name] = "no error"
        except Exception as error:
            found[name] = type(error).__name__
    return found


if __name__ == "__main__":
    found = {
        "devices": torch.cuda.device_count(),
        "name": torch.cuda.get_device_name(0),
        "memory": memory(),
        "copies": copies(),
        "refusals": refusals(),
        "events": events(),
    }
    print(json.dumps(found))
