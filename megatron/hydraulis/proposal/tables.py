"""A proposal as tables for people."""

from collections.abc import Iterator

from rich.table import Table

from megatron.hydraulis.proposal.result import Proposal

__all__ = ["proposal_tables"]

_NONE = "–"


def proposal_tables(proposal: Proposal) -> Iterator[Table]:
    """The pool, what fewer of its strategies are worth, and the best strategy of each regime."""
    yield _pool(proposal)
    yield _sizes(proposal)
    yield _regimes(proposal)


def _pool(proposal: Proposal) -> Table:
    table = _table("proposed pool", ("strategy", "replicas"))
    for name in ("holds, tokens", "fastest in", "s an iteration", "gain ms", "gain %"):
        table.add_column(name, justify="right")
    for member in proposal.members:
        gain = (_NONE, _NONE)
        if member.gain_s is not None:
            share = member.gain_s / (proposal.mean_s + member.gain_s)
            gain = (f"{1e3 * member.gain_s:.1f}", f"{100 * share:.2f}")
        table.add_row(
            member.name,
            member.replicas,
            f"{member.longest_tokens:,}",
            f"{100 * member.num_batches / proposal.num_batches:.0f} %",
            _NONE if member.mean_s is None else f"{member.mean_s:.4f}",
            *gain,
        )
    is_needed = any(member.gain_s is None for member in proposal.members)
    why = f" ({_NONE}: only with it every sequence has a place)" if is_needed else ""
    table.caption = (
        f"Expected: {proposal.mean_s:.4f} s an iteration, mean of the plans of "
        f"{proposal.num_batches} batches. Gain: what leaving the strategy out would cost{why}."
    )
    table.caption_justify = "left"
    return table


def _sizes(proposal: Proposal) -> Table:
    table = _table("pools of other sizes", ("strategies",))
    table.add_column("s an iteration", justify="right")
    table.add_column("one more saves ms", justify="right")
    rows = [(", ".join(size.names), size.mean_s) for size in proposal.sizes]
    if proposal.one_more_s is not None and proposal.one_more:
        rows.append((f"all, with {' and '.join(proposal.one_more)}", proposal.one_more_s))
    following = [mean_s for _, mean_s in rows[1:]]
    for place, (names, mean_s) in enumerate(rows):
        saved = f"{1e3 * (mean_s - following[place]):.1f}" if place < len(following) else _NONE
        is_pool = place + 1 == len(proposal.sizes)
        table.add_row(names, f"{mean_s:.4f}", saved, style="bold" if is_pool else None)
    if proposal.one_more_s is None:
        table.caption = "No strategy was found that would make this pool faster."
        table.caption_justify = "left"
    return table


def _regimes(proposal: Proposal) -> Table:
    table = _table("one strategy for each regime", ("longest sequence, tokens",))
    table.add_column("batches", justify="right")
    table.add_column("best strategy", overflow="fold")
    table.add_column("in pool")
    table.add_column("with it alone, s", justify="right")
    table.add_column("with the pool, s", justify="right")
    for regime in proposal.regimes:
        table.add_row(
            f"{regime.above_tokens + 1:,} – {regime.up_to_tokens:,}",
            str(regime.num_batches),
            regime.replicas,
            regime.name or _NONE,
            f"{regime.mean_s:.4f}",
            f"{regime.pool_mean_s:.4f}",
        )
    table.caption = "A regime: the same schemes hold the longest sequence of the batch."
    table.caption_justify = "left"
    return table


def _table(title: str, texts: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name, overflow="fold")
    return table
