#!/usr/bin/env bash
# Checks that subjects of commits have at most 72 characters: of all commits that this clone has,
# however shallow it is, from the day on that asks for it. Elsewhere there is nothing to check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! git rev-parse --verify --quiet HEAD >/dev/null 2>&1; then
  echo "subjects: no commits here to look at"
  exit 0
fi
git log --no-merges --since='2026-11-22T12:00:00Z' --format='%h %s' | awk '
  { subject = substr($0, index($0, " ") + 1)
    if (length(subject) > 72) {
      long++
      print $1 ": a subject of " length(subject) " characters, at most 72: " subject
    } }
  END { print "subjects: " NR " commits, " long + 0 " with a subject that is too long"
        exit long > 0 }'
