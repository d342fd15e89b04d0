"""What is to be profiled: schemes, the strategies that fill the job with them, the setup."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_terms

__all__ = [
    "device_name",
    "filling_strategy",
    "parse_scheme",
    "profiled_pool",
    "training_defaults",
    "versions",
]

_CPU_INFO = Path("/proc/cpuinfo")
_PACKAGES = ("torch", "megatron-core", "numpy", "scipy")

# What training needs and a profile does not: (attribute's flags, value).
_DEFAULTS = (
    (("--train-iters",), "1"),
    (("--lr",), "1e-4"),
    (("--global-batch-size", "--global-batch-tokens"), "1"),
)


def training_defaults(model_flags: Sequence[str]) -> list[str]:
    """The flags of a training run for those of a model: what only training needs is added."""
    added: list[str] = []
    for options, value in _DEFAULTS:
        if not any(word.split("=")[0] in options for word in model_flags):
            added += [options[0], value]
    return [*added, *model_flags]


def parse_scheme(text: str) -> Scheme:
    """One scheme in the notation, ``tp2pp2:3,5``. Raises StrategyError for anything else."""
    terms = parse_terms(text, label=text)
    if len(terms) != 1 or terms[0].num_copies != 1 or terms[0].scheme is None:
        raise StrategyError(
            f"scheme {text!r}: one scheme is wanted but this is a strategy; write for "
            f"example tp2pp2"
        )
    return terms[0].scheme


def filling_strategy(scheme: Scheme, num_ranks: int, ranks_per_node: int | None) -> Strategy:
    """As many replicas of a scheme as the ranks hold, the rest idle: a busy machine as in training.

    Raises StrategyError where not even one fits.
    """
    num_replicas, num_idle = divmod(num_ranks, scheme.num_ranks)
    if not num_replicas:
        raise StrategyError(
            f"scheme {scheme} needs {scheme.num_ranks} ranks but {num_ranks} were started"
        )
    text = f"{num_replicas}*{scheme}" + (f"+{num_idle}*idle" if num_idle else "")
    return Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)


def profiled_pool(
    schemes: Iterable[Scheme],
    pool: Pool | None,
    num_ranks: int,
    ranks_per_node: int | None,
) -> tuple[dict[Scheme, Strategy], Pool, tuple[str, ...]]:
    """Strategies to measure schemes with, all strategies of the job, and a line for what is left.

    Of a scheme that splits its cp ranks every size of group is measured, as a scheme of its own.
    Strategies of a pool for as many ranks are measured as well, under their names: what they take
    beside their makespan.

    Raises ConfigurationError where no scheme can be measured.
    """
    filling: dict[Scheme, Strategy] = {}
    left_out: list[str] = []
    for scheme in dict.fromkeys(group for whole in schemes for group in whole.group_schemes):
        try:
            filling[scheme] = filling_strategy(scheme, num_ranks, ranks_per_node)
        except StrategyError as error:
            left_out.append(f"left out: {error}")
    if not filling:
        raise ConfigurationError(
            f"a profile needs at least 1 scheme that can be run but has 0: {'; '.join(left_out)}; "
            f"start more ranks or name other schemes with --schemes"
        )
    nodes = next(iter(filling.values())).ranks_per_node
    named = {strategy.name: strategy for strategy in filling.values()}
    if pool is not None and (pool.num_ranks, pool.ranks_per_node) == (num_ranks, nodes):
        for strategy in pool.strategies:
            if {scheme.group_schemes[0] for scheme in strategy.schemes} <= set(filling):
                named.setdefault(strategy.name, strategy)
    return filling, Pool.of(*named.values()), tuple(left_out)


def device_name(num_ranks_of_node: int) -> str:
    """What the times hold for: the GPU, or the CPU with the ranks that share it."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    model = platform.processor() or platform.machine()
    if _CPU_INFO.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
        model = model if found is None else found.group(1)
    num_cores = len(os.sched_getaffinity(0))
    return (
        f"CPU {model}: {num_ranks_of_node} ranks on {num_cores} cores, "
        f"{torch.get_num_threads()} threads a rank"
    )


def versions() -> dict[str, str]:
    """Of what computes."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | found


def today() -> str:
    """ISO 8601."""
    return datetime.date.today().isoformat()


def setup_of(model_flags: Sequence[str], **settings: Any) -> dict[str, Any]:
    """What measurements of one file have in common; a rerun must have the same."""
    return {"model_flags": list(model_flags), "versions": versions()} | settings
