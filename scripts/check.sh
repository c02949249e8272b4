#!/usr/bin/env bash
# All static checks, one after another; every failure is shown, not only the first.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
failed=()

step() { # name, command...
    local name=$1
    shift
    printf '== %s\n' "$name"
    "$@" || failed+=("$name")
}

step "ruff check" .venv/bin/ruff check .
step "ruff format" .venv/bin/ruff format --check .
step "mypy" .venv/bin/mypy --strict src
step "imports" .venv/bin/lint-imports
step "bandit" .venv/bin/bandit -q -c pyproject.toml -r src scripts
step "hadolint" .venv/bin/hadolint Dockerfile
step "tidy" .venv/bin/pytest -q tests/tidy

if [ ${#failed[@]} -gt 0 ]; then
    printf 'check: FAILED:'; printf ' [%s]' "${failed[@]}"; printf '\n'
    exit 1
fi
echo "check: all passed"
