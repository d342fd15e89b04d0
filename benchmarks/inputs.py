"""The 32B model, cost profile, pools and batches that benchmarks share, from files of the tree."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.lengths.counts import read_length_counts, read_lengths
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
MODEL = ROOT / "examples" / "model_llama32b.json"
QWEN3_30B_A3B = DATA / "model_qwen3_30b_a3b.json"
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
    """The result of the published planner on instance B."""
    content = json.loads((DATA / "published_planner_instance_b.json").read_text("utf-8"))
    return PublishedResult(content["plan_ms"], content["chosen"])


# ---------------------------------------------------------------- pools of many strategies

RANKS_PER_NODE = 8
POOL_DEGREES = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8))
"""tp and pp of the schemes that are estimated."""
PUBLISHED_PROFILES = DATA / "published_profiles_a800.json"
POOL_PROFILES = ("13B a100-80g", "7B A800", "32B A800")
"""The first is estimated for the sizes of Llama 2, the others were measured and published."""
LLAMA_13B = llama_shape(
    num_layers=40,
    hidden_size=5120,
    ffn_hidden_size=13_824,
    num_attention_heads=40,
    num_query_groups=40,
    vocab_size=32_000,
)
POOL_RANKS = (16, 32, 64)
POOL_CONTEXTS_TOKENS = (8192, 16_384, 32_768)
POOL_RANK_TOKENS = (2048, 4096, 8192)
"""Tokens of a batch for each rank: the cases take them in turn."""
POOL_SIZES = (8, 47)
"""Least and most strategies of a random pool."""
MOST_TERMS = 4
"""Of a random strategy."""
MANY_TRIES = 10
"""Strategies drawn for each different one that is wanted."""


@dataclass(frozen=True)
class PoolCase:
    """A batch for a random pool with an estimated profile."""

    name: str
    profile: ProfileCostModel
    pool: Pool
    batch: list[int]


def pool_cases(seed: int, profiles: Sequence[str] = POOL_PROFILES) -> Iterator[PoolCase]:
    """A case for every size of the job, profile and context: 27 with all profiles.

    profiles: those wanted; a case does not depend on which others are.
    """
    documents = LengthDistribution()
    for index, (num_ranks, name, context) in enumerate(
        itertools.product(POOL_RANKS, POOL_PROFILES, POOL_CONTEXTS_TOKENS)
    ):
        if name not in profiles:
            continue
        generator = np.random.default_rng([seed, index])
        if name == POOL_PROFILES[0]:
            profile = llama_13b_on_a100(num_ranks)
        else:
            profile = published_profile(name, num_ranks)
        cut_tokens = min(context, max(row.max_tokens for row in profile.schemes))
        rank_tokens = POOL_RANK_TOKENS[sum(divmod(index, 3)) % len(POOL_RANK_TOKENS)]
        yield PoolCase(
            f"{name}, {num_ranks} ranks, {context // 1024}K, {rank_tokens} a rank",
            profile,
            _random_pool(generator, profile, num_ranks, cut_tokens),
            documents.batch(int(generator.integers(2**31)), num_ranks * rank_tokens, cut_tokens),
        )


def llama_13b_on_a100(num_ranks: int) -> ProfileCostModel:
    """The profile that `hydraulis estimate` writes for Llama 2 13B."""
    device = device_constants("a100-80g")
    cluster = device.cluster(num_ranks, RANKS_PER_NODE)
    schemes = [Scheme(tp=tp, pp=pp) for tp, pp in POOL_DEGREES if tp * pp <= num_ranks]
    model = AnalyticCostModel(shape=LLAMA_13B, device=device, cluster=cluster)
    return estimated_profile(model, schemes, keeps_all=True)


def published_profile(name: str, num_ranks: int) -> ProfileCostModel:
    """Measured times of a model, and the limits in a job of this size."""
    content = json.loads(PUBLISHED_PROFILES.read_text(encoding="utf-8"))
    rows = [
        row | {"cp": 1, "max_tokens": row["max_tokens"][str(num_ranks)]}
        for row in content["schemes"][name.split()[0]]
        if row["tp"] * row["pp"] <= num_ranks
    ]
    profile = {"device": content["device"], "source": content["source"], "date": "2024-12-11"}
    return ProfileCostModel.from_json(profile | {"schemes": rows}, what=name)


def _random_pool(
    generator: np.random.Generator, profile: ProfileCostModel, num_ranks: int, context: int
) -> Pool:
    """Homogeneous and mixed strategies that hold the context; pipelines are as likely as others.

    A small job may have fewer different ones than the size that was drawn.
    """
    limits = {row.scheme: row.max_tokens for row in profile.schemes if row.max_tokens}
    holding = [scheme for scheme, limit in limits.items() if limit >= context]
    size = int(generator.integers(POOL_SIZES[0], POOL_SIZES[1] + 1))
    found: dict[str, Strategy] = {}
    for _ in range(MANY_TRIES * size):
        if len(found) == size:
            break
        schemes = [holding[generator.integers(len(holding))]]
        idle = num_ranks - schemes[0].num_ranks
        num_terms = int(generator.integers(1, MOST_TERMS + 1))
        while idle:
            able = [scheme for scheme in limits if scheme.num_ranks <= idle]
            # Once there are enough different schemes, they are repeated.
            known = [scheme for scheme in able if scheme in schemes]
            if known and len(set(schemes)) >= num_terms:
                able = known
            scheme = able[generator.integers(len(able))]
            most = idle // scheme.num_ranks
            num = most if len(set(schemes)) >= num_terms else int(generator.integers(1, most + 1))
            schemes += [scheme] * num
            idle -= num * scheme.num_ranks
        schemes.sort(key=lambda scheme: (-scheme.num_ranks, str(scheme)))
        terms = [f"{len([*same])}*{scheme}" for scheme, same in itertools.groupby(schemes)]
        text = "+".join(terms)
        found[text] = Strategy.parse(text, num_ranks, ranks_per_node=RANKS_PER_NODE)
    return Pool.of(*found.values())


# ---------------------------------------------------------------- waves in FlexSP's setting

WAVE_RANKS = 64
FLEXSP_MODEL = "gpt-7b"
USABLE_MB = 30 * 1024
"""Of each rank."""
STATE_BYTES, ACTIVATION_BYTES = 16, 2
MB_PER_GB, BYTES_PER_MB = 1024, 2**20
NUM_ALL_TO_ALLS = 8
"""Of a layer's hidden states, forward and backward: 4·2 in the published formula."""
FLEXSP_SEQUENCES = 512
FLEXSP_MOST_TOKENS = 191_872
FLEXSP_QUANTUM_TOKENS = 128
"""Lengths are rounded up to a multiple."""
GITHUB_LENGTHS = ((735, 1.75), (735, 2.2), (245, 2.6))
"""Medians and sigmas of log-normal lengths: many short sequences, few very long ones."""
NUM_WAVE_BATCHES = 4


def flexsp_profile() -> ProfileCostModel:
    """The published time and memory model; a group of d ranks is a scheme cp d.

    ``(a1·Σs² + a2·Σs) / d + b1 + all-to-all`` ms; a rank has room for what its memory leaves after
    ZeRO-3's states.
    """
    reference = json.loads((DATA / "flexsp_reference.json").read_text(encoding="utf-8"))
    constants = reference["models"][FLEXSP_MODEL]
    states_mb = constants["P_192K"] * STATE_BYTES * MB_PER_GB / WAVE_RANKS
    tokens_per_rank = (USABLE_MB - states_mb) / constants["act_MB_per_token"]
    hidden_mb = constants["layers"] * constants["hidden"] * ACTIVATION_BYTES / BYTES_PER_MB
    rows = []
    for width in (1, 2, 4, 8, 16, 32, 64):
        exchange_ms = 0.0
        if width > 1:
            rate = reference["alltoall_MB_per_ms"][str(width)]
            exchange_ms = NUM_ALL_TO_ALLS * hidden_mb / width / rate
        times = Coefficients(
            constants["a1"] / width, constants["a2"] / width + exchange_ms, constants["b1"]
        )
        rows.append(
            ProfiledScheme(
                scheme=Scheme(cp=width), coefficients=times, max_tokens=int(tokens_per_rank * width)
            )
        )
    return ProfileCostModel(
        device="A100-40GB", source=reference["source"], date="2024", schemes=tuple(rows)
    )


def wave_cases(seed: int) -> Iterator[PoolCase]:
    """Batches for one replica of all ranks that runs waves: of Wikipedia, and like GitHub's."""
    profile = flexsp_profile()
    strategy = Strategy.parse(f"cp{WAVE_RANKS}~", WAVE_RANKS, ranks_per_node=RANKS_PER_NODE)
    pool = Pool.of(strategy)
    wikipedia = json.loads((DATA / "flexsp_batches.json").read_text(encoding="utf-8"))["batches"]
    for index, batch in enumerate(wikipedia[:NUM_WAVE_BATCHES]):
        yield PoolCase(f"Wikipedia {index}", profile, pool, batch)
    for median, sigma in GITHUB_LENGTHS:
        for index in range(NUM_WAVE_BATCHES):
            generator = np.random.default_rng(seed + index)
            drawn = generator.lognormal(np.log(median), sigma, FLEXSP_SEQUENCES)
            cut = np.minimum(drawn, FLEXSP_MOST_TOKENS)
            rounded = np.ceil(cut / FLEXSP_QUANTUM_TOKENS).astype(int) * FLEXSP_QUANTUM_TOKENS
            yield PoolCase(f"GitHub, σ {sigma}, {index}", profile, pool, rounded.tolist())


# ---------------------------------------------------------------- costs of several forms

RING_RANKS = 16
RING_POOLS = (
    "2*cp8",
    "cp8+8*tp1 cp8+4*tp2 cp4+cp8+4*tp1 2*cp8",
    "cp8pp2",
    "2*cp4pp2 cp4pp2+cp8 cp8pp2",
    "4*cp4 2*cp8 cp8+2*cp4",
)
RING_CROSSING_TOKENS = 3000
"""Length for each rank of a ring from which attention takes longer than its exchange."""
RING_LENGTHS = (8.0, 1.5)
"""Mean and sigma of the logarithms of lengths."""


def ring_times(scheme: Scheme) -> Coefficients:
    """8B on H100, rounded: attention hides a ring's exchange, or that of the backward, or neither;
    the link alone; the host."""
    layers, cp = 32 / scheme.pp, scheme.cp
    a = 7.2e-8 * layers / (scheme.tp * cp)
    b = 2.9e-3 * layers / (scheme.tp * cp)
    exchange = a * RING_CROSSING_TOKENS * cp * (1 - 1 / cp)
    hidden = Coefficients(a, b, 0.02 * layers)
    others = (
        replace(hidden, a_ms_per_token2=a * (1 + 1 / cp) / 2, b_ms_per_token=b + 0.55 * exchange),
        replace(hidden, a_ms_per_token2=a / cp, b_ms_per_token=b + exchange),
        Coefficients(0.0, 1.3 * exchange, 0.04 * layers),
    )
    return replace(hidden, others=others if cp > 1 else (), host_ms=layers)


def ring_cases(seed: int) -> Iterator[PoolCase]:
    """Batches for replicas with rings, up to the limit of the largest."""
    for texts, tokens in itertools.product(RING_POOLS, (500_000, 1_000_000)):
        strategies = [Strategy.parse(text, RING_RANKS) for text in texts.split()]
        schemes = {scheme for each in strategies for scheme in each.schemes}
        limits = {scheme: 16_384 * scheme.tp * scheme.cp for scheme in sorted(schemes, key=str)}
        rows = tuple(
            ProfiledScheme(scheme=each, coefficients=ring_times(each), max_tokens=limit)
            for each, limit in limits.items()
        )
        profile = ProfileCostModel(device="H100", source="rounded", date="2026", schemes=rows)
        drawn = np.random.default_rng(seed).lognormal(*RING_LENGTHS, tokens // 1000)
        lengths = np.minimum(drawn.astype(int) + 1, max(limits.values()))
        batch = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1].tolist()
        yield PoolCase(
            f"{texts.split()[-1]}, {len(strategies)}", profile, Pool.of(*strategies), batch
        )
