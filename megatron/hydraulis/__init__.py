"""Hydraulis: balanced training over sequences of very different lengths, on Megatron.

The names below are imported when they are used: ``import megatron.hydraulis`` and planning load
neither torch nor Megatron, which `Engine` needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.hydraulis.quiet_imports import (
    explained_if_only_planning_is_installed,
    import_upstream_without_compiler,
    silence_warnings_of_imports,
)

if TYPE_CHECKING:
    from megatron.hydraulis.cost_model.profile import ProfileCostModel as ProfileCostModel
    from megatron.hydraulis.cost_model.trained_model import Recompute as Recompute
    from megatron.hydraulis.errors import HydraulisError as HydraulisError
    from megatron.hydraulis.library.batches import Batch as Batch
    from megatron.hydraulis.library.batches import TokenSequence as TokenSequence
    from megatron.hydraulis.library.engine import BatchLoss as BatchLoss
    from megatron.hydraulis.library.engine import Engine as Engine
    from megatron.hydraulis.library.hugging_face import HfShard as HfShard
    from megatron.hydraulis.library.plans import ModelLike as ModelLike
    from megatron.hydraulis.library.plans import PoolLike as PoolLike
    from megatron.hydraulis.library.plans import ProfileLike as ProfileLike
    from megatron.hydraulis.library.plans import estimate as estimate
    from megatron.hydraulis.library.plans import plan as plan
    from megatron.hydraulis.library.plans import propose as propose
    from megatron.hydraulis.library.plans import simulate as simulate
    from megatron.hydraulis.lora import Lora as Lora
    from megatron.hydraulis.model_shape import ModelShape as ModelShape
    from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings as AdamWSettings
    from megatron.hydraulis.planner.planned import PlannedBatch as PlannedBatch
    from megatron.hydraulis.proposal.propose import Proposal as Proposal
    from megatron.hydraulis.runtime.outcome import LossTotal as LossTotal
    from megatron.hydraulis.runtime.outcome import StepOutcome as StepOutcome
    from megatron.hydraulis.runtime.token_loss import OUTPUTS as OUTPUTS
    from megatron.hydraulis.runtime.token_loss import Segments as Segments
    from megatron.hydraulis.runtime.token_loss import TokenLoss as TokenLoss
    from megatron.hydraulis.simulator.comparison import Comparison as Comparison
    from megatron.hydraulis.strategy import Pool as Pool
    from megatron.hydraulis.strategy import Strategy as Strategy

import_upstream_without_compiler()

_MODULES = {
    "AdamWSettings": "optimizer.sharded_adamw",
    "Batch": "library.batches",
    "BatchLoss": "library.engine",
    "Comparison": "simulator.comparison",
    "Engine": "library.engine",
    "HfShard": "library.hugging_face",
    "HydraulisError": "errors",
    "Lora": "lora",
    "LossTotal": "runtime.outcome",
    "ModelLike": "library.plans",
    "ModelShape": "model_shape",
    "OUTPUTS": "runtime.token_loss",
    "PlannedBatch": "planner.planned",
    "Pool": "strategy",
    "PoolLike": "library.plans",
    "ProfileLike": "library.plans",
    "ProfileCostModel": "cost_model.profile",
    "Proposal": "proposal.propose",
    "Recompute": "cost_model.trained_model",
    "Segments": "runtime.token_loss",
    "StepOutcome": "runtime.outcome",
    "Strategy": "strategy",
    "TokenLoss": "runtime.token_loss",
    "TokenSequence": "library.batches",
    "estimate": "library.plans",
    "plan": "library.plans",
    "propose": "library.plans",
    "simulate": "library.plans",
}


def __getattr__(name: str) -> Any:
    """A public name, imported now."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    silence_warnings_of_imports()
    with explained_if_only_planning_is_installed():
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found  # so that the next use does not come here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
