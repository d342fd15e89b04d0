"""How the page of a report looks, light and dark, on a phone and on a desk."""

__all__ = ["STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  --page: #f6f8fa; --card: #ffffff; --ink: #24292f; --soft: #57606a; --muted: #8b949e;
  --line: #d0d7de; --grid: #d8dee4; --idle: #e4e8ec; --act: #9a4a00; --act-back: #fff4e5;
  --series-0: #0072b2; --series-1: #e69f00; --series-2: #009e73; --series-3: #cc79a7;
  --series-4: #d55e00; --series-5: #56b4e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --card: #161b22; --ink: #e6edf3; --soft: #a4aeb8; --muted: #7d8590;
    --line: #30363d; --grid: #2f3640; --idle: #343b44; --act: #ffb86b; --act-back: #2b2114;
    --series-0: #4aa8e0; --series-1: #f0b429; --series-2: #2fc79a; --series-3: #e29ac4;
    --series-4: #f5884a; --series-5: #8fd0f5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 var(--font); overflow-wrap: anywhere;
}
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p { margin: 0 0 8px; }
.soft, figcaption { color: var(--soft); }
code { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  font-size: 0.92em; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr));
  margin: 20px 0 0; }
.tiles dt { color: var(--soft); font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; font-size: 0.82rem; font-weight: 400; color: var(--soft); }
ul.plain { list-style: none; margin: 0; padding: 0; display: grid; gap: 10px; }
.advice .finding { font-weight: 600; }
.advice .act { border-left: 4px solid var(--act); background: var(--act-back); }
.advice .act .finding { color: var(--act); }
.figures { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
figure { margin: 0; display: flex; flex-direction: column; }
figure svg { display: block; width: 100%; height: auto; max-width: 640px; margin: 0 auto; }
figcaption { font-size: 0.88rem; margin-top: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th.text, td.text { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; }
dl.settings { display: grid; grid-template-columns: minmax(150px, max-content) 1fr; gap: 4px 20px;
  margin: 0; }
dl.settings dt { color: var(--soft); }
dl.settings dd { margin: 0; }
ul.notes { padding-left: 34px; }
details { margin-top: 14px; }
section > .card > details:only-child { margin-top: 0; }
summary { cursor: pointer; }
details pre { font-size: 0.82rem; white-space: pre-wrap; margin: 8px 0 0; }
@media (max-width: 760px) {
  main { padding: 16px 12px 32px; }
  .figures { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tiles dd { font-size: 1.05rem; }
  .card { padding: 12px; }
  dl.settings { grid-template-columns: 1fr; gap: 0; }
  dl.settings dd { margin-bottom: 8px; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""
