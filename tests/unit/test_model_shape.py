"""Model shapes: counts of parameters and impossible sizes."""

from dataclasses import replace

import pytest

from megatron.hydraulis.errors import ConfigurationError
from tests.support.planning import LLAMA_7B


def test_llama_7b_has_its_known_number_of_parameters() -> None:
    # As published with the weights of LLaMA-7B.
    assert LLAMA_7B.num_parameters == 6_738_415_616


def test_options_that_change_the_count() -> None:
    tied = replace(LLAMA_7B, tied_embeddings=True)
    assert LLAMA_7B.num_parameters - tied.num_parameters == 32000 * 4096
    plain = replace(LLAMA_7B, gated_mlp=False)
    assert LLAMA_7B.num_parameters - plain.num_parameters == 32 * 4096 * 11008
    grouped = replace(LLAMA_7B, num_query_groups=8)
    assert LLAMA_7B.num_parameters - grouped.num_parameters == 32 * 2 * 4096 * 24 * 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_query_groups": 5}, "32 heads are not a multiple of 5 query groups"),
    ],
)
def test_impossible_shapes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(LLAMA_7B, **changes)  # type: ignore[arg-type]
