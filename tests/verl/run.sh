#!/usr/bin/env bash
# Runs the tests with verl, in .venv-verl: the packages of requirements.txt on top of those of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

"$python" -m venv --without-pip .venv-verl
packages=(.venv-verl/lib/python3.*/site-packages)
"$python" -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
    >"${packages[0]}/on_top.pth"
.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    --requirement tests/verl/requirements.txt

export VERL_PLATFORM=cpu
export RAY_AUTH_MODE=disabled # else Ray writes a token into the home folder
export VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform,megatron.hydraulis.library.verl_engine
exec .venv-verl/bin/python -m pytest tests/verl/verl_*.py "$@"
