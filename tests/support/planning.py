"""Cost models and shapes for tests of planning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.inputs import llama_shape
from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.planner.solver import SparseMatrix
from megatron.hydraulis.strategy import Scheme, Strategy


def sparse(matrix: NDArray[np.float64]) -> SparseMatrix:
    """The matrix of a program."""
    rows, columns = np.nonzero(matrix)
    num_rows, num_columns = matrix.shape
    return SparseMatrix(rows, columns, matrix[rows, columns], (num_rows, num_columns))


def evenly_divided(scheme: Scheme) -> Coefficients:
    """Work that all ranks of a scheme share evenly; a named function, so that it can be pickled."""
    return Coefficients(2e-6 / scheme.num_ranks, 0.2 / scheme.num_ranks, 3.0)


@dataclass(frozen=True)
class TableCostModel:
    """A cost model with tables by (tp, cp, pp)."""

    limits: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    default_limit: int = 4096
    overheads: Mapping[str, float] = field(default_factory=dict)
    times: Callable[[Scheme], Coefficients] = evenly_divided

    def coefficients(self, scheme: Scheme) -> Coefficients:
        return self.times(scheme)

    def max_tokens(self, scheme: Scheme) -> int:
        return self.limits.get((scheme.tp, scheme.cp, scheme.pp), self.default_limit)

    def overhead_ms(self, strategy: Strategy) -> float:
        return self.overheads.get(strategy.name, 0.0)


LLAMA_7B = llama_shape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=32,
    vocab_size=32000,
)

LLAMA_32B = llama_shape(
    num_layers=60,
    hidden_size=6656,
    ffn_hidden_size=17920,
    num_attention_heads=64,
    num_query_groups=64,
    vocab_size=30592,
)
