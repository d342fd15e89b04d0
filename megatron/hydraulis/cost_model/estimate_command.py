"""``hydraulis estimate``: a cost profile without measurements."""

import argparse
import datetime
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.table import Table

from megatron.hydraulis.command_line import add_pool_argument
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import (
    ASSUMED_COMMUNICATORS,
    communicators_text,
    device_constants,
)
from megatron.hydraulis.cost_model.job_costs import (
    add_device_argument,
    add_job_arguments,
    job_ranks,
)
from megatron.hydraulis.cost_model.model_arguments import (
    add_model_arguments,
    given_settings,
    job_precision,
    shape_of,
)
from megatron.hydraulis.cost_model.profile import (
    ESTIMATED,
    ProfileCostModel,
    ProfiledModel,
    ProfiledScheme,
    experts_setting,
    frozen_settings,
)
from megatron.hydraulis.cost_model.regrouping import wire_bytes
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme
from megatron.hydraulis.terminal import (
    figures_table,
    print_json,
    print_next_proposal,
    results_console,
    shown_while,
)

_NS_PER_MS, _US_PER_MS = 1e6, 1e3
_MOST_OF_A_SIZE = 3
"""Schemes of one number of ranks in the table, if none were named."""
_LEAST_MORE_TOKENS = 1.25
"""Tokens of a micro-batch over those without fs, or r, from which it is offered: these save memory
alone."""
_MOST_STAGES = 8
"""Longest pipelines of schemes that are not named: others rarely win with few micro-batches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    job = parser.add_argument_group("job")
    add_device_argument(job)
    schemes = job.add_mutually_exclusive_group()
    add_pool_argument(schemes, "; estimate its schemes", required=False)
    schemes.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        help="schemes to estimate, for example tp4pp2 (default: all of powers of two that fit)",
    )
    add_job_arguments(job, ", without --strategy-pool", required=False)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="FILE",
        help="write the cost profile here, JSON: a in ms/token², b in ms/token, c in ms, "
        "max_tokens in tokens per micro-batch",
    )
    output.add_argument("--json", action="store_true", help="print the cost profile as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Estimate, write and print; returns the exit status.

    Raises ConfigurationError or StrategyError for invalid flags and files, and as
    `estimated_profile`.
    """
    shape = shape_of(namespace)
    device = device_constants(namespace.device)
    precision = job_precision(namespace)
    num_gradient_bytes = wire_bytes(precision, reduces_in_bf16=namespace.grad_reduce_in_bf16)
    is_given = namespace.pool is not None or namespace.schemes is not None
    settings = given_settings(namespace, shape)
    with shown_while("estimate"):
        schemes, num_ranks, ranks_per_node, pool = _schemes(
            namespace, shape, gradient_bytes=num_gradient_bytes, frozen=settings["frozen"]
        )
        model = AnalyticCostModel(
            shape=shape,
            device=device,
            cluster=device.cluster(num_ranks, ranks_per_node),
            precision=precision,
            pool=pool,
            gradient_bytes=num_gradient_bytes,
            **settings,
        )
        profile = estimated_profile(model, schemes, keeps_all=is_given)
    if namespace.out is not None:
        write_output(namespace.out, profile.to_json())
    if namespace.json:
        print_json(profile.to_json())
        return 0
    console = results_console()
    shown = profile.schemes if is_given else _fastest_of_each_size(profile.schemes)
    console.print(_table(profile, shown))
    if len(shown) < len(profile.schemes):
        console.print(
            f"{len(profile.schemes) - len(shown)} other schemes fit: of each number of ranks the "
            f"{_MOST_OF_A_SIZE} with the least time a token without attention are shown; --json "
            f"prints all and --out writes them",
            highlight=False,
        )
    num_communicators = max(
        model.memory.footprint(scheme).num_communicators
        for scheme in (row.scheme for row in profile.schemes)
    )
    reserve = f"of the memory {model.memory.reserve.text} stay free"
    if pool is None:
        reserve += f", for {ASSUMED_COMMUNICATORS} communicators until the pool is known"
    for line in (*_sources(model), reserve, communicators_text(num_communicators)):
        console.print(line, highlight=False)
    print_next_proposal(
        num_ranks, ranks_per_node, namespace.out or "PROFILE", namespace.training_seq_length
    )
    return 0


def estimated_profile(
    model: AnalyticCostModel, schemes: Sequence[Scheme] | None = None, *, keeps_all: bool = False
) -> ProfileCostModel:
    """The cost profile of schemes, by default without those that do not hold the model.

    schemes: None for the `possible_schemes` of the model's job.

    Raises StrategyError for a scheme that cannot divide the model, ConfigurationError if none
    holds it.
    """
    device, cluster = model.device, model.cluster
    if schemes is None:
        schemes = possible_schemes(model)
    for scheme in schemes:
        replica = scheme.as_replica
        Strategy.parse(str(replica), replica.num_ranks).check_model(model.shape)
    rows = [
        ProfiledScheme(scheme=scheme, coefficients=model.coefficients(scheme), max_tokens=limit)
        for scheme in schemes
        if (limit := model.max_tokens(scheme)) or keeps_all
    ]
    if not any(row.max_tokens for row in rows):
        raise _nothing_fits(model, schemes)
    return ProfileCostModel(
        device=device.name,
        source=(
            f"{ESTIMATED}{cluster.num_ranks} ranks, {cluster.ranks_per_node} a node, by the "
            f"analytic model, not measured: {device.source}"
        ),
        date=datetime.date.today().isoformat(),
        num_ranks=cluster.num_ranks,
        model=ProfiledModel(
            shape=model.shape,
            dtype=model.precision,
            recompute=str(model.recompute),
            experts=experts_setting(model.shape, groups_experts=model.groups_experts),
            **frozen_settings(model.frozen, is_estimate=True),
        ),
        schemes=tuple(rows),
    )


def _nothing_fits(model: AnalyticCostModel, schemes: Sequence[Scheme]) -> ConfigurationError:
    """The error, with the scheme that needs the least memory."""
    memory = model.memory

    def least_bytes(scheme: Scheme) -> float:
        row = scheme.token_quantum
        return max(memory.peak_bytes(scheme, stage, row) for stage in range(scheme.pp))

    best = min(schemes, key=least_bytes)
    return ConfigurationError(
        f"a cost profile needs a scheme that holds the model but on {model.cluster.num_ranks} "
        f"ranks of {model.device.name} none of {len(schemes)} does: {best} needs "
        f"{least_bytes(best) / 1e9:.1f} GB of {memory.usable_bytes / 1e9:.1f} GB with the shortest "
        f"micro-batch; give more ranks, schemes of more ranks, or recompute"
    )


def possible_schemes(model: AnalyticCostModel) -> list[Scheme]:
    """All schemes of powers of two that can divide the model and have room in the job, and the
    groups of fewer than ep or fs ranks that replicas with separate sequences, ``cp8~ep8``, have.

    tp spans at most two nodes, pp at most `_MOST_STAGES` stages. ``fs`` and, if the model offers
    it, ``r`` are among them where a micro-batch then holds `_LEAST_MORE_TOKENS` times as many.
    """
    shape, num_ranks = model.shape, model.cluster.num_ranks
    ranks_per_node = model.cluster.ranks_per_node
    found: list[Scheme] = []

    def offer(scheme: Scheme, instead_of: Scheme) -> None:
        if model.max_tokens(scheme) > _LEAST_MORE_TOKENS * model.max_tokens(instead_of):
            found.extend(replace(scheme, splits_cp=scheme.shares_weights).group_schemes)

    degrees_of_ep = powers_of_two(num_ranks if shape.num_experts else 1)
    for tp, cp, pp, ep in itertools.product(*[powers_of_two(num_ranks)] * 3, degrees_of_ep):
        if tp > 2 * ranks_per_node or pp > _MOST_STAGES:
            continue
        scheme = Scheme(tp, cp, pp, ep=ep)
        replica = scheme.as_replica
        if replica.num_ranks > num_ranks:
            continue
        try:
            Strategy.parse(str(replica), replica.num_ranks).check_model(shape)
        except StrategyError:
            continue
        found.append(scheme)
        plain = [scheme]
        if replica == scheme and cp > 1 and pp == 1:
            plain.append(replace(scheme, fs=cp))
            offer(plain[1], instead_of=scheme)
        if model.offer_recompute and model.recompute.granularity != "full":
            for each in plain:
                offer(replace(each, recomputes=True), instead_of=each)
    return found


def schemes_of_job(schemes: Iterable[Scheme], num_ranks: int) -> list[Scheme]:
    """The distinct schemes, with all groups of ``cp8~``; ConfigurationError if one is too large."""
    full = [group for scheme in schemes for group in scheme.group_schemes]
    for scheme in full:
        if scheme.num_ranks > num_ranks:
            raise ConfigurationError(
                f"scheme {scheme}: a replica has {scheme.num_ranks} ranks but the job "
                f"{num_ranks}; leave it out or raise --num-ranks"
            )
    return list(dict.fromkeys(full))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … up to most."""
    return [1 << power for power in range(most.bit_length())]


def _schemes(
    namespace: argparse.Namespace, shape: ModelShape, *, gradient_bytes: int, frozen: Frozen
) -> tuple[list[Scheme] | None, int, int, PoolFootprint | None]:
    """The distinct schemes that are given, with all groups of ``cp8~``; ranks of the job and of a
    node; footprint of the pool if one was given."""
    footprint = None
    if namespace.pool is not None:
        if namespace.num_ranks is not None or namespace.ranks_per_node is not None:
            raise ConfigurationError(
                "--strategy-pool gives the ranks of the job and its nodes but --num-ranks or "
                "--ranks-per-node is given too; leave them out"
            )
        pool = Pool.read(namespace.pool)
        found = [scheme for strategy in pool.strategies for scheme in strategy.schemes]
        num_ranks, ranks_per_node = pool.num_ranks, pool.ranks_per_node
        footprint = PoolFootprint.of(pool, shape, gradient_bytes=gradient_bytes, frozen=frozen)
    else:
        if namespace.num_ranks is None:
            raise ConfigurationError(
                "an estimate without --strategy-pool needs --num-ranks, over which the "
                "optimizer's state is spread, but it is missing; give it"
            )
        num_ranks, ranks_per_node = job_ranks(namespace)
        if namespace.schemes is None:
            return None, num_ranks, ranks_per_node, None
        found = [parse_scheme(text, label="--schemes") for text in namespace.schemes]
    return schemes_of_job(found, num_ranks), num_ranks, ranks_per_node, footprint


def _fastest_of_each_size(schemes: Sequence[ProfiledScheme]) -> list[ProfiledScheme]:
    """The best schemes of each number of ranks, in order; larger ones hold longer sequences. Groups
    of cp ranks that no strategy names, such as those of ``cp8~fs``, are not among them."""
    kept: list[ProfiledScheme] = []
    replicas = [row for row in schemes if row.scheme.as_replica == row.scheme]
    for num_ranks in sorted({row.scheme.num_ranks for row in replicas}):
        of_size = [row for row in replicas if row.scheme.num_ranks == num_ranks]
        # Time per token in a full micro-batch, without attention, which depends on the lengths.
        of_size.sort(
            key=lambda row: row.coefficients.time_of_sums_ms(0.0, row.max_tokens) / row.max_tokens
        )
        kept += of_size[:_MOST_OF_A_SIZE]
    return [row for row in schemes if row in kept]


def _table(profile: ProfileCostModel, rows: Sequence[ProfiledScheme]) -> Table:
    table = figures_table(
        f"estimated cost profile, {profile.device}",
        ("scheme",),
        ("a, ns/token²", "b, µs/token", "c, ms", "max tokens"),
        caption="A micro-batch takes the longest a·Σs² + b·Σs + c of its scheme's lines.",
    )
    for row in rows:
        name, limit = str(row.scheme), f"{row.max_tokens:,}" if row.max_tokens else "does not fit"
        for form in row.coefficients.forms:
            table.add_row(
                name,
                f"{form.a_ms_per_token2 * _NS_PER_MS:.4g}",
                f"{form.b_ms_per_token * _US_PER_MS:.4g}",
                f"{form.c_ms:.4g}",
                limit,
            )
            name, limit = "", ""
    return table


def _sources(model: AnalyticCostModel) -> list[str]:
    """The device's figures with their sources."""
    device, precision = model.device, model.precision
    if device.kernels is None:
        rates = (
            f"matrix products reach {device.matmul_fraction:g} of the peak, causal attention "
            f"{device.attention_fraction:g}"
        )
    else:
        rates = (
            f"times of matrix products, attention and collectives in a node by their sizes, "
            f"products at {model.kernels.product_share:g} of the rate that was measured: "
            f"{device.kernels.source}"
        )
    return [
        f"peak {model.peak_flops_per_s / 1e12:g} TFLOP/s in {precision}, memory "
        f"{device.memory_bytes / 1e9:g} GB; "
        f"no kernel takes less than {device.kernel_s * 1e6:g} µs: {device.source}",
        rates,
        f"inside a node {device.intra_node.bytes_per_s / 1e9:g} GB/s, other messages reach "
        f"{device.link_fraction:g}: {device.intra_node.source}",
        f"across nodes {device.inter_node.bytes_per_s / 1e9:g} GB/s a rank: "
        f"{device.inter_node.source}",
    ]
