"""The 32B model, cost profile, pools and batches that benchmarks share, from files of the tree."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.lengths.counts import read_length_counts, read_lengths
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Strategy

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
MODEL = ROOT / "examples" / "model_llama32b.json"
COST_PROFILE = ROOT / "examples" / "cost_profile_llama32b_a800.json"
POOL = ROOT / "examples" / "pool_64_ranks.json"
WIKIPEDIA = DATA / "wikipedia_lengths.csv"
CONTEXT_TOKENS = 32_768
"""Longer documents are cut."""
BATCH_TOKENS = 200_000
LARGE_STRATEGY = "tp16+3*tp8+238*tp4+2*tp4pp4"
LARGE_NUM_RANKS = 1024
LARGE_BATCH_TOKENS = 1_600_000
LARGE_CUTS_TOKENS = (32_768, 21_888, 14_592)
"""The context, and the token limits of tp8 and of tp4pp4: each leaves one scheme more that holds
every sequence."""


def llama_shape(
    *,
    num_layers: int = 4,
    hidden_size: int = 256,
    ffn_hidden_size: int = 704,
    num_attention_heads: int = 8,
    num_query_groups: int = 4,
    vocab_size: int = 4096,
) -> ModelShape:
    """The sizes of a LLaMA-like model; by default of one that a CPU trains."""
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=vocab_size,
        gated_mlp=True,
        tied_embeddings=False,
    )


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """The published planner's plans for instance B."""

    plan_ms: dict[str, float]
    """By strategy, time of its plan."""
    chosen: str


class LengthDistribution:
    """Lengths of documents with the number of documents that have them."""

    def __init__(self, path: Path = WIKIPEDIA) -> None:
        found = read_length_counts(path)
        self._lengths = found.lengths
        self._shares = found.counts / found.counts.sum()

    def batch(self, seed: int, num_tokens: int, cut_tokens: int = CONTEXT_TOKENS) -> list[int]:
        """Documents drawn with replacement until they have num_tokens; the last one is cut."""
        generator = np.random.default_rng(seed)
        batch: list[int] = []
        missing = num_tokens
        while missing > 0:
            # Usually enough; otherwise another draw follows.
            for length in generator.choice(self._lengths, size=4096, p=self._shares):
                batch.append(min(int(length), cut_tokens, missing))
                missing -= batch[-1]
                if missing == 0:
                    break
        return batch

    def draw(
        self, seed: int, num: int, cut_tokens: int = CONTEXT_TOKENS, *, shortest_tokens: int = 1
    ) -> list[int]:
        """This many documents of at least the given length, drawn with replacement."""
        is_drawn = self._lengths >= shortest_tokens
        lengths, shares = self._lengths[is_drawn], self._shares[is_drawn]
        generator = np.random.default_rng(seed)
        drawn = generator.choice(lengths, size=num, p=shares / shares.sum())
        return [min(int(length), cut_tokens) for length in drawn]


def cost_model() -> ProfileCostModel:
    """Llama of 32B parameters on A800, as measured."""
    profile = ProfileCostModel.read(COST_PROFILE)
    return replace(profile, schemes=tuple(row for row in profile.schemes if not row.is_assumed))


def pool() -> Pool:
    """S0 to S6 on 64 ranks: the strategies of the file without cp."""
    strategies = Pool.read(POOL).strategies
    return Pool.of(*(s for s in strategies if all(scheme.cp == 1 for scheme in s.schemes)))


def large_pool() -> Pool:
    """One strategy on 1,024 ranks."""
    return Pool.of(Strategy.parse(LARGE_STRATEGY, LARGE_NUM_RANKS, ranks_per_node=8))


def instance_b() -> list[int]:
    """80 sequences with a long tail."""
    return list(read_lengths(ROOT / "examples/lengths_instance_b.json"))


def published_result() -> PublishedResult:
    """Of the published planner on instance B."""
    content = json.loads((DATA / "published_planner_instance_b.json").read_text("utf-8"))
    return PublishedResult(content["plan_ms"], content["chosen"])
