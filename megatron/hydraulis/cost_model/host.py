"""Time in which a rank's host issues the kernels of a micro-batch.

The host runs Python and torch's C++ ahead of the device, also across micro-batches, so that this
time binds a replica and not each of its micro-batches (`Coefficients.host_ms`). It does not depend
on the number of tokens. Of a layer it is

    core_factor · processor time + launches · LAUNCH_S

Processor times are measured on the CUDA stand-in, which launches nothing, and launches are counted
(``python -m tests.cuda_stand_in.host_time --te``; tests/cuda_stand_in/README.md, "The host"). The
core is one of an AMD EPYC 9004 at 2.6 GHz (2026-11-24).
"""

from dataclasses import dataclass

LAUNCH_S = 2.65e-6
"""Host time of the driver for a launch: an empty kernel among many, CUDA 13.3 (ahrefs/ocannl issue
488, 2026)."""
SERVER_CORE_FACTOR = 1.0
"""Host time on a GPU server's core over that on the measured one, an assumption between 0.6 and
1.7. The forward of a linear layer takes the host of a DGX H100 13.5 µs (Xeon 8480C;
NVIDIA/TransformerEngine issue 2053, 2025) and the measured core 6.4 µs: 1.7 if cuBLAS, which the
stand-in does not have, took no time in addition to the launch, 1.0 if it took 4 µs."""
GRACE_CORE_FACTOR = 2.5
"""The same for Grace, which takes 2.5 (GH200) to 2.8 (GB200) times as long for that layer as the
Xeon (the same issue)."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time of the host for a part of a layer and a micro-batch."""

    forward_s: float
    """Processor time."""
    backward_s: float
    num_launches: int
    """In both. A third of them are the forward's."""

    def seconds(self, core_factor: float, num_forwards: float = 1.0) -> float:
        """Time on another core; num_forwards: with those for recomputation."""
        processor_s = num_forwards * self.forward_s + self.backward_s
        num_launches = self.num_launches * (num_forwards + 2.0) / 3.0
        return core_factor * processor_s + num_launches * LAUNCH_S


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerHost:
    """Times of the host by what a layer consists of."""

    dense: HostTime
    """A layer with attention and an MLP."""
    latents: HostTime
    """What latent attention takes more."""
    tensor_parallel: HostTime
    """What tensor parallelism takes more, with sequence parallelism."""
    experts: HostTime
    """What router and all-to-all dispatcher take more than an MLP, without experts."""
    expert: HostTime
    """One of a rank's experts."""


LOCAL_LAYERS = LayerHost(
    dense=HostTime(0.84e-3, 0.61e-3, 65),
    latents=HostTime(0.28e-3, 0.34e-3, 35),
    tensor_parallel=HostTime(0.13e-3, 0.33e-3, 0),
    experts=HostTime(0.98e-3, 0.42e-3, 83),
    expert=HostTime(0.12e-3, 0.21e-3, 27),
)
"""Layers of megatron-core; each expert is a module."""
TE_LAYERS = LayerHost(
    dense=HostTime(1.30e-3, 0.95e-3, 51),
    latents=HostTime(0.57e-3, 0.53e-3, 31),
    tensor_parallel=HostTime(0.55e-3, 0.58e-3, 0),
    experts=HostTime(1.1e-3, 0.9e-3, 81),
    expert=HostTime(0.03e-3, 0.03e-3, 6),
)
"""Layers of Transformer Engine; experts are grouped products. The measured times hardly
depend on the number of experts."""
