"""Ways to train the same batches, compared by simulation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.table import Table

from megatron.hydraulis.command_line import Flag
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.batches import BatchesRequest, sample_batches
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.observability.pictures import CATEGORY_COLORS, figure_svg, style_rows
from megatron.hydraulis.simulator.results import PARTS, WayResult, simulate_way
from megatron.hydraulis.simulator.ways import MEGATRON_CP, PACKING, POOL, WAYS, BatchPlanning, Ways
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.terminal import OnProgress, StrategyText, notebook_html, table_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 100

_PERCENT = 100.0
_MAX_STRATEGIES = 4
_HEADS = {
    "work": "work\n%",
    "fill": "fill\n%",
    "parameters": "par.\n%",
    "imbalance": "imb.\n%",
    "regroup": "regr.\n%",
    "planning": "plan.\n%",
}
_COLORS = {
    "work": CATEGORY_COLORS[0],
    "padding": CATEGORY_COLORS[3],
    "fill": CATEGORY_COLORS[5],
    "parameters": CATEGORY_COLORS[4],
    "imbalance": "#d0d0d0",
    "regroup": CATEGORY_COLORS[1],
    "planning": CATEGORY_COLORS[2],
}
_WIDTH_INCHES = 9.0
_MARGIN_INCHES = 1.7
_ROW_INCHES = 0.42
_MAX_OVER_NEXT = 2.5
"""The bar of a way that is more times slower than the next one is cut off, so that the others stay
readable."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Times of ways to train on the same batches; a notebook draws it, ``print`` shows tables."""

    results: tuple[WayResult, ...]
    """One for each way, in the order of `WAYS`."""
    skipped: dict[str, str]
    """Reason why a way is skipped, by its name."""
    ways: Ways
    """All ways, with the batches."""

    @property
    def reference(self) -> WayResult:
        """The base of speed-ups: packing if it was simulated, else the first way."""
        return next((each for each in self.results if each.name == PACKING), self.results[0])

    def result(self, way: str) -> WayResult:
        """The result of a way; ConfigurationError if it was not simulated or is skipped."""
        for each in self.results:
            if each.name == way:
                return each
        names = ", ".join(repr(each.name) for each in self.results)
        raise ConfigurationError(
            f"simulation: way {way!r} has no result, but {names} have; simulate it too"
        )

    @property
    def title(self) -> str:
        """Title that says what was simulated."""
        batches = self.ways.batches
        return (
            f"{len(batches)} iterations on {self.ways.pool.num_ranks} ranks: "
            f"{self._num_tokens / len(batches):,.0f} tokens each (mean), longest sequence "
            f"{self.ways.longest:,}"
        )

    @property
    def _num_tokens(self) -> int:
        return sum(map(sum, self.ways.batches))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.title}>"

    def __str__(self) -> str:
        texts = [table_text(table, _WIDTH) for table in self.tables()]
        return "".join([*texts, *(f"{line}\n" for line in self.remarks())])

    def tables(self) -> Iterator[Table]:
        """Time and its parts by way; the strategies of each."""
        yield result_table(self.results, self.reference, self.title)
        yield strategy_use_table(self.results)

    def remarks(self) -> Iterator[str]:
        """Ways that are skipped, with the reason."""
        for name, why in self.skipped.items():
            yield f"{name!r} is skipped: {why}."

    def figure(self) -> Figure:
        """A bar per way: the mean time of an iteration, divided into its parts."""
        return results_figure(self.results, self.reference, self.title)

    def _repr_html_(self) -> str:
        svg = figure_svg(self.figure(), "simulation")
        return notebook_html(str(self), svg)

    def to_json(self) -> dict[str, Any]:
        """All figures by name, times in s."""
        return {
            "num_ranks": self.ways.pool.num_ranks,
            "num_iterations": len(self.ways.batches),
            "num_tokens": self._num_tokens,
            "longest_tokens": self.ways.longest,
            "reference": self.reference.name,
            "ways": [result.to_json(self.reference) for result in self.results],
            "left_out": self.skipped,
        }


@dataclass(frozen=True, kw_only=True)
class SimulationRequest(BatchesRequest):
    """Asks what ways to train take for the same batches of a corpus.

    Raises ConfigurationError, besides for numbers, for an unknown way.
    """

    pool: Pool
    """Strategies of the way ``pool``."""
    costs: JobCosts
    """Costs of the pool's job."""
    shape: ModelShape | None = None
    """The model's, if costs do not know it."""
    seq_length: Annotated[
        int | None,
        Flag(
            "most tokens of a sequence (default: the most tokens that a micro-batch of the pool "
            "may have)"
        ),
    ] = None
    iterations: Annotated[int, Flag("iterations to simulate")] = 100
    ways: Annotated[
        Collection[str],
        Flag(
            f"what to simulate, of {', '.join(map(repr, WAYS))} (default: all); explained in "
            "docs/metrics.md",
            metavar="WAY",
            choices=WAYS,
        ),
    ] = WAYS
    plan_ahead: Annotated[
        int, Flag("iterations planned ahead; 0 plans between iterations", metavar="K")
    ] = 2
    plan_time_s: Annotated[
        float | None,
        Flag(
            "time of a plan in s (default: the CPU time that it takes here)",
            name="--plan-time",
            metavar="S",
        ),
    ] = None
    num_processes: Annotated[
        int,
        Flag(
            "number of planning processes if there are many iterations; it does not change the "
            "plans (default: the cores, here %(default)s)",
            name="--processes",
        ),
    ] = 1
    kept: range = range(0)
    """Numbers of the iterations whose tasks are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.ways if name not in WAYS]
        if unknown:
            raise ConfigurationError(
                f"--ways: {unknown[0]!r} is none of the {len(WAYS)} ways; choose from "
                f"{', '.join(map(repr, WAYS))}"
            )

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest possible sequence."""
        if self.seq_length is not None:
            return self.seq_length
        limits = Limits(self.costs.profile)
        return max(
            limits.max_tokens(strategy, scheme)
            for strategy in self.pool.strategies
            for scheme in strategy.schemes
        )


def compare_ways(
    request: SimulationRequest, on_progress: OnProgress = lambda what, done, total: None
) -> Comparison:
    """Samples batches and simulates ways to train them.

    on_progress: with phases of each way, by its number and name.

    Raises ConfigurationError if no way can be simulated, StrategyError for a scheme without costs,
    PlanError if no strategy holds a batch, DataError as `LengthCounts.cut`.
    """
    costs = request.costs
    shape = request.shape if costs.model is None else costs.model.shape
    known = [way for way in WAYS if way in request.ways]

    def on_phase(what: str, done: int, total: int) -> None:
        number = next(i for i, way in enumerate(known, start=1) if what.startswith(way))
        on_progress(f"{number}/{len(known)} {what}", done, total)

    results: list[WayResult] = []
    skipped: dict[str, str] = {}
    with BatchPlanning(request.num_processes) as planning:
        ways = Ways(
            batches=sample_batches(
                request.counts.sequences,
                num_batches=request.iterations,
                seed=request.seed,
                sizes=request.sizes,
            ),
            pool=request.pool,
            costs=costs,
            seq_length=request.seq_length,
            shape=shape,
            plan_time_s=request.plan_time_s,
            row_quantum=request.row_quantum_tokens,
            planning=planning,
            on_progress=on_phase,
        )
        for name in known:
            result = simulate_way(
                name,
                ways.candidates(name),
                shape=shape,
                regroup=costs.profile.regroup,
                plan_ahead=request.plan_ahead,
                kept=request.kept,
            )
            if result is not None:
                results.append(result)
            elif name == MEGATRON_CP and not costs.knows_exchange:
                skipped[name] = (
                    "the cost of cp is unknown; give --device and the model, or measure schemes "
                    "with cp"
                )
            else:
                skipped[name] = f"none of its strategies holds a sequence of {ways.limit} tokens"
    if not results:
        raise ConfigurationError(
            f"--ways: no strategy for {', '.join(skipped)} can be simulated with "
            f"sequences of {ways.limit} tokens; simulate {POOL!r} too"
        )
    return Comparison(results=tuple(results), skipped=skipped, ways=ways)


def result_table(results: Sequence[WayResult], reference: WayResult, title: str) -> Table:
    """A row per way: throughput, speed-up over the reference, parts of the ranks' time."""
    table = _table(title)
    table.add_column("way", no_wrap=True)
    for name in (
        "tokens\n/s",
        "speed\nup",
        "iter.\ns",
        "±\ns",
        *(_HEADS[part] for part in PARTS),
        "pad.\n%",
        "slow.\n/mean",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        shares = result.shares
        table.add_row(
            result.name,
            f"{result.tokens_per_s:,.0f}",
            f"{reference.time_s / result.time_s:.2f}",
            f"{result.time_s / len(result.accounts):.3f}",
            "–" if result.error_s is None else f"{result.error_s:.3f}",
            *(f"{_PERCENT * shares[part]:.1f}" for part in PARTS),
            f"{_PERCENT * result.padding_fraction:.1f}",
            f"{result.imbalance:.3f}",
            style="bold" if result is results[-1] else None,
        )
    table.caption = (
        f"Speed-up over {reference.name!r}. ±: standard error of an iteration's mean time, which "
        "other batches would change. Shares of all ranks' time. work: forward and backward, "
        "also of padding; fill: waiting in the pipeline; par.: waiting for parameters; imb.: "
        "waiting for the slowest replica; regr.: scatter and update that are not hidden; plan.: "
        "waiting for the plan. pad.: share of padding in the computed tokens. slow./mean: time of "
        "the slowest replica over the mean of all."
    )
    return table


def strategy_use_table(results: Sequence[WayResult]) -> Table:
    """The strategies that each way used."""
    table = _table("Strategies")
    table.add_column("way", no_wrap=True)
    table.add_column("iterations with it: strategy", overflow="fold")
    table.add_column("regrouping: a rank\nreceives GB/iteration", justify="right")
    for result in results:
        uses = result.num_uses.most_common()
        # No line break between the number and the strategy.
        shown = [f"{num}x\u00a0{result.strategies[name]}" for name, num in uses[:_MAX_STRATEGIES]]
        if len(uses) > _MAX_STRATEGIES:
            shown.append(f"{len(uses) - _MAX_STRATEGIES} more")
        received = f"{result.received_bytes / 1e9:.2f}" if result.received_bytes else "–"
        if result.skipped_bytes:
            received += f", and has\n{result.skipped_bytes / 1e9:.2f} of frozen ones"
        table.add_row(result.name, StrategyText(", ".join(shown)), received)
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )


def results_figure(results: Sequence[WayResult], reference: WayResult, title: str) -> Figure:
    """A bar per way: the mean time of an iteration, divided into its parts.

    Work is divided into trained tokens and padding.
    """
    # Simulating needs no matplotlib, which takes long to import.
    from matplotlib.figure import Figure

    height = _MARGIN_INCHES + _ROW_INCHES * len(results)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.subplots()
    longest_s = _longest_drawn_s([result.time_s / len(result.accounts) for result in results])
    for place, result in enumerate(results):
        _draw_way(axes, place, result, reference, longest_s)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=9)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0.0, 1.22 * longest_s)
    style_rows(axes, "s per iteration, divided by what the ranks do in it", title)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    figure.legend(
        first.values(),
        first.keys(),
        loc="outside lower center",
        ncols=len(_COLORS),
        fontsize=8,
        frameon=False,
    )
    return figure


def _longest_drawn_s(times_s: Sequence[float]) -> float:
    rising = sorted(times_s)
    for shorter_s, longer_s in zip(reversed(rising[:-1]), reversed(rising), strict=False):
        if longer_s <= _MAX_OVER_NEXT * shorter_s:
            return longer_s
    return rising[0]


def _draw_way(
    axes: Axes, place: int, result: WayResult, reference: WayResult, longest_s: float
) -> None:
    iteration_s = result.time_s / len(result.accounts)
    shares = result.shares
    padding = shares["work"] * result.padding_fraction
    parts = {"work": shares["work"] - padding, "padding": padding}
    parts |= {part: shares[part] for part in PARTS if part != "work"}
    is_cut = iteration_s > longest_s * (1.0 + 1e-9)
    drawn_s = longest_s if is_cut else iteration_s
    left_s = 0.0
    for part, share in parts.items():
        axes.barh(place, share * drawn_s, left=left_s, height=0.66, color=_COLORS[part], label=part)
        left_s += share * drawn_s
    text = f"{result.tokens_per_s:,.0f} tokens/s, {reference.time_s / result.time_s:.2f}x"
    if is_cut:
        text = f"… {iteration_s:,.1f} s: " + text
    axes.text(
        left_s - 0.01 * longest_s if is_cut else left_s + 0.01 * longest_s,
        place,
        text,
        va="center",
        ha="right" if is_cut else "left",
        fontsize=8,
        color="white" if is_cut else "black",
    )
