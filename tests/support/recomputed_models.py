"""Small models with activation recompute."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support.models import SmallModel


@dataclass(frozen=True)
class RecomputedModel(SmallModel):
    """A small model with upstream's settings of activation recompute."""

    granularity: str | None = None
    method: str | None = None
    num_layers_recomputed: int | None = None
    modules: tuple[str, ...] | None = None

    def transformer(self) -> TransformerConfig:
        """Upstream's configuration of the whole model."""
        config = super().transformer()
        config.recompute_granularity = self.granularity
        config.recompute_method = self.method
        config.recompute_num_layers = self.num_layers_recomputed
        if self.modules is not None:
            config.recompute_modules = list(self.modules)
        return config

    @property
    def plain(self) -> SmallModel:
        """The same model without recompute."""
        return SmallModel(**{field.name: getattr(self, field.name) for field in fields(SmallModel)})


def recomputed(model: SmallModel, **settings: object) -> RecomputedModel:
    """The model with these settings of recompute."""
    values = {field.name: getattr(model, field.name) for field in fields(SmallModel)}
    return RecomputedModel(**values, **settings)  # type: ignore[arg-type]
