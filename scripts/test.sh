#!/usr/bin/env bash
# Every check of the project: ruff, mypy, import-linter, shellcheck, then pytest with a few workers
# (`-n 0`: none), which gets all arguments. A failing check does not stop the others; the exit status
# is nonzero if any failed. The last line is pytest's own. With --no-tests as the only argument
# pytest is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

export OMP_NUM_THREADS=1 MPLBACKEND=Agg
# Tests start hundreds of interpreters, each of which would compile the sources again.
unset PYTHONDONTWRITEBYTECODE

runs_tests=1
if [[ ${1:-} == --no-tests ]]; then
    if (($# > 1)); then
        echo "error: --no-tests skips pytest but ${*:2} is an argument of pytest; give one of them" >&2
        exit 2
    fi
    runs_tests=0
fi

failed=()

step() {
    local name="$1"
    shift
    echo "== $name"
    if ! "$@"; then
        failed+=("$name")
    fi
}

shell_scripts() {
    git ls-files -z --cached --others --exclude-standard -- '*.sh' '*.sbatch' '.ci/run'
}

run_shellcheck() {
    shell_scripts | xargs -0 .venv/bin/shellcheck --external-sources --source-path=SCRIPTDIR/..
}

# mypy's workers and pytest's, one for each core: each has a copy of what it imports, so four have
# enough memory. nproc would answer OMP_NUM_THREADS.
max_workers=4
num_cores=$(env -u OMP_NUM_THREADS nproc)
num_workers=$((num_cores < max_workers ? num_cores : max_workers))

pytest_log="$(mktemp)"
trap 'rm -f "$pytest_log"' EXIT

# Each of pytest's workers keeps to its share of the cores (tests/conftest.py). The tests of a file
# share fixtures, so one worker runs them. They begin in the order of the files, whose long ones come
# first.
run_pytest() {
    "$python" -m pytest -n "$num_workers" \
        --dist loadfile --no-loadscope-reorder "$@" 2>&1 | tee "$pytest_log"
}

step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "mypy" "$python" -m mypy --num-workers "$num_workers"
step "import-linter" .venv/bin/lint-imports
step "shellcheck" run_shellcheck
if ((runs_tests)); then
    step "pytest" run_pytest "$@"
fi

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
else
    echo "every check passed"
fi
if ((runs_tests)); then
    tail -n 1 "$pytest_log"
fi
((${#failed[@]} == 0))
