from argparse import Namespace

import pytest

from benchmarks.inputs import llama_shape
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.checks import check_context
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Strategy

NUM_RANKS = 8


def shape_of(num_heads: int, num_groups: int) -> ModelShape:
    return llama_shape(
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=num_heads,
        num_query_groups=num_groups,
        vocab_size=64,
    )


def check(strategy: str, *types: str, num_heads: int = 8, num_groups: int = 8) -> None:
    shape = shape_of(num_heads, num_groups)
    pool = Pool.of(Strategy.parse(strategy, num_ranks=NUM_RANKS))
    check_context(Namespace(cp_comm_type=list(types)), pool, shape)


@pytest.mark.parametrize("cp_comm_type", ["auto", "p2p", "all_gather", "a2a"])
def test_known_types(cp_comm_type: str) -> None:
    check("tp2cp4", cp_comm_type)


@pytest.mark.parametrize("types", [("ring",), ("a2a", "p2p"), ("a2a+p2p",)])
def test_others_are_refused(types: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="takes 1 of auto, p2p, all_gather, a2a"):
        check("cp8", *types)


def test_an_all_to_all_uses_the_heads_after_tensor_parallelism() -> None:
    check("tp2cp4", "a2a", num_groups=2)
    with pytest.raises(ConfigurationError, match=r"tp4cp2: a2a over 2 .* but there are 1; use"):
        check("tp4cp2", "a2a", num_heads=4, num_groups=4)


def test_every_size_that_a_replica_may_split_into_counts() -> None:
    check("cp2+3*tp2", "a2a", num_heads=6, num_groups=6)
    check("cp8~", "a2a")
    with pytest.raises(ConfigurationError, match=r"a2a over 4 .* query heads .* there are 6"):
        check("cp8~", "a2a", num_heads=6, num_groups=6)
