#!/usr/bin/env bash
# Runs a command and, where XD_PARTS names a file, appends the part's name and seconds to it.
#   tools/part.sh NAME COMMAND...
set -euo pipefail
name=${1:?usage: tools/part.sh NAME COMMAND...}
shift
begun=$SECONDS code=0
"$@" || code=$?
[[ -z ${XD_PARTS:-} ]] || printf '%s\t%s\n' "$name" $((SECONDS - begun)) >>"$XD_PARTS"
exit "$code"
