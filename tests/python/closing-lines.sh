#!/usr/bin/env bash
# Prints names of tests that failed, and the closing line, of each Python test of the last run of a
# build's tests.
#   closing-lines.sh BUILD
set -euo pipefail
awk '/^[0-9]+\/[0-9]+ Test: / { name = $3 }
     name ~ /^python\./ && /^(FAILED|ERROR) / { print name ": " $0 }
     name ~ /^python\./ && /^=+ .*(passed|failed|error).* in .*=+$/ {
       gsub(/^=+ | =+$/, ""); print name ": " $0
     }' "$1/Testing/Temporary/LastTest.log"
