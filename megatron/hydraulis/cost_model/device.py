"""Rates, memory and links of devices, with unit, source and date.

They are good enough to rank strategies before a cost profile is measured, which replaces them.
"""

import math
import re
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from typing import Annotated, Self

from megatron.hydraulis.assumed import Assumed
from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model.host import GRACE_CORE_FACTOR, SERVER_CORE_FACTOR
from megatron.hydraulis.cost_model.kernels import (
    A100_KERNELS,
    B200_KERNELS,
    H100_KERNELS,
    FittedKernels,
    Rates,
)
from megatron.hydraulis.errors import ConfigurationError

ASSUMED_COMMUNICATORS = 8
"""Communicators of a rank while the job's pool is not known."""
MOST_PEERS = 7
"""Other ranks of a node with which connections were measured (`_PEER_BYTES`). More of them share as
many channels (assumption)."""


class Precision(StrEnum):
    """The type of parameters and activations in training, with the bytes of a number."""

    BF16 = "bf16", 2
    FP32 = "fp32", 4

    num_bytes: int

    def __new__(cls, name: str, num_bytes: int) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.num_bytes = num_bytes
        return member

    @classmethod
    def of(cls, name: str) -> Self:
        """The precision with this name; ConfigurationError if it is unknown."""
        for precision in cls:
            if precision == name:
                return precision
        raise ConfigurationError(
            f"precision {name!r} is none of {len(cls)}; use one of {', '.join(cls)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Memory of a rank that micro-batches leave free, in bytes, by what takes it."""

    context_bytes: float = 0.0
    """The CUDA context, with the kernels of libraries."""
    fragment_bytes: float = 0.0
    """Unused parts of the allocator's blocks."""
    communicator_bytes: float = 0.0
    """Buffers of all communicators."""
    connection_bytes: float = 0.0
    """Buffers for messages to single ranks of the node."""
    as_a_whole_bytes: float = 0.0
    """A figure for everything, where one is given instead."""

    @property
    def num_bytes(self) -> float:
        """All parts."""
        return math.fsum(astuple(self))

    @property
    def text(self) -> str:
        """The parts that take memory, in GB."""
        parts = {
            "context": self.context_bytes,
            "fragments of the allocator": self.fragment_bytes,
            "communicators": self.communicator_bytes,
            "connections within the node": self.connection_bytes,
        }
        shown = ", ".join(f"{value / 1e9:.3g} for {name}" for name, value in parts.items() if value)
        return f"{self.num_bytes / 1e9:.3g} GB" + (f" ({shown})" if shown else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConstants:
    """One kind of device and its usual links.

    Raises ConfigurationError when a rate or the memory is not positive or a fraction is outside
    (0, 1].
    """

    name: str
    peak_flops_per_s: float
    """Dense matrix products in bf16, from the data sheet."""
    fp32_flops_per_s: float | None = None
    """The same in fp32; None: as many. Without tensor cores, as torch multiplies fp32
    unless TF32 is allowed (``torch.backends.cuda.matmul.allow_tf32``), which training does not."""
    matmul_fraction: float = 1.0
    """Share of the peak that matrix products reach, without `kernels`."""
    attention_fraction: float = 1.0
    """Share of the peak that causal attention of long sequences reaches, counted as in
    analytic.py, without `kernels`."""
    kernel_s: float
    """Time of the shortest kernel."""
    core_factor: Annotated[float | None, Assumed(1.7, 0.6, "see SERVER_CORE_FACTOR")] = (
        SERVER_CORE_FACTOR
    )
    """Time of the host over that on the core of `host.py`; None if the device is the host."""
    link_fraction: Annotated[
        float,
        Assumed(0.75, 1.15, "of InfiniBand all-to-alls reach 0.6, all-gathers 0.92", most=1.0),
    ]
    """Share of a link's bandwidth that messages reach which are not in `kernels`."""
    network_fraction: Annotated[
        float,
        Assumed(1.4, 0.5, "0.8 is what nccl-tests reach alone, 0.3 a shared fabric", most=1.0),
    ]
    """Share of the network of all their ranks that collectives over several nodes reach."""
    memory_bytes: float
    """Memory of one rank."""
    memory_bytes_per_s: float
    """Bandwidth of the device's own memory, from the data sheet."""
    reserve_bytes: float | None = None
    """Memory kept free as a whole; None: the sum of the following parts."""
    context_bytes: float = 0.0
    """Memory of the context."""
    fragment_bytes: float = 0.0
    """Memory that the allocator reserves beyond its tensors."""
    communicator_bytes: float = 0.0
    """Memory of a communicator on the device."""
    peer_bytes: float = 0.0
    """Memory of the connection to a rank of the node that exchanges messages with this one."""
    intra_node: Link
    inter_node: Link
    ranks_per_domain: int = 0
    """Ranks that the links inside a node connect, if they are more than a node has; else 0."""
    most_ranks_per_node: int = 0
    """GPUs of the nodes that are sold, if these have one size; else 0."""
    kernels: FittedKernels | None = None
    """Times of single kernels, where some were measured."""
    source: str
    """Where the figures come from, with the date."""

    def __post_init__(self) -> None:
        peaks = (self.peak(precision) for precision in Precision)
        rates = (*peaks, self.memory_bytes, self.memory_bytes_per_s)
        fractions = (
            self.matmul_fraction,
            self.attention_fraction,
            self.link_fraction,
            self.network_fraction,
        )
        costs = (
            self.kernel_s,
            self.core_factor or 0.0,
            self.reserve_bytes or 0.0,
            self.context_bytes,
            self.fragment_bytes,
            self.communicator_bytes,
            self.peer_bytes,
            self.ranks_per_domain,
            self.most_ranks_per_node,
        )
        if (
            not all(0.0 < value < math.inf for value in rates)
            or not all(0.0 < value <= 1.0 for value in fractions)
            or not all(0.0 <= value < math.inf for value in costs)
        ):
            raise ConfigurationError(
                f"device {self.name!r}: peak, memory and its bandwidth must be positive, "
                f"fractions in (0, 1], times, host and reserve not negative, but they are {rates}, "
                f"{fractions}, {costs}; correct them"
            )

    def peak(self, precision: Precision) -> float:
        """FLOP/s of dense matrix products."""
        if precision is Precision.FP32 and self.fp32_flops_per_s is not None:
            return self.fp32_flops_per_s
        return self.peak_flops_per_s

    def rates(self, precision: Precision) -> Rates:
        """The rates by which kernels run."""
        return Rates(
            flops_per_s=self.peak(precision),
            memory_bytes_per_s=self.memory_bytes_per_s,
            link_bytes_per_s=self.intra_node.bytes_per_s,
            entry_bytes=precision.num_bytes,
        )

    def reserve(
        self,
        num_communicators: int = ASSUMED_COMMUNICATORS,
        num_peers: int = MOST_PEERS,
    ) -> Reserve:
        """What a rank keeps free; by default of a job whose pool is not known yet.

        Args:
            num_communicators: that the rank creates.
            num_peers: ranks of its node to which it sends messages.
        """
        if self.reserve_bytes is not None:
            return Reserve(as_a_whole_bytes=self.reserve_bytes)
        return Reserve(
            context_bytes=self.context_bytes,
            fragment_bytes=self.fragment_bytes,
            communicator_bytes=num_communicators * self.communicator_bytes,
            connection_bytes=min(num_peers, MOST_PEERS) * self.peer_bytes,
        )

    def cluster(self, num_ranks: int, ranks_per_node: int) -> Cluster:
        """A cluster of such devices with their usual links.

        Raises ConfigurationError for more ranks of a node than it has GPUs.
        """
        if self.most_ranks_per_node and ranks_per_node > self.most_ranks_per_node:
            raise ConfigurationError(
                f"device {self.name!r}: a node has {self.most_ranks_per_node} GPUs but "
                f"{ranks_per_node} ranks; give --ranks-per-node {self.most_ranks_per_node} (in "
                f"Python ranks_per_node). NVLink connects {self.ranks_per_domain} ranks whatever "
                f"the node"
            )
        return Cluster(
            num_nodes=math.ceil(num_ranks / ranks_per_node),
            ranks_per_node=ranks_per_node,
            ranks_per_domain=max(ranks_per_node, self.ranks_per_domain),
            intra_node=self.intra_node,
            inter_node=self.inter_node,
        )


# NVLink figures of data sheets add both directions; a Link has one. nccl-tests commonly show 5 µs
# and 10 µs for small messages inside a node and across (an assumption).
_NVLINK_LATENCY_S = 5e-6
_NETWORK_LATENCY_S = 10e-6

_NVLINK_3 = Link(
    bytes_per_s=300e9,
    latency_s=_NVLINK_LATENCY_S,
    source="NVIDIA A100 80GB data sheet, 600 GB/s both ways (June 2021)",
)
_NVLINK_3_A800 = Link(
    bytes_per_s=200e9,
    latency_s=_NVLINK_LATENCY_S,
    source="NVIDIA A800 80GB data sheet, 400 GB/s both ways (2022)",
)
_NVLINK_4 = Link(
    bytes_per_s=450e9,
    latency_s=_NVLINK_LATENCY_S,
    source="NVIDIA H100 SXM data sheet, 900 GB/s both ways (2023)",
)
_NVLINK_5 = Link(
    bytes_per_s=900e9,
    latency_s=_NVLINK_LATENCY_S,
    source="NVIDIA HGX B200 and GB200 NVL72 data sheets, 1.8 TB/s both ways (2024)",
)
_INFINIBAND_HDR = Link(
    bytes_per_s=25e9,
    latency_s=_NETWORK_LATENCY_S,
    source="NVIDIA DGX A100 data sheet, one 200 Gbit/s adapter a GPU (2021)",
)
_INFINIBAND_NDR = Link(
    bytes_per_s=50e9,
    latency_s=_NETWORK_LATENCY_S,
    source="NVIDIA DGX H100, DGX B200, GB200 NVL72 data sheets, a 400 Gbit/s adapter a GPU (2023)",
)
_GLOO_LOCAL = Link(
    bytes_per_s=1e9,
    latency_s=100e-6,
    source="assumption: gloo over the loopback device, ranks sharing cores (2026)",
)
_GLOO_NETWORK = Link(
    bytes_per_s=1.25e9,
    latency_s=200e-6,
    source="assumption: 10 Gbit/s Ethernet (2026)",
)

# The shortest matrix products of the tables named in kernels.py.
_AMPERE_KERNEL_S, _HOPPER_KERNEL_S, _BLACKWELL_KERNEL_S = 2.9e-6, 2.5e-6, 1.8e-6
# nccl-tests, all-reduce inside an A100 node: about 0.8 of the data sheet's bandwidth (assumption).
_LINK_FRACTION = 0.8
# At tp16 of the 32B profile on A800.
_NETWORK_FRACTION = 0.58
# A ring: 24 channels with a receiving buffer of 10 MiB and a sending one of 2 MiB, the sizes that
# NVIDIA/nccl#1685 (2025) gives; the number of channels is an assumption. It is the same whatever
# the number of ranks (a maintainer, NVIDIA/nccl#986, 2023). Versions of that year also made trees:
# 0.54 to 0.69 GB on A100 (NVIDIA/nccl#964).
_COMMUNICATOR_BYTES = 0.3e9
# H100 had 1.06 GB in use outside of torch before that all-to-all, one communicator
# included.
_CONTEXT_BYTES = 1.06e9 - _COMMUNICATOR_BYTES
# What torch's allocator reserves beyond its tensors, with expandable segments: at most 4.2 GiB for
# the roles of docs/results/memory.md, measured on a stand-in for CUDA (2026).
_FRAGMENT_BYTES = 4.54e9
# Its all-to-all, the first among the 8 H100 of a node, connected all pairs with 3.3 GB. Regrouping
# does so once a job. Messages to other nodes share the buffers of a communicator, and those of
# experts and pipelines are in the figure above (assumption).
_PEER_BYTES = 3.3e9 / MOST_PEERS
# With the assumed pool 11 GB, which is also the sum of safe_GiB and gap_MiB of arXiv 2412.07894's
# memory profile for 7B (15 GB for 32B).

_AMPERE_SOURCE = "NVIDIA data sheet (2021/2022); network fitted to arXiv 2412.07894 (2024)"
_HOPPER_SOURCE = "NVIDIA data sheet (2023); network as on the A100"
_BLACKWELL_SOURCE = "NVIDIA HGX B200 and GB200 NVL72 data sheets (2024); network as on the A100"

_A100_80 = DeviceConstants(
    name="a100-80g",
    peak_flops_per_s=312e12,
    fp32_flops_per_s=19.5e12,
    kernel_s=_AMPERE_KERNEL_S,
    link_fraction=_LINK_FRACTION,
    network_fraction=_NETWORK_FRACTION,
    memory_bytes=80e9,
    memory_bytes_per_s=2.039e12,
    context_bytes=_CONTEXT_BYTES,
    fragment_bytes=_FRAGMENT_BYTES,
    communicator_bytes=_COMMUNICATOR_BYTES,
    peer_bytes=_PEER_BYTES,
    intra_node=_NVLINK_3,
    inter_node=_INFINIBAND_HDR,
    kernels=A100_KERNELS,
    source=_AMPERE_SOURCE,
)
_H100 = replace(
    _A100_80,
    name="h100",
    peak_flops_per_s=989.4e12,
    fp32_flops_per_s=67e12,
    kernel_s=_HOPPER_KERNEL_S,
    memory_bytes_per_s=3.35e12,
    intra_node=_NVLINK_4,
    inter_node=_INFINIBAND_NDR,
    kernels=H100_KERNELS,
    source=_HOPPER_SOURCE,
)
_B200 = replace(
    _H100,
    name="b200",
    peak_flops_per_s=2250e12,
    fp32_flops_per_s=75e12,
    memory_bytes=180e9,
    memory_bytes_per_s=8e12,
    kernel_s=_BLACKWELL_KERNEL_S,
    intra_node=_NVLINK_5,
    kernels=B200_KERNELS,
    source=_BLACKWELL_SOURCE,
)

DEVICES: tuple[DeviceConstants, ...] = (
    _A100_80,
    replace(_A100_80, name="a100-40g", memory_bytes=40e9, memory_bytes_per_s=1.555e12),
    replace(_A100_80, name="a800-80g", intra_node=_NVLINK_3_A800),
    _H100,
    replace(_H100, name="h200", memory_bytes=141e9, memory_bytes_per_s=4.8e12),
    _B200,
    # NVL72: the 18 nodes of a rack are one domain of NVLink. Kernels as on the B200 (assumption).
    replace(
        _B200,
        name="gb200",
        peak_flops_per_s=2500e12,
        fp32_flops_per_s=80e12,
        memory_bytes=186e9,
        core_factor=GRACE_CORE_FACTOR,
        ranks_per_domain=72,
        most_ranks_per_node=4,
    ),
    # One core of a server: 2 fused multiply-adds of 8 fp32 numbers a cycle (AVX2) at 3 GHz make
    # 96 GFLOP/s. All other figures are assumptions for small models that share cores.
    DeviceConstants(
        name="cpu",
        peak_flops_per_s=96e9,
        matmul_fraction=0.4,
        attention_fraction=0.2,
        kernel_s=28e-6,
        core_factor=None,
        link_fraction=1.0,
        network_fraction=1.0,
        memory_bytes=4e9,
        memory_bytes_per_s=10e9,
        reserve_bytes=1e9,
        intra_node=_GLOO_LOCAL,
        inter_node=_GLOO_NETWORK,
        source="AVX2 arithmetic, else assumption (2026)",
    ),
)

DEVICE_NAMES = ", ".join(device.name for device in DEVICES)
"""Names of devices as help texts and errors list them."""


_OTHER_NAMES = {"h100-80g": "h100"}


def device_constants(name: str) -> DeviceConstants:
    """The constants of a device by name; ConfigurationError for an unknown one.

    The memory may have another unit or none: ``a100-80`` and ``a100-80gb`` are ``a100-80g``.
    """
    wanted = re.sub(r"(?<=-)(\d+)(gb?)?$", r"\1g", str(name).strip().lower())
    wanted = _OTHER_NAMES.get(wanted, wanted)
    for device in DEVICES:
        if device.name == wanted:
            return device
    raise ConfigurationError(
        f"device {name!r}: its constants are not known, but those of {len(DEVICES)} others are; "
        f"use one of {DEVICE_NAMES}, or a measured cost profile"
    )


_BY_WORD = {device.name.split("-")[0]: device for device in reversed(DEVICES)}
"""Word of the name that CUDA or a cost profile gives a device -> constants, of several the first. A
GH200 or an H20 is none of these."""


def described_device(text: str) -> DeviceConstants | None:
    """The constants of a device by CUDA's name or a cost profile's; None for an unknown one."""
    for device in DEVICES:
        if device.name == text:
            return device
    words = re.findall(r"[a-z0-9]+", text.lower())
    return next((_BY_WORD[word] for word in words if word in _BY_WORD), None)


def communicators_text(num_communicators: int) -> str:
    """How many communicators a rank creates, and their assumed memory."""
    return (
        f"a rank makes up to {num_communicators} communicators; NCCL's are assumed to take "
        f"{_COMMUNICATOR_BYTES / 1e9:g} GB each"
    )
