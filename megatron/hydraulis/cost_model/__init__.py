"""Time and memory of micro-batches, schemes and pipelines, measured or from first principles."""

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.interface import FORWARD_SHARE, Coefficients, CostModel
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.cost_model.pipeline import pipeline_schedule, pipeline_time_ms
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.trained_model import Recompute
from megatron.hydraulis.model_shape import ModelShape

__all__ = [
    "FORWARD_SHARE",
    "AnalyticCostModel",
    "Coefficients",
    "CostModel",
    "JobCosts",
    "MemoryModel",
    "ModelShape",
    "ProfileCostModel",
    "Recompute",
    "device_constants",
    "pipeline_schedule",
    "pipeline_time_ms",
]
