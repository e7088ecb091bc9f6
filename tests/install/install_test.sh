#!/usr/bin/env bash
# Installs the library into an empty prefix, moves that, and builds and runs examples/c against it,
# through pkg-config and through find_package, as a stranger would.
#   install_test.sh BUILD_DIR C_COMPILER
set -euo pipefail
build=$1 cc=$2
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

cp -r "$source_dir/examples/c" "$work/project"
cmake -S "$work/project" -B "$work/project/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_C_FLAGS=-Werror >/dev/null
cmake --build "$work/project/build" >/dev/null
run_on_4_ranks "$work/project/build/round_trip"
run_on_4_ranks "$work/project/build/tensor_parallel_mlp"

# The benchmark finds the library where both have been moved to.
if [[ -x $prefix/bin/crossdock-bench ]]; then
  "$prefix/bin/crossdock-run" -n 2 --timeout 60 -- "$prefix/bin/crossdock-bench" gemm \
    --shapes all_gather:24x40 --tokens 5 --iters 2 --warmup 1 >/dev/null
fi
echo "PASS: installed, moved, built twice, run on 4 ranks"
