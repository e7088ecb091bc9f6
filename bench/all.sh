#!/bin/sh
# The benchmark's standard cases: bench/all.sh BUILD_FOLDER. Each also leaves its rows as
# BUILD_FOLDER/bench/NAME.json.
set -eu
build=$1

measure() { # name, options
  json="$build/bench/$1.json"
  shift
  "$build/tools/run/crossdock-run" -n 4 --no-prefix -- "$build/bench/crossdock-bench" ep \
    --hidden 4096 --topk 8 --experts 64 --dtype bf16 --json "$json" "$@"
}

measure uniform --tokens 1024 --routing uniform --zero-copy --staged --iters 20
measure zipf --tokens 1024 --routing zipf --iters 20
measure rank-major --tokens 1024 --layout rank --iters 20
measure small --tokens 16 --zero-copy --staged --iters 300 --warmup 30
