#!/usr/bin/env bash
# Checks everything that needs a GPU, in at most 15 minutes, on a machine with GPUs, their driver
# and Python 3.12:
#
#     bash scripts/gpu_checks.sh [FLAGS of python -m benchmarks.gpu]
#
# It ends in a table and names one file to send back. Ctrl-C ends it early, with both. --minutes M
# sets another limit, --steps NAME … selects steps, --small takes toy models.
# The first time it prepares .venv and builds Transformer Engine, which takes minutes more and needs
# a CUDA toolkit; HYDRAULIS_WITHOUT_TE=1 leaves it out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

if [[ -z ${HYDRAULIS_WITHOUT_TE:-} ]] && command -v nvcc >/dev/null &&
    ! "$python" -c 'import transformer_engine.pytorch' 2>/dev/null; then
    echo "building Transformer Engine; HYDRAULIS_WITHOUT_TE=1 leaves it out" >&2
    major="$("$python" -c 'import torch; print(torch.version.cuda.split(".")[0])')"
    "$python" -m pip install --quiet ninja pybind11
    if ! timeout 900 "$python" -m pip install --quiet --no-build-isolation \
        "transformer-engine[pytorch,core-cu$major]"; then
        echo "warning: Transformer Engine was not built; its checks are left out" >&2
    fi
fi

exec "$python" -m benchmarks.gpu "$@"
