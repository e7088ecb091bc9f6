#!/usr/bin/env bash
# Says which tests of a build `make test` leaves out: those that need a GPU, to `make gpu-test`, and
# unless FULL is given those that others nearly cover.
#   left-out.sh BUILD [FULL]
set -euo pipefail
nearly=$(ctest --test-dir "$1" -L full -N | sed -n 's/^Total Tests: //p')
if [[ -z ${2:-} && $nearly != 0 ]]; then
  echo "$nearly tests that others nearly cover were left out; make test FULL=1 runs them"
fi
mapfile -t tests < <(ctest --test-dir "$1" -L gpu -N | sed -n 's/^ *Test *#[0-9]*: //p')
((${#tests[@]})) || exit 0
kinds=$(printf '%s\n' "${tests[@]}" | sed -E 's/\.(threads|processes)\.[0-9]+$//' | sort -u |
  paste -s -d ' ')
echo "${#tests[@]} tests need a GPU; make gpu-test runs them: $kinds"
