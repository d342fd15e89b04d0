"""The device constants that the analytic cost model chooses by CUDA's name of a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.hydraulis.cost_model.device import Precision, device_constants
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.library.devices import (
    common_constants,
    constants_of_this_rank,
    known_peak_flops_per_s,
)

GIB = 1024**3


def take(monkeypatch: pytest.MonkeyPatch, name: str, memory_bytes: int, major: int) -> None:
    """Make a GPU of that name this process's device."""
    properties = SimpleNamespace(name=name, total_memory=memory_bytes, major=major)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("name", "memory_gib", "major", "taken_for"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, 8, "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", 39, 8, "a100-80g"),
        ("NVIDIA A800-SXM4-80GB", 79, 8, "a800-80g"),
        ("NVIDIA H100 80GB HBM3", 79, 9, "h100"),
        ("NVIDIA H200", 140, 9, "h200"),
        ("NVIDIA B200", 179, 10, "b200"),
        ("NVIDIA GB200", 185, 10, "gb200"),
    ],
)
def test_a_documented_device_has_its_constants_and_its_real_memory(
    name: str,
    memory_gib: int,
    major: int,
    taken_for: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    take(monkeypatch, name, memory_gib * GIB, major)
    constants = constants_of_this_rank(has_cuda=True, speaks=True)
    expected = device_constants(taken_for)
    assert constants == replace(expected, memory_bytes=float(memory_gib * GIB))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "major", "taken_for"),
    [
        ("NVIDIA GH200 480GB", 9, "h100"),
        ("NVIDIA H20", 9, "h100"),
        ("NVIDIA B300", 10, "b200"),
        ("NVIDIA RTX PRO 6000 Blackwell", 12, "a100-80g"),
        ("NVIDIA L40S", 8, "a100-80g"),
        ("Tesla V100-SXM2-32GB", 7, "a100-80g"),
    ],
)
def test_an_unknown_device_gets_the_nearest_constants_with_a_warning(
    name: str,
    major: int,
    taken_for: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    take(monkeypatch, name, 48 * GIB, major)
    constants = constants_of_this_rank(has_cuda=True, speaks=True)
    assert constants.name == taken_for
    assert constants.memory_bytes == 48 * GIB
    printed = capsys.readouterr().out
    assert f"'{name}'" in printed
    assert "uncalibrated" in printed
    constants_of_this_rank(has_cuda=True, speaks=False)
    assert capsys.readouterr().out == ""


def test_without_cuda_the_device_is_the_cpu() -> None:
    assert constants_of_this_rank(has_cuda=False, speaks=True) == device_constants("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", Precision.BF16, 989.4e12),
        ("NVIDIA A100-SXM4-80GB", Precision.BF16, 312e12),
        ("NVIDIA B300", Precision.BF16, None),  # whose predictions are those of another
    ],
)
def test_the_peak_is_known_of_documented_devices(
    name: str, precision: Precision, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert known_peak_flops_per_s(has_cuda=True, precision=precision) == peak
    assert known_peak_flops_per_s(has_cuda=False, precision=precision) is None


def test_all_ranks_plan_with_the_smallest_memory() -> None:
    device = device_constants("h100")
    memories = (80e9, 79e9, 81e9)
    devices = [replace(device, memory_bytes=memory) for memory in memories]
    assert common_constants(devices) == replace(device, memory_bytes=79e9)


def test_devices_of_two_kinds_are_refused() -> None:
    devices = [device_constants("h100"), device_constants("a100-80g"), device_constants("h100")]
    with pytest.raises(ConfigurationError, match="3 ranks have 2: a100-80g, h100"):
        common_constants(devices)
