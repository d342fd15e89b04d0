"""The model that upstream's loop sees: one module that holds the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.hydraulis.library.building import HydraulisModelConfig, model_definition
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.model_building import ModelDefinition


class ModelContainer(torch.nn.Module):
    """The only entry of upstream's list of model chunks; gives access to the engine.

    It has no parameters: those of a strategy are in the engine's arena, and the optimizer's on the
    canonical shards.
    """

    def __init__(self, engine: RuntimeEngine, pg_collection: ProcessGroupCollection) -> None:
        super().__init__()
        self.engine = engine
        self.config = engine.definition.transformer
        self.pg_collection = pg_collection

    def train(self, mode: bool = True) -> ModelContainer:
        """Set the mode of every stage."""
        self.engine.set_training(mode)
        super().train(mode)
        return self


@dataclass(kw_only=True)
class ContainerConfig(HydraulisModelConfig):
    """Names our builder, by which upstream supports other models."""

    builder: ClassVar[str] = "megatron.hydraulis.loop.model_container.ModelContainerBuilder"
    engine_factory: Callable[[ModelDefinition], RuntimeEngine] | None = None


class ModelContainerBuilder:
    """Builds the container instead of upstream's wrapped GPTModels."""

    def __init__(self, model_config: ContainerConfig) -> None:
        self._config = model_config

    def build_distributed_models(
        self, pg_collection: ProcessGroupCollection, **_: Any
    ) -> list[ModelContainer]:
        """A list of one container; upstream's DDP options do not apply to canonical shards."""
        assert self._config.engine_factory is not None
        engine = self._config.engine_factory(model_definition(self._config))
        return [ModelContainer(engine, pg_collection)]
