"""Ways to train the same batches, compared by simulation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from megatron.hydraulis.command_line import Flag
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.batches import BatchesRequest, sample_batches
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.observability.pictures import figure_svg
from megatron.hydraulis.simulator.batches import BatchPlanning
from megatron.hydraulis.simulator.output import result_table, results_figure, strategy_use_table
from megatron.hydraulis.simulator.results import SimulationSettings, WayResult, simulate_way
from megatron.hydraulis.simulator.ways import MEGATRON_CP, PACKING, POOL, WAYS, Ways
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.terminal import OnProgress, notebook_html, table_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 100


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """What ways to train take for the same batches; a notebook draws it, ``print`` shows tables."""

    results: tuple[WayResult, ...]
    """In the order of `WAYS`."""
    skipped: dict[str, str]
    """Why a way is skipped, by its name."""
    ways: Ways
    """With the batches."""

    @property
    def reference(self) -> WayResult:
        """What speed-ups are relative to: packing if it was simulated, else the first way."""
        return next((each for each in self.results if each.name == PACKING), self.results[0])

    def result(self, way: str) -> WayResult:
        """Of a way; ConfigurationError if it was not simulated or is skipped."""
        for each in self.results:
            if each.name == way:
                return each
        names = ", ".join(repr(each.name) for each in self.results)
        raise ConfigurationError(
            f"simulation: way {way!r} has no result, but {names} have; simulate it too"
        )

    @property
    def title(self) -> str:
        """What was simulated."""
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
    """Of the pool's job."""
    shape: ModelShape | None = None
    """Of the model, if costs do not know it."""
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
    settings = SimulationSettings(
        shape=request.shape if costs.model is None else costs.model.shape,
        regroup=costs.profile.regroup,
        plan_ahead=request.plan_ahead,
        kept=request.kept,
    )
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
            shape=settings.shape,
            plan_time_s=request.plan_time_s,
            row_quantum=request.row_quantum_tokens,
            planning=planning,
            on_progress=on_phase,
        )
        for name in known:
            result = _simulated(name, ways, settings)
            if isinstance(result, WayResult):
                results.append(result)
            else:
                skipped[name] = result
    if not results:
        raise ConfigurationError(
            f"--ways: no strategy for {', '.join(skipped)} can be simulated with "
            f"sequences of {ways.limit} tokens; simulate {POOL!r} too"
        )
    return Comparison(results=tuple(results), skipped=skipped, ways=ways)


def _simulated(name: str, ways: Ways, settings: SimulationSettings) -> WayResult | str:
    """The result of a way, or why it is skipped."""
    result = simulate_way(name, ways.candidates(name), settings)
    if result is not None:
        return result
    if name == MEGATRON_CP and not ways.costs.knows_exchange:
        return "the cost of cp is unknown; give --device and the model, or measure schemes with cp"
    return f"none of its strategies holds a sequence of {ways.limit} tokens"
