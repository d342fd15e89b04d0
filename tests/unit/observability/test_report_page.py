"""The page and the pictures of a report, by the command line."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.report_data import read_run
from megatron.hydraulis.observability.report_figures import figures_of
from megatron.hydraulis.observability.report_page import make_page
from tests.unit.observability.run_folders import (
    make_pool_records,
    make_record,
    make_records,
    write_config,
    write_run,
    write_trace,
)

VOID = {"meta", "link", "img", "br", "hr", "input"}
REFERENCES = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")


class PageReader(HTMLParser):
    """Elements, references and text of a page.

    Raises AssertionError for an end tag that ends nothing or
    not the last open element.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        """Cells of every row of every table."""
        self.feed(page)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> ends nothing"
        assert self.open[-1] == tag, f"</{tag}> ends <{self.open[-1]}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in REFERENCES:
                self.references.append(value or "")

    @property
    def words(self) -> str:
        """All text, with single blanks."""
        return " ".join(" ".join(self.text).split())


ALWAYS = ["loss", "throughput", "times", "prediction", "idle", "padding", "planning"]


def report(run_dir: Path, *flags: str) -> PageReader:
    assert main(["report", str(run_dir), *flags]) == 0
    return PageReader((run_dir / "report.html").read_text())


def page_alone(run_dir: Path) -> str:
    """The page without the PNG files, which take half the time."""
    run = read_run(run_dir)
    return make_page(run, figures_of(run))


def text_alone(run_dir: Path) -> PageReader:
    """The page without the figures either, which take nearly all the rest."""
    return PageReader(make_page(read_run(run_dir), ()))


def numbers(run_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["report", str(run_dir), "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def of_figures(page: PageReader) -> list[str]:
    return [name for name in page.ids if name.isalpha() and name != "iterations"]


def test_the_page_compares_the_pool_with_its_best_strategy(tmp_path: Path) -> None:
    times_s = {"pairs": {"bound_s": 0.8, "found_s": 1.0}, "long": {"bound_s": 1.1, "found_s": 1.25}}
    write_run(tmp_path, [make_record(1, strategy_times_s=times_s)])
    assert "strategy of the pool, pairs: predicted 1.00 s" in text_alone(tmp_path).words
    times_s = {"long": {"bound_s": 1.1, "found_s": 1.25}, "pairs": {"bound_s": 1.3, "found_s": 2.0}}
    write_run(tmp_path, [make_record(2, strategy_times_s=times_s)])
    # long takes 1.25 + 1.25 s instead of 1 + 1.25 s, pairs at least 1 + 1.3 s.
    text = "".join(text_alone(tmp_path).text)
    assert "the best static strategy of the pool, long: predicted 2.50 s, at least 2.30 s" in text
    assert "As planned: predicted 2.25 s, a gain of 1.022× to 1.111×." in text


def test_a_page_of_one_strategy_with_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = make_records()
    write_run(tmp_path, records)
    write_config(tmp_path)
    write_trace(tmp_path / "trace", records)
    page = report(tmp_path)
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert sorted(of_figures(page)) == sorted([*ALWAYS, "ranks", "regrouping", "replicas"])
    assert page.tags.count("svg") == len(of_figures(page))
    for name in of_figures(page):
        with Image.open(tmp_path / "report" / f"{name}.png") as image:
            assert image.format == "PNG"
            assert image.width > 600
            colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert colors is not None
        assert len(colors) > 50, f"{name}.png shows nothing"
    assert len(list((tmp_path / "report").iterdir())) == len(of_figures(page))


@pytest.mark.parametrize("kind", ["one", "pool", "nothing known"])
def test_a_page_refers_to_nothing_outside(tmp_path: Path, kind: str) -> None:
    records = make_pool_records() if kind == "pool" else make_records()
    write_run(tmp_path, records)
    if kind != "nothing known":
        write_config(tmp_path, ("pairs", "long") if kind == "pool" else ("tp2+2*tp1",))
    text = page_alone(tmp_path)
    page = PageReader(text)
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert all(reference.startswith(("#", "data:image/png")) for reference in page.references)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
    assert len(set(page.ids)) == len(page.ids)
    inside = [reference[1:] for reference in page.references if reference.startswith("#")]
    assert set(inside) | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)


def test_the_page_shows_the_figures_of_metrics_jsonl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = make_pool_records()
    write_run(tmp_path, records)
    write_config(tmp_path, ("pairs", "long"), train_iters=12)
    page = text_alone(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    for line in lines:
        (row,) = [row for row in page.rows if row[:1] == [str(line["iteration"])]]
        assert row[1] == line["strategy"]
        assert float(row[2]) == pytest.approx(line["lm_loss"], abs=6e-5)
        assert row[3] == f"{line['num_tokens']:,}"
        assert row[4:6] == ["1.25 s", "1.00 s"]
    steady = lines[1:]
    tokens_per_s = sum(line["num_tokens"] for line in steady) / sum(
        line["iteration_time_s"] for line in steady
    )
    assert f"Tokens/s {tokens_per_s:,.0f}" in page.words
    assert f"{lines[0]['lm_loss']:.4f} → {lines[-1]['lm_loss']:.4f}" in page.words
    found = numbers(tmp_path, capsys)
    assert found["totals"]["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert found["records"] == lines
    assert found["notes"] == []
    assert {one["kind"] for one in found["advice"]} <= {"act", "know"}
    assert all(one["finding"] in page.words for one in found["advice"])


def test_the_page_shows_the_sizes_of_a_batch_that_grows(tmp_path: Path) -> None:
    write_run(tmp_path, make_pool_records())
    write_config(tmp_path, ("pairs", "long"))
    assert "global batch 16 sequences" in text_alone(tmp_path).words
    path = tmp_path / "config.json"
    sizes = {"unit": "tokens", "steps": [[0, 1024], [4096, 2048], [9000, 8192]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"batch_sizes": sizes}))
    assert "global batch 1,024 to 8,192 tokens" in text_alone(tmp_path).words


def test_the_page_shows_experts_and_their_load(tmp_path: Path) -> None:
    write_run(tmp_path, make_records())
    write_config(tmp_path)
    words = text_alone(tmp_path).words
    assert all(text not in words for text in ("Expert load", "expert load", "experts a rank"))
    loads = [make_record(9, expert_load=1.5), make_record(10, expert_load=2.5, balancing_loss=1.25)]
    write_run(tmp_path, [*loads, make_record(11, expert_load=2.0, router_bias_range=(-0.5, 0.25))])
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = {"num_experts": 8, "num_expert_layers": 3, "experts_per_token": 2}
    config["model"] |= sizes | {"expert_ffn_hidden_size": 96, "shared_expert_ffn_hidden_size": 0}
    for replica in config["strategies"][0]["replicas"]:
        replica["experts_per_rank"] = "1/2 of each"
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = text_alone(tmp_path)
    load = "Expert load, median 2.00 .* worst 2.50, .* 1.2500, biases -0.5 to 0.25"
    assert re.search(load, page.words)
    assert "8 experts of ffn 96 in 3 layers, 2 a token: 1,115,264 parameters" in page.words
    assert ["tp2+2*tp1", "tp2", "0, 1", "1/2 of each", "4,096"] in page.rows
    assert page.rows[-1][-1] == "2.00"


def test_json_writes_no_file_and_is_json_of_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [make_record(1, lm_loss=None, plan_gap=None, iteration_time_s=0.0)])
    found = numbers(tmp_path, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
    assert found["totals"]["tokens_per_s"] is None
    assert found["iterations"] is None
    assert found["notes"]


@pytest.mark.parametrize(
    "records",
    [
        [make_record(1)],
        [make_record(1, lm_loss=None, grad_norm=None, replica_times_s=(), predicted_time_s=0.0)],
        [make_record(1, replica_times_s=(0.0, 0.0), imbalance=1.0, num_tokens=0)],
        [make_record(n, lm_loss=None if n % 2 else 2.0, plan_gap=None) for n in range(1, 70)],
        [make_record(n, replica_times_s=(1.0,) * 300) for n in (1, 2)],
        [make_record(n, strategy=f"<{'long ' * 30}& {n % 9}>") for n in range(1, 40)],
        [make_record(n) for n in (1, 2, 7, 8)],
    ],
    ids=["one", "empty", "no time", "gaps", "replicas", "names", "missing"],
)
def test_a_page_of_any_run(tmp_path: Path, records: list[IterationRecord]) -> None:
    write_run(tmp_path, records)
    page = PageReader(page_alone(tmp_path))
    assert "svg" in page.tags
    for name in {record.strategy for record in records}:
        assert any(name in row for row in page.rows)


def test_a_long_run_stays_a_page_of_moderate_size(tmp_path: Path) -> None:
    names = ("pairs", "long")
    write_run(
        tmp_path,
        [make_record(n, strategy=names[n % 2], lm_loss=9.0 / (1 + n % 97)) for n in range(1, 6001)],
    )
    text = page_alone(tmp_path)
    page = PageReader(text)
    assert len(text) < 4e6
    assert any(reference.startswith("data:image/png") for reference in page.references)
    assert "The last 200 iterations" in page.words


def test_a_report_goes_to_the_given_folder_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    write_run(run_dir, make_records())
    (out / "report").mkdir(parents=True)
    (out / "report" / "strategies.png").touch()
    assert main(["report", str(run_dir), "--output-dir", str(out)]) == 0
    assert (out / "report.html").is_file()
    assert not (out / "report" / "strategies.png").exists()
    assert not (run_dir / "report.html").exists()


def test_pictures_of_a_folder_that_a_link_names_stay(tmp_path: Path) -> None:
    run_dir, others = tmp_path / "run", tmp_path / "others"
    write_run(run_dir, make_records())
    others.mkdir()
    (others / "mine.png").write_bytes(b"x")
    (run_dir / "report").symlink_to(others)
    report(run_dir)
    assert [path.name for path in others.iterdir()] == ["mine.png"]
    assert list((run_dir / "report").glob("*.png"))


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert "needs a run folder but" in printed
    assert printed.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, make_records())
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert "needs writable files" in capsys.readouterr().err
