"""The page of a report in a real browser, if one is installed."""

import dataclasses
import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.__main__ import main
from tests.unit.observability.run_folders import (
    make_pool_records,
    make_records,
    write_config,
    write_run,
    write_trace,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
TIMEOUT_S = 100

MIN_CONTRAST = 4.5
"""Of text, by the Web Content Accessibility Guidelines 2.1, 1.4.3."""
MIN_TEXT_PX = 8.0
"""Height of the letters' box in a figure."""

PROBE = """
<script>
window.addEventListener("load", () => {
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = text => {
    const [r, g, b] = rgb(text).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const figures = [...document.querySelectorAll("figure")].map(figure => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const back = getComputedStyle(figure).backgroundColor;
    const texts = [...svg.querySelectorAll("text")];
    const marks = [...svg.querySelectorAll("path, use, image")].filter(mark => {
      const own = mark.getBoundingClientRect();
      return own.width + own.height > 0 && getComputedStyle(mark).visibility === "visible";
    });
    return {
      name: figure.id, width: box.width, height: box.height,
      num_marks: marks.length, num_texts: texts.length,
      // Of turned text the width is the height of its letters; of a single letter it is the larger.
      smallest_text_px: Math.min(...texts.map(text => {
        const own = text.getBoundingClientRect();
        return own.width < own.height && text.textContent.length > 1 ? own.width
          : Math.max(own.width, own.height);
      })),
      least_contrast: Math.min(...texts.map(text => contrast(getComputedStyle(text).fill, back))),
      sticking_out: texts.filter(text => {
        const own = text.getBoundingClientRect();
        // The box of a text is higher than its letters.
        const spare = 0.3 * Math.min(own.width, own.height);
        return own.left < box.left - spare || own.right > box.right + spare
          || own.top < box.top - spare || own.bottom > box.bottom + spare;
      }).map(text => text.textContent),
    };
  });
  const texts = [...document.querySelectorAll("p, li, td, dd, dt, figcaption, h1, h2")];
  const backOf = node => {
    while (node && getComputedStyle(node).backgroundColor === "rgba(0, 0, 0, 0)")
      node = node.parentElement;
    return node ? getComputedStyle(node).backgroundColor : "rgb(255, 255, 255)";
  };
  const result = {
    figures, hints: [...document.querySelectorAll(".hint")].filter(one => one.offsetHeight).length,
    window: innerWidth, page: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    least_contrast: Math.min(
      ...texts.map(text => contrast(getComputedStyle(text).color, backOf(text)))),
  };
  parent.document.body.setAttribute("data-probe", JSON.stringify(result));
});
</script>
"""

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"
)


def open_page(page: Path, *flags: str) -> tuple[str, str]:
    """The document after loading, and what the browser logged."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            # Required for root in a container; the page is ours.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={page.parent / 'browser'}",
            "--enable-logging=stderr",
            "--dump-dom",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout, done.stderr


def probe(page: Path, width: int, *flags: str) -> dict[str, Any]:
    """The results of a script in a copy of the page; the page's policy allows no scripts."""
    text = page.read_text()
    allowed = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    assert allowed != text
    framed = page.with_name("framed.html")
    # Browsers do not make windows as narrow as a phone's.
    framed.write_text(
        f'<!DOCTYPE html><body style="margin: 0"><iframe width="{width}" height="900" '
        f'style="border: 0" srcdoc="{escape(allowed.replace("</body>", PROBE + "</body>"))}">'
        "</iframe></body>"
    )
    document, log = open_page(framed, "--window-size=1400,1000", *flags)
    assert "CONSOLE" not in log, log
    found = re.search(r'data-probe="([^"]*)"', document)
    assert found is not None, "the script did not run"
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a pool, with a trace of its first strategy's iterations."""
    run_dir = tmp_path_factory.mktemp("run")
    records = [
        dataclasses.replace(
            record, expert_load=1.875, balancing_loss=1.0321, router_bias_range=(-0.01, 0.02)
        )
        for record in make_pool_records()
    ]
    write_run(run_dir, records)
    write_config(run_dir, ("pairs", "long", "tp2+2*tp1"), train_iters=20)
    write_trace(run_dir / "trace", [record for record in records if record.strategy == "pairs"])
    assert main(["report", str(run_dir)]) == 0
    return run_dir / "report.html"


@pytest.mark.parametrize(
    ("width", "flags", "is_dark"),
    [(1280, (), False), (420, ("--blink-settings=preferredColorScheme=0",), True)],
    ids=["desk, light", "phone, dark"],
)
def test_figures_are_seen_and_text_is_legible(
    page: Path, width: int, flags: tuple[str, ...], is_dark: bool
) -> None:
    found = probe(page, width, *flags)
    assert found["window"] == width
    assert found["page"] <= found["window"], "the page is wider than the window"
    assert (sum(map(int, re.findall(r"\d+", found["background"])[:3])) < 200) is is_dark
    assert found["least_contrast"] >= MIN_CONTRAST
    # Of the tables of strategies and replicas, which a phone does not show whole.
    assert found["hints"] >= 2 if width < 760 else found["hints"] == 0
    names = [figure["name"] for figure in found["figures"]]
    assert {"loss", "times", "prediction", "strategies", "replicas", "ranks"} <= set(names)
    for figure in found["figures"]:
        assert figure["width"] > min(300, 0.6 * found["window"]), figure
        assert figure["height"] > 100, figure
        assert figure["num_marks"] > 10, figure
        assert figure["num_texts"] > 4, figure
        assert figure["smallest_text_px"] >= MIN_TEXT_PX, figure
        assert figure["least_contrast"] >= MIN_CONTRAST, figure
        assert not figure["sticking_out"], figure


def test_the_page_loads_without_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, make_records())
    write_config(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    picture = tmp_path / "seen.png"
    document, log = open_page(
        tmp_path / "report.html", "--window-size=1280,1000", f"--screenshot={picture}"
    )
    assert "CONSOLE" not in log, log
    assert "Run report" in document
