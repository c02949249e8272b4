#!/usr/bin/env bash
# Run the tests: scripts/tests.sh PROCESSES [pytest arguments]
# First in several processes, then those marked `alone` in one, when nothing else runs. Fails when either part does.
set -u
processes=$1
shift
parts=("--part=shared -n $processes --dist=loadgroup" "--part=alone")
failed=0 none=0
for part in "${parts[@]}"; do
    # shellcheck disable=SC2086
    .venv/bin/pytest tests $part "$@"
    status=$?
    case $status in
        0) ;;
        5) none=$((none + 1)) ;; # no test of this part was chosen
        2) exit 2 ;;             # interrupted
        *) failed=$status ;;
    esac
done
[ "$failed" -ne 0 ] || [ "$none" -lt ${#parts[@]} ] || failed=5
exit "$failed"
