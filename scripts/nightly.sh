#!/usr/bin/env bash
# The long test lists, of which scripts/test.sh runs a part: every test marked `nightly`; random
# pools, property tests and injected faults with as many examples as HYPOTHESIS_PROFILE=nightly sets;
# the wheel, installed with all its dependencies from the package index (gigabytes, deleted
# afterwards). Arguments, if any, go to pytest instead of the list of tests. The last line is pytest's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

export OMP_NUM_THREADS=1 MPLBACKEND=Agg HYPOTHESIS_PROFILE=nightly

tests=("$@")
if ((${#tests[@]} == 0)); then
    tests=(tests/cuda_stand_in tests/fault tests/property tests/distributed)
fi
# Two hours per test: a test with many draws takes longer than any of the default suite.
exec "$python" -m pytest -o timeout=7200 -m "nightly or not nightly" "${tests[@]}"
