#!/usr/bin/env bash
# Prepare .venv for running (base) or developing (dev) Tailrace.
#
#   scripts/setup.sh base     the pinned packages of requirements/base.lock and tailrace itself
#   scripts/setup.sh dev      the same, requirements/dev.lock and spark.lock, strace (some tests inject faults with it)
#                             and Java 17 (for Spark), where there is none as new as that
#
# Run it as often as you like: when nothing changed it returns at once and needs no network.
# A stamp in .venv holds the hash of everything that the environment was made from.
#
#   PYTHON=/path/to/python3   the interpreter to use (default: the distribution's, else python3; 3.11 or newer)
#   SETUP_BUDGET_S=300        set-up fails when it takes longer than this
set -euo pipefail
export PYTHONUTF8=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONHOME PYTHONPATH

mode=${1:-}
case $mode in
    base | dev) ;;
    *) echo "usage: scripts/setup.sh base|dev" >&2; exit 2 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$root/.venv
budget_s=${SETUP_BUDGET_S:-300}
lock_wait_s=120
java_oldest=17
apt_lists=${APT_LISTS_DIR:-/var/lib/apt/lists}
started=$SECONDS
python=''

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: FAILED: %s\n' "$*" >&2; exit 1; }

# --------------------------------------------------------------------------------- stamps

# Version and home of an interpreter; the same for an interpreter and for a venv made from it.
identity() { "$1" -I -S -c 'import sys; print(sys.version.split()[0], sys.base_prefix)' 2>/dev/null; }

fingerprint() { # mode, interpreter
    local id
    id=$(identity "$2") || return 1
    { echo "$1 $root $id"; cat pyproject.toml requirements/base.lock scripts/setup.sh
      if [ "$1" = dev ]; then cat requirements/dev.lock requirements/spark.lock; fi; } | sha256sum | cut -d' ' -f1
}

# True when .venv is complete and was made from the present inputs. Never touches the network.
ready() {
    local stamp=$venv/.stamp-$mode
    [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ ! -e "$venv/.unfinished" ] || return 1
    [ "$(<"$stamp")" = "$(fingerprint "$mode" "${PYTHON:-$venv/bin/python}")" ] || return 1
    "$venv/bin/python" -I -S -c '' 2>/dev/null
}

# --------------------------------------------------------------------------------- steps

# Run a command silently; show what it printed only when it fails.
quietly() {
    local out status=0 left=$((budget_s - (SECONDS - started)))
    [ "$left" -gt 0 ] || over_budget
    out=$(timeout -k 5 "$left" "$@" 2>&1) || status=$?
    [ "$status" -eq 0 ] && return 0
    printf '%s\n' "$out" >&2
    [ "$status" -eq 124 ] && over_budget
    die "this command ended with status $status: $*"
}

over_budget() { die "set-up took longer than its budget of $budget_s s (SETUP_BUDGET_S changes it)"; }

# One apt-get call. Waits while another apt or dpkg holds a lock; apt itself waits only for dpkg's.
apt_run() {
    local out status waited=0
    while :; do
        status=0
        out=$(DEBIAN_FRONTEND=noninteractive LC_ALL=C \
            apt-get -qq -o "DPkg::Lock::Timeout=$lock_wait_s" "$@" 2>&1 </dev/null) || status=$?
        [ "$status" -eq 0 ] && return 0
        if [[ $out == *"Could not get lock"* || $out == *"Unable to lock"* ]] && [ "$waited" -lt "$lock_wait_s" ]; then
            [ "$waited" -eq 0 ] && say "another apt or dpkg is running: waiting up to $lock_wait_s s for it"
            sleep "${APT_RETRY_S:-3}"
            waited=$((waited + 3))
            continue
        fi
        apt_output=$out
        return "$status"
    done
}

apt_lists_empty() { ! compgen -G "$apt_lists/*_Packages*" >/dev/null; }

apt_install() { # why, package...
    local why=$1 update=''
    shift
    command -v apt-get >/dev/null || die "$why. There is no apt-get here: install $* with your system's tool."
    if apt_lists_empty; then update=yes; fi
    if [ "$(id -u)" -ne 0 ]; then
        say "$why, and only root can install it. Run this, then try again:"
        printf '\n    %ssudo apt-get install -y %s\n\n' "${update:+sudo apt-get update && }" "$*"
        die "missing: $*"
    fi
    say "$why: installing $* (waits up to $lock_wait_s s if another apt or dpkg is running)"
    if [ -n "$update" ]; then
        apt_run update || { printf '%s\n' "$apt_output" >&2; die "apt-get update failed"; }
    fi
    apt_run install -y --no-install-recommends "$@" && return 0
    if [ -z "$update" ]; then # perhaps the lists are only stale
        apt_run update && apt_run install -y --no-install-recommends "$@" && return 0
    fi
    printf '%s\n' "$apt_output" >&2
    die "apt-get install -y $* failed"
}

system_python=${SYSTEM_PYTHON:-/usr/bin/python3}

new_enough() { "$1" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

pick_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is missing or older than Python 3.11"
        python=$PYTHON
        return 0
    fi
    # The distribution's build is optimised with profiles; one compiled at home often is not, and runs everything
    # here about a quarter slower.
    if new_enough "$system_python" && can_make_venv "$system_python"; then python=$system_python; return 0; fi
    for name in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if command -v "$name" >/dev/null && new_enough "$name"; then python=$name; return 0; fi
    done
    return 1
}

can_make_venv() { "$1" -I -c 'import ensurepip, venv' 2>/dev/null; }

find_python() {
    if ! pick_python; then
        apt_install "Python 3.11 or newer is missing" python3 python3-venv
        hash -r
        pick_python || die "the packaged python3 is older than 3.11: install a newer one and set PYTHON=/path/to/it"
    fi
    can_make_venv "$python" && return 0
    local package=python3-venv
    if [ "$(identity "$python" | cut -d' ' -f2)" = /usr ] && [[ $python == *python3.* ]]; then
        package=$(basename "$python")-venv
    fi
    apt_install "$python cannot make virtual environments (ensurepip is missing)" "$package"
    can_make_venv "$python" && return 0
    if [ -z "${PYTHON:-}" ] && new_enough /usr/bin/python3 && can_make_venv /usr/bin/python3; then
        python=/usr/bin/python3
        return 0
    fi
    die "$python still has no ensurepip: set PYTHON to an interpreter which has it, such as /usr/bin/python3"
}

make_venv() {
    local id
    id=$(identity "$python")
    if [ -x "$venv/bin/python" ] && [ ! -e "$venv/.unfinished" ] \
        && [ "$(identity "$venv/bin/python" || true)" = "$id" ] && [ "$(cat "$venv/.made" 2>/dev/null)" = "$root $id" ]; then
        say "[1/3] keeping .venv (Python ${id%% *})"
    else
        say "[1/3] making .venv with Python ${id%% *}"
        rm -rf "$venv"
        mkdir "$venv"
        : >"$venv/.unfinished"
        quietly "$python" -m venv "$venv"
        echo "$root $id" >"$venv/.made"
    fi
    rm -f "$venv"/.stamp-*
    : >"$venv/.unfinished"
}

install_locked() {
    local locks=(requirements/base.lock)
    if [ "$mode" = dev ]; then locks+=(requirements/dev.lock requirements/spark.lock); fi
    say "[2/3] installing $(cat "${locks[@]}" | grep -c '==') packages ..."
    quietly "$venv/bin/python" -m pip install -q --only-binary :all: -r "requirements/$mode.lock"
    if [ "$mode" = dev ]; then # after the rest: it is built here, by the setuptools that was just installed
        quietly "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation --use-pep517 -r requirements/spark.lock
    fi
    say "[3/3] installing tailrace from this directory"
    quietly "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
}

write_stamps() {
    local name
    rm -f "$venv/.unfinished"
    for name in base ${mode#base}; do
        fingerprint "$name" "$venv/bin/python" >"$venv/.stamp-$name"
    done
}

# Release of the Java that Spark will find; 0 where there is none.
java_release() {
    local java=java said=''
    if [ -n "${JAVA_HOME:-}" ]; then java=$JAVA_HOME/bin/java; fi
    said=$("$java" -version 2>&1) || true
    if [[ $said =~ version\ \"([0-9]+) ]]; then echo "${BASH_REMATCH[1]}"; else echo 0; fi
}

# Only dev needs these, and only as programs: installed whenever missing, whatever the stamps say.
need_programs() {
    [ "$mode" = dev ] || return 0
    command -v strace >/dev/null || apt_install "strace is missing (tests inject faults with it)" strace
    [ "$(java_release)" -ge "$java_oldest" ] && return 0
    apt_install "Java $java_oldest or newer is missing (Spark runs on it)" "openjdk-$java_oldest-jre-headless"
    hash -r
    [ "$(java_release)" -ge "$java_oldest" ] \
        || die "the java found first is still older than $java_oldest: set JAVA_HOME to a newer one, or put it first in PATH"
}

main() {
    if ready; then need_programs; return 0; fi
    [ -w "$root" ] || die "$root is not writable for $(id -un)"
    [ ! -e "$venv" ] || [ -w "$venv" ] || die "$venv belongs to someone else: remove it, or run as its owner"
    exec 9>"$root/.setup.lock"
    if ! flock -n 9; then
        say "another set-up runs in this directory: waiting for it"
        flock -w "$budget_s" 9 || over_budget
        if ready; then need_programs; return 0; fi
    fi
    need_programs
    find_python
    make_venv
    install_locked
    write_stamps
    local took=$((SECONDS - started))
    [ "$took" -le "$budget_s" ] || over_budget
    say "$mode is ready: $took s of $budget_s s"
}

main
