#!/usr/bin/env bash
# Sourced by the other scripts: prepares .venv and sets $python to its interpreter.
#
# The interpreter is the first of $PYTHON, python3.12 and python3 that works; it must be 3.12 or
# newer. If nothing has changed since the last time (setup.py, pyproject.toml, the interpreter's
# version, the folder), nothing is installed; an incomplete .venv of an interrupted installation is
# repaired.

hydraulis_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
hydraulis_venv="$hydraulis_root/.venv"
hydraulis_stamp_file="$hydraulis_venv/.hydraulis-stamp"
python="$hydraulis_venv/bin/python"

# Every path where a name is found, since the first may be a version manager's shim for a version
# that is not installed. Paths inside .venv are skipped: they vanish when .venv is recreated.
hydraulis_candidates() {
    local name found
    for name in "${PYTHON:-}" python3.12 python3; do
        [[ -n $name ]] || continue
        while IFS= read -r found; do
            [[ $found == "$hydraulis_venv"/* ]] || printf '%s\n' "$found"
        done < <(type -aP -- "$name")
    done
}

# Prints the interpreter for .venv; without one, prints an error and returns 1.
hydraulis_find_interpreter() {
    local candidate version
    while IFS= read -r candidate; do
        # An interpreter works if it executes: this line prints its version.
        version="$("$candidate" -c \
            'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null)" || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' </dev/null; then
            echo "error: Python 3.12 or newer is needed but $candidate is $version;" \
                "install Python 3.12 or set PYTHON to one" >&2
            return 1
        fi
        printf '%s\n' "$candidate"
        return 0
    done < <(hydraulis_candidates)
    echo "error: Python 3.12 or newer is needed but none of \$PYTHON, python3.12 and python3 works;" \
        "install Python 3.12 or set PYTHON to one" >&2
    return 1
}

# Hash of everything that an installed .venv depends on; status 1 if the interpreter does not work.
hydraulis_stamp() {
    "$1" -c '
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [root / "setup.py", root / "pyproject.toml"]
digest = hashlib.sha256(repr((sys.version_info[:3], str(root))).encode())
for part in parts:
    digest.update(part.read_bytes())
print(digest.hexdigest())
' "$hydraulis_root" 2>/dev/null
}

hydraulis_make_venv() {
    local interpreter
    interpreter="$(hydraulis_find_interpreter)" || return 1
    # Clearing it would empty an environment that another folder may use.
    if [[ -L $hydraulis_venv ]]; then
        echo "error: .venv does not fit this folder and must be recreated, but it is a link to" \
            "$(readlink "$hydraulis_venv"); remove the link" >&2
        return 1
    fi
    echo "creating .venv with $interpreter" >&2
    # The stamp is removed first: from here to the end of the installation .venv is incomplete.
    rm -f "$hydraulis_stamp_file"
    if ! "$interpreter" -m venv --clear "$hydraulis_venv"; then
        echo "error: $interpreter cannot create a virtual environment; install its venv module" \
            "(Debian, Ubuntu: apt install python3-venv)" >&2
        return 1
    fi
}

hydraulis_install() {
    echo "installing into .venv (torch is large: the first installation takes some minutes)" >&2
    rm -f "$hydraulis_stamp_file"
    # A terminal shows pip's progress; a log does not need one line per package.
    local quiet=()
    [[ -t 1 ]] || quiet=(--quiet)
    "$python" -m pip install "${quiet[@]}" --disable-pip-version-check --no-compile \
        --editable "${hydraulis_root}[dev]" || return 1
    # pip would compile on one core. Packages contain templates that are no valid Python.
    "$python" -W ignore -m compileall -qq -j 0 "$hydraulis_venv/lib" || true
}

# Whether .venv runs, has pip, and was created in this folder with an interpreter that is new enough.
# Scripts in .venv/bin contain the folder's path, so a moved .venv does not work.
hydraulis_venv_works() {
    [[ -f $hydraulis_venv/bin/activate ]] &&
        grep -qF -- "$hydraulis_venv" "$hydraulis_venv/bin/activate" &&
        "$python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

# Whether the installed packages can be imported: after an interrupted installation they may fail
# although pip reports success.
hydraulis_imports() {
    (cd "$hydraulis_root" && OMP_NUM_THREADS=1 "$python" -W ignore -c '
import highspy, torch
import megatron.core, megatron.hydraulis, hydraulis_patches
' 2>/dev/null)
}

hydraulis_version() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null </dev/null
}

hydraulis_set_up() {
    local interpreter stamp
    # A working .venv needs no other interpreter, unless $PYTHON names one of another version.
    if [[ -n ${PYTHON:-} ]]; then
        interpreter="$(hydraulis_find_interpreter)" || return 1
        if [[ $(hydraulis_version "$interpreter") != "$(hydraulis_version "$python")" ]]; then
            hydraulis_make_venv || return 1
        fi
    fi
    if stamp="$(hydraulis_stamp "$python")" &&
        [[ -f $hydraulis_stamp_file && $stamp == "$(<"$hydraulis_stamp_file")" ]]; then
        return 0
    fi
    if ! hydraulis_venv_works; then
        hydraulis_make_venv || return 1
    fi
    hydraulis_install || return 1
    if ! hydraulis_imports; then
        echo ".venv is damaged and is recreated" >&2
        hydraulis_make_venv || return 1
        hydraulis_install || return 1
        if ! hydraulis_imports; then
            echo "error: .venv was recreated and still cannot import torch, highspy and" \
                "megatron.core; see: $python -c 'import torch, highspy, megatron.core'" >&2
            return 1
        fi
    fi
    hydraulis_stamp "$python" >"$hydraulis_stamp_file"
}

hydraulis_set_up || exit 1
