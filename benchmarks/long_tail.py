"""Lengths of web documents by a law, where no list of them may be had.

**Law.** A lognormal body and a Pareto tail, joined where the tail begins so that density does not
jump: what generative models of file sizes and of documents on the web lead to (M. Mitzenmacher, "A
Brief History of Generative Models for Power Law and Lognormal Distributions", Internet Mathematics
1(2), 2004; A. B. Downey, "The structural cause of file size distributions", MASCOTS 2001).

**Parameters** are chosen, not fitted: a median of about 500 tokens and a mean of about 1,200 before
the cut, which is the order of a page of Common Crawl after cleaning, and a tail of infinite
variance, so that a few documents of tens of thousands of tokens hold a visible share of all tokens.
Figures that hang on the tail (which strategies pay, by how much) move with it; `--tail-exponent`
and `--median` of the benchmark change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

MEDIAN_TOKENS = 500.0
TAIL_EXPONENT = 1.5
"""Of the share of documents longer than s, s to the power of minus this."""
SIGMA = 1.15
"""Of the logarithm of lengths, in the body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTail:
    """A lognormal body and a Pareto tail.

    The tail begins where a lognormal falls as fast as it: there the logarithm of the density has
    the same slope on both sides.
    """

    median_tokens: float = MEDIAN_TOKENS
    sigma: float = SIGMA
    tail_exponent: float = TAIL_EXPONENT

    @property
    def tail_tokens(self) -> float:
        """Where the tail begins: the slope is ``-1 - log(s/median)/sigma²`` in the body and
        ``-1 - exponent`` in the tail."""
        return self.median_tokens * math.exp(self.tail_exponent * self.sigma**2)

    def quantiles(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Lengths in tokens that a share of documents is not above: shape of probabilities."""
        normal = NormalDist()
        border = self.tail_exponent * self.sigma
        body = normal.cdf(border)
        # With equal densities at the border the tail holds density · s / exponent.
        tail = normal.pdf(border) / (self.sigma * self.tail_exponent)
        mass = probabilities * (body + tail)
        in_tail = mass > body
        lengths = np.empty_like(probabilities)
        lengths[~in_tail] = [
            self.median_tokens * math.exp(self.sigma * normal.inv_cdf(float(share)))
            for share in np.clip(mass[~in_tail], 1e-12, None)
        ]
        left = (body + tail - mass[in_tail]) / tail
        lengths[in_tail] = self.tail_tokens * left ** (-1.0 / self.tail_exponent)
        return lengths

    def corpus(self, num_documents: int) -> npt.NDArray[np.int64]:
        """Lengths of a corpus with just this distribution: shape (num_documents,), rising."""
        middles = (np.arange(num_documents) + 0.5) / num_documents
        return np.maximum(1, np.rint(self.quantiles(middles))).astype(np.int64)
