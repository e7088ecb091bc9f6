#!/usr/bin/env bash
# Installs the library into an empty prefix, moves that, and builds and runs examples/c and
# examples/transformer_engine against it, through pkg-config and through find_package, as a stranger
# would.
#   install_test.sh BUILD_DIR C_COMPILER CXX_COMPILER
set -euo pipefail
build=$1 cc=$2 cxx=$3
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"
prefix=$work/moved

# Nothing of the source tree, of the build or of the first prefix may be named in what is installed.
if grep -rIl -e "$source_dir/" -e "$build/" -e "$work/first" "$prefix"; then
  echo "FAIL: the files above name places that a user does not have"
  exit 1
fi

run_on_4_ranks() {
  local out
  out=$("$prefix/bin/crossdock-run" -n 4 --timeout 60 -- "$1")
  echo "$out"
  [[ $(grep -c ' 0 wrong elements' <<<"$out") == 4 ]] || { echo "FAIL: $1"; exit 1; }
}

pc=$(find "$prefix" -name crossdock.pc)
export PKG_CONFIG_PATH=${pc%/*}
read -ra flags < <(pkg-config --cflags --libs crossdock)
libdir=$(pkg-config --variable=libdir crossdock)
"$cc" -std=c11 -Wall -Wextra -Werror "$source_dir/examples/c/round_trip.c" "${flags[@]}" \
  -Wl,-rpath,"$libdir" -o "$work/by_pkg_config"
run_on_4_ranks "$work/by_pkg_config"
compat=$(pkg-config --variable=includedir crossdock)/crossdock/compat
"$cxx" -std=c++17 -Wall -Wextra -Werror -I"$compat" \
  "$source_dir/examples/transformer_engine/expert_parallel.cc" "${flags[@]}" \
  -Wl,-rpath,"$libdir" -o "$work/te_by_pkg_config"
run_on_4_ranks "$work/te_by_pkg_config"

# build_project FOLDER: a copy of a folder of examples, by its own CMakeLists.txt.
build_project() {
  cp -r "$source_dir/examples/$1" "$work/$1"
  cmake -S "$work/$1" -B "$work/$1/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" --no-warn-unused-cli \
    -DCMAKE_C_FLAGS=-Werror -DCMAKE_CXX_FLAGS=-Werror >/dev/null
  cmake --build "$work/$1/build" >/dev/null
}
build_project c
run_on_4_ranks "$work/c/build/round_trip"
run_on_4_ranks "$work/c/build/tensor_parallel_mlp"
run_on_4_ranks "$work/c/build/channel_swap"
build_project transformer_engine
run_on_4_ranks "$work/transformer_engine/build/expert_parallel"
run_on_4_ranks "$work/transformer_engine/build/tensor_parallel"

# The benchmark finds the library where both have been moved to.
if [[ -x $prefix/bin/crossdock-bench ]]; then
  "$prefix/bin/crossdock-run" -n 2 --timeout 60 -- "$prefix/bin/crossdock-bench" gemm \
    --shapes all_gather:24x40 --tokens 5 --iters 2 --warmup 1 >/dev/null
fi
echo "PASS: installed, moved, built twice, run on 4 ranks"
