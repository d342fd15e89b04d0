"""Time, MFU and memory of a layout in one answer."""

from dataclasses import dataclass

from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.layout import FixedLengthJob, Layout
from megatron.hydraulis.cost_model.layout_constants import LAYOUT_CONSTANTS, LayoutConstants
from megatron.hydraulis.cost_model.layout_memory import RankMemory, rank_memory, usable_bytes
from megatron.hydraulis.cost_model.layout_time import StepTime, step_time

__all__ = ["LayoutPrediction", "predict_layout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrediction:
    """What the layout model says of one layout."""

    layout: Layout
    time: StepTime
    mfu: float
    """Model FLOPs over those that all devices could have computed in the time."""
    memory: RankMemory
    """Of the fullest rank."""
    usable_bytes: float
    """Memory of a rank."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory suffices."""
        return self.memory.total_bytes <= self.usable_bytes


def predict_layout(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    constants: LayoutConstants = LAYOUT_CONSTANTS,
) -> LayoutPrediction:
    """Time, MFU and memory; a layout that does not fit has a time too, as if it did.

    Raises ConfigurationError for a kernel that is not known and replicas that do not use all ranks,
    StrategyError for more stages than layers.
    """
    time = step_time(job, layout, device, constants)
    peak = device.peak_flops_per_s * job.num_ranks
    return LayoutPrediction(
        layout=layout,
        time=time,
        mfu=job.model_flops / (time.total_s * peak),
        memory=rank_memory(job, layout, constants),
        usable_bytes=usable_bytes(device, constants),
    )
