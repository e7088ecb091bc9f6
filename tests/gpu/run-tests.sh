#!/usr/bin/env bash
# Runs the tests of this folder (see manifest) one after another, on all GPUs of this machine.
#   run-tests [PATTERN]   only those whose name matches the regular expression
# With LOG=file in the environment that file gets all they print.
set -uo pipefail
log=$(realpath -m "${LOG:-/dev/null}")
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
pattern=${1:-}
output=$(mktemp)
trap 'rm -f "$output"' EXIT

if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  echo "run-tests: there is no NVIDIA GPU here" >&2
  exit 2
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sort | uniq -c

# cuBLASLt, which products load at run time: where the loader finds it, or in Python's wheels.
if ! ldconfig -p 2>/dev/null | grep -q 'libcublasLt\.so\.1[23]'; then
  folder=$(python3 - 2>/dev/null <<'END'
import glob, importlib.util, os
for place in importlib.util.find_spec("nvidia").submodule_search_locations:
    for found in sorted(glob.glob(os.path.join(place, "*", "lib", "libcublasLt.so.1[23]"))):
        print(os.path.dirname(found))
END
  )
  folder=${folder%%$'\n'*}
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}${folder:+${LD_LIBRARY_PATH:+:}$folder}
fi

# Leaves out GoogleTest's lines about tests that passed.
what_went_wrong() {
  awk '/\[ RUN      \]/ { running = $0; next }
       /\[       OK \]/ { running = ""; next }
       running != "" { print running; running = "" }
       { print }
       END { if (running != "") print running }' "$output" | grep -v '\[------' | tail -n 200
}

passed=0 skipped=0 failed=()
while read -r name seconds command; do
  [[ -z $pattern || $name =~ $pattern ]] || continue
  start=$SECONDS
  read -ra words <<<"$command"
  timeout -k 10 "$seconds" "${words[@]}" >"$output" 2>&1 </dev/null
  code=$?
  took="$((SECONDS - start)) s"
  { echo "=== $name"; cat "$output"; } >>"$log"
  # pytest ends well where it has skipped everything.
  summary=$(grep -Eo '[0-9]+ (passed|skipped)[^=]* in [0-9.]+s' "$output" | tail -n 1)
  if [[ $code == 0 && -n $summary && $summary != *passed* ]]; then
    code=77
    echo "skipped: $summary" >>"$output"
  fi
  case $code in
    0)
      passed=$((passed + 1))
      echo "passed   $name   $took${summary:+   $summary}"
      ;;
    77)
      skipped=$((skipped + 1))
      echo "skipped  $name   $(sed -n 's/.*skipped: //p' "$output" | head -n 1)"
      ;;
    *)
      failed+=("$name")
      echo "FAILED   $name   $took, exit code $code"
      what_went_wrong
      ;;
  esac
done <manifest

echo "$passed passed, ${#failed[@]} failed, $skipped skipped${failed[*]:+; failed: ${failed[*]}}"
((${#failed[@]} == 0 && passed > 0))
