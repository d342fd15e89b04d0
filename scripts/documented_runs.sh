#!/usr/bin/env bash
# Repeats the runs whose figures and pictures the documentation shows:
#
#     bash scripts/documented_runs.sh
#
# Run it on a machine without other work. It writes docs/images/summary.png and report.png from a run of
# the quickstart, executes the five commands of docs/operations.md, and prints the figures that README.md,
# docs/metrics.md and docs/results.md quote with their date. The picture of the report needs Chromium.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

browser=
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then
        browser="$name"
        break
    fi
done
if [[ -z $browser ]]; then
    echo "error: the picture of the report needs Chromium but there is none; install chromium" >&2
    exit 2
fi

folder="runs/documented/$(date +%Y%m%d-%H%M%S)"
mkdir -p "$folder"
read -r load _ </proc/loadavg
bash scripts/quickstart.sh --run-dir "$folder/quickstart" | tee "$folder/quickstart.log"
cp "$folder/quickstart/summary.png" docs/images/summary.png
"$browser" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
    --user-data-dir="$PWD/$folder/browser" --window-size=1100,1281 \
    --screenshot="$PWD/docs/images/report.png" "file://$PWD/$folder/quickstart/report.html"

commands="$(awk '/^## Your job in five commands/ {on = 1} on && /^```/ {fences++; next} on && fences == 1' docs/operations.md)"
bash -euo pipefail -c "${commands//runs\/mine/$folder/mine}" | tee "$folder/five_commands.log"

echo "load of the machine before the runs: $load"
for log in quickstart five_commands; do
    echo "== $folder/$log.log"
    grep -E '^train data|iteration +(1|40)/|^│ (plan wait|plan gap|prediction error)' "$folder/$log.log"
done
