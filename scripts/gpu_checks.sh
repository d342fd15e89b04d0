#!/usr/bin/env bash
# Everything that needs a GPU, on a bare machine with one, a driver and Python 3.12:
#
#     bash scripts/gpu_checks.sh [FLAGS of python -m benchmarks.gpu]
#
# Creates .venv, adds Transformer Engine, runs tests/gpu and then the benchmarks, which write their
# results with device and date to docs/results/. HYDRAULIS_WITHOUT_TE=1 skips Transformer
# Engine, which is built against the installed torch and needs a CUDA toolkit and some minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: torch finds no CUDA device; run this on a machine with a GPU and its driver" >&2
    exit 2
fi
if [[ -z ${HYDRAULIS_WITHOUT_TE:-} ]] && ! "$python" -c 'import transformer_engine.pytorch' 2>/dev/null
then
    major="$("$python" -c 'import torch; print(torch.version.cuda.split(".")[0])')"
    "$python" -m pip install --quiet ninja pybind11
    if ! "$python" -m pip install --no-build-isolation "transformer-engine[pytorch,core-cu$major]"; then
        echo "warning: Transformer Engine was not built; tests that need it are skipped" >&2
    fi
fi

failed=0
"$python" -m pytest tests/gpu || failed=1
"$python" -m benchmarks.gpu "$@" || failed=1
exit "$failed"
