#!/usr/bin/env bash
# Says which tests of a build need a GPU and are left to `make gpu-test`.
#   left-out.sh BUILD
set -euo pipefail
mapfile -t tests < <(ctest --test-dir "$1" -L gpu -N | sed -n 's/^ *Test *#[0-9]*: //p')
((${#tests[@]})) || exit 0
kinds=$(printf '%s\n' "${tests[@]}" | sed -E 's/\.(threads|processes)\.[0-9]+$//' | sort -u |
  paste -s -d ' ')
echo "${#tests[@]} tests need a GPU; make gpu-test runs them: $kinds"
