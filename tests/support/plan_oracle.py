"""The rules of a plan, checked on its JSON by code that shares nothing with planner and cost model.

Only the placement of a strategy's replicas is the package's own. Times are those of
`brute_force.simulated_ms`, an event simulation of 1F1B.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.hydraulis.strategy import Pool, Scheme
from tests.support.brute_force import ReplicaFigures, simulated_ms

Content = dict[str, Any]


class BrokenRuleError(Exception):
    """A plan breaks the rule that the message begins with."""


def check_plan(plan: Content, lengths: Sequence[int], pool: Content, profile: Content) -> None:
    """Raise BrokenRuleError for the first broken rule; all but the lengths are as in the files.

    The overhead is checked where the profile has it under the strategy's name.
    """
    strategy = Pool.from_json(pool).strategy(plan["strategy"])
    placed = [(replica.scheme.to_json(), list(replica.ranks)) for replica in strategy.replicas]
    _equal("replicas", [(r["scheme"], r["ranks"]) for r in plan["replicas"]], placed)
    micro_batches = [batch for r in plan["replicas"] for batch in r["micro_batches"]]
    _rule("empty", all(batch["sequences"] for batch in micro_batches))
    sequences = [sequence for batch in micro_batches for sequence in batch["sequences"]]
    _equal("sequences", sorted(sequences), list(range(len(lengths))))
    planned = [length for batch in micro_batches for length in batch["lengths"]]
    _equal("lengths", planned, [lengths[sequence] for sequence in sequences])
    _rule("ids", "sequence_ids" not in plan or len(plan["sequence_ids"]) == len(lengths))
    limits = {str(scheme): limit for scheme, limit in strategy.token_limits}
    times_s = []
    for entry, replica in zip(plan["replicas"], strategy.replicas, strict=True):
        time_s = _time_s(entry["micro_batches"], replica.scheme, limits, profile)
        _close("replica time", entry["predicted_time_s"], time_s)
        times_s.append(time_s)
    measured = [
        (row.get("regroup_ms", 0.0) + row.get("optimizer_ms", 0.0)) / 1e3
        for row in profile.get("strategies", [])
        if row["name"] == strategy.name
    ]
    overhead_s = measured[0] if measured else plan["predicted_time_s"] - max(times_s)
    _rule("overhead", overhead_s >= -1e-9)
    _close("iteration time", plan["predicted_time_s"], max(times_s) + overhead_s)
    for stage in (plan["dispatch"], plan["packing"]):
        if stage is not None:
            _close("objective", stage["objective_s"], max(times_s))
            _rule("bound", stage["bound_s"] <= max(times_s) * (1 + 1e-9))
            gap = 1 - stage["bound_s"] / stage["objective_s"] if max(times_s) else 0.0
            _rule("gap", abs(stage["gap"] - max(0.0, gap)) < 1e-9)


def simulated_time_ms(
    times_ms: Sequence[float],
    num_stages: int,
    forward_share: float = 1 / 3,
    host_ms: float = 0.0,
) -> float:
    """The end of 1F1B; times_ms: forward + backward of each micro-batch on one stage."""
    figures = ReplicaFigures(
        0.0, 0.0, 0.0, 0, num_stages, forward_share=forward_share, host_ms=host_ms
    )
    return float(simulated_ms(np.array([times_ms], dtype=np.float64), figures)[0])


def _time_s(
    micro_batches: list[Content], scheme: Scheme, limits: dict[str, int], profile: Content
) -> float:
    """Time of a replica whose micro-batches keep the limits of tokens.

    limits: the strategy's own, by scheme. Those of a context group are its share of them.
    """
    rows = {_row_key(row, row["cp"]): row for row in profile["schemes"]}
    times_ms = []
    for batch in micro_batches:
        groups = batch.get("groups", [[0, scheme.cp, len(batch["sequences"])]])
        ends = list(itertools.accumulate(size for _, size, _ in groups))
        cut = list(itertools.accumulate(number for *_, number in groups))
        _rule("groups", scheme.splits_cp or "groups" not in batch)
        _equal("groups", (ends[-1], cut[-1]), (scheme.cp, len(batch["lengths"])))
        _equal("groups", [offset for offset, *_ in groups], [0, *ends[:-1]])
        _rule("rows", "rows" not in batch or len(batch["rows"]) == len(groups))
        slowest_ms = 0.0
        for place, (offset, cp, number) in enumerate(groups):
            key = _row_key(scheme.to_json(), cp)
            _rule("groups", key in rows and offset % cp == 0)
            row = rows[key]
            held = batch["lengths"][cut[place] - number : cut[place]]
            # With cp > 1 a sequence is cut into 2·cp equal chunks; tp ranks share a row evenly.
            chunks = 2 * cp if cp > 1 else 1
            multiple = scheme.tp * chunks
            padded = sum(-(-length // chunks) * chunks for length in held)
            needed = max(1, -(-padded // multiple)) * multiple
            listed = batch["rows"][place] if "rows" in batch else None
            tokens = needed if listed is None else listed
            _rule("rows", tokens >= needed and tokens % multiple == 0)
            limit = limits.get(str(scheme), row["max_tokens"])
            if cp < scheme.cp and str(scheme) in limits:
                limit = limit * cp // scheme.cp
            counted = tokens if tokens > needed or (cp > 1 and held) else sum(held)
            _rule(f"limit of {limit} tokens but {counted}", counted <= limit)
            work = _figures(row, profile)
            slowest_ms = max(slowest_ms, work.time_ms(held, listed))
        times_ms.append(slowest_ms)
    whole = rows[_row_key(scheme.to_json(), scheme.cp)]
    share, host_ms = whole.get("forward_share", 1 / 3), whole.get("host_ms", 0.0)
    return simulated_time_ms(times_ms, scheme.pp, share, host_ms) / 1e3


def _row_key(scheme: Content, cp: int) -> tuple[Any, ...]:
    """The key of the profile's row for a context group of a scheme."""
    marks = scheme.get("ep", 1), scheme.get("fs", 1), scheme.get("recomputes", False)
    return scheme["tp"], cp, scheme["pp"], tuple(scheme.get("layers", ())), *marks


def _figures(row: Content, profile: Content) -> ReplicaFigures:
    model = profile.get("model", {})
    num_windowed = model.get("num_windowed_layers", 0)
    first, *others = (
        (form["a_ms_per_token2"], form["b_ms_per_token"], form["c_ms"])
        for form in (row, *row.get("forms", ()))
    )
    return ReplicaFigures(
        *first,
        row["max_tokens"],
        others=tuple(others),
        window_tokens=model["window_tokens"] if num_windowed else 0,
        windowed_share=num_windowed / model["num_layers"] if num_windowed else 0.0,
    )


def _rule(name: str, is_kept: bool) -> None:
    if not is_kept:
        raise BrokenRuleError(name)


def _equal(name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise BrokenRuleError(f"{name}: {found} instead of {wanted}")


def _close(name: str, found_s: float, wanted_s: float) -> None:
    if not math.isclose(found_s, wanted_s, rel_tol=1e-9, abs_tol=1e-12):
        raise BrokenRuleError(f"{name}: {found_s} s instead of {wanted_s} s")
