#!/usr/bin/env bash
# Run a command with a time budget: scripts/within.sh SECONDS NAME COMMAND...
# Prints "NAME: 43 s of 120 s"; when the budget is spent, the command is ended and the status is 124. However it
# ends, nothing that it started is left: processes that have left its group are known by a variable that they inherit.
set -u
[ $# -ge 3 ] || { echo "usage: scripts/within.sh SECONDS NAME COMMAND..." >&2; exit 2; }
budget_s=$1 name=$2
shift 2
started=$SECONDS
export WITHIN_RUN="$$-$RANDOM-$RANDOM"
end_leftovers() {
    local environment pid
    for environment in $(grep -lszx "WITHIN_RUN=$WITHIN_RUN" /proc/[0-9]*/environ); do
        pid=${environment//[!0-9]/}
        [ "$pid" = "$$" ] || kill -KILL "$pid" 2>/dev/null
    done
}
# In the background, so that Ctrl-C reaches this script at once and is passed on to the whole group.
timeout -k 10 "$budget_s" "$@" </dev/null &
child=$!
trap 'kill -INT "$child" 2>/dev/null' INT
trap 'kill -TERM "$child" 2>/dev/null' TERM
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
end_leftovers
took=$((SECONDS - started))
if [ "$status" -eq 124 ] || [ "$status" -eq 137 ] || [ "$took" -gt "$budget_s" ]; then
    printf '%s: OVER BUDGET, %d s of %d s\n' "$name" "$took" "$budget_s" >&2
    exit 124
fi
printf '%s: %d s of %d s%s\n' "$name" "$took" "$budget_s" "$([ "$status" -eq 0 ] || echo ", FAILED (status $status)")"
exit "$status"
