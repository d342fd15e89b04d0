"""Options that are refused in every model."""

from dataclasses import replace

import pytest

from megatron.hydraulis.errors import ConfigurationError
from tests.support.models import SmallModel


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout"])
def test_dropout_is_refused_whoever_builds_the_model(name: str) -> None:
    definition = SmallModel().definition()
    transformer = replace(definition.transformer, **{name: 0.1})
    with pytest.raises(
        ConfigurationError, match=r"dropout is 0\.1, but dropout masks depend on the"
    ):
        replace(definition, transformer=transformer)
