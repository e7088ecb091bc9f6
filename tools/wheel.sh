#!/usr/bin/env bash
# Makes wheels that carry what they need, for the .venv's Python: dist/cpu, and dist/cudaN where
# there is a compiler of CUDA N; and dist/*.tar.gz, the sources. Each wheel is tried in an
# environment of its own before it stays. crossdock.jax is in them if jaxlib is in .venv.
#   tools/wheel.sh [cpu|cuda|sources...]    default: all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

most_bytes=15000000
python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Tries an installed wheel: two ranks exchange tokens, and all libraries but the system's own are
# the wheel's.
try() {
  "$python" -m venv "$work/try"
  "$work/try/bin/pip" install --quiet --disable-pip-version-check "$1"
  (cd / && "$work/try/bin/python" "$OLDPWD/tests/python/wheel/two_ranks.py" &&
    "$work/try/bin/python" "$OLDPWD/tools/wheel_libraries.py")
  rm -rf "$work/try"
}

# The kernels' files of a kind in the library of a wheel: sm_90.cubin, sm_90.ptx, ...
kernels() {
  "$cuobjdump" --list-elf --list-ptx "$work"/look/crossdock/libcrossdock.so.* |
    sed -n "s/.*: *\(.*\)\.$1\$/\1/p" | sort
}

# Every kernel of a wheel for CUDA is there as machine code, also for Blackwell where the compiler
# knows it, and as PTX for newer chips; but products of experts' rows (ep/experts/cuda/grouped) as
# machine code for Hopper alone, which no other chip can run.
has_kernels() {
  local all kinds=(sm_90.cubin sm_90.ptx) kind
  [[ $("$nvcc" --list-gpu-arch) != *compute_100* ]] || kinds+=(sm_100.cubin)
  "$python" -m zipfile -e "$1" "$work/look"
  all=$(kernels sm_90.cubin)
  for kind in "${kinds[@]}"; do
    [[ -n $all && $(kernels "$kind") == "$all" ]] || {
      diff <(echo "$all") <(kernels "$kind") >&2 || true
      echo "wheel: ${1##*/}: expected all kernels as $kind, and some" >&2
      exit 1
    }
  done
  [[ $(kernels sm_90a.cubin) == kernel ]] ||
    { echo "wheel: ${1##*/}: expected one file of kernels as sm_90a.cubin" >&2; exit 1; }
  rm -rf "$work/look"
  echo "wheel: $(wc -l <<<"$all") files of kernels, each as ${kinds[*]}, one more as sm_90a.cubin"
}

# wheel FOLDER ON|OFF
wheel() {
  echo "wheel: building $1"
  "$python" -m pip wheel . --quiet --no-build-isolation --no-deps --wheel-dir "$work/plain" \
    -C cmake.define.CROSSDOCK_CUDA="$2" -C cmake.define.CROSSDOCK_CUDA_EVERY_CHIP="$2"
  PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair --wheel-dir "$work/whole" \
    "$work"/plain/*.whl >"$work/repair.log" 2>&1 || { cat "$work/repair.log" >&2; exit 1; }
  local made=("$work"/whole/*manylinux*.whl) bytes
  "$python" tools/wheel_licenses.py "${made[0]}"
  [[ $2 == OFF ]] || has_kernels "${made[0]}"
  bytes=$(stat -c %s "${made[0]}")
  ((bytes <= most_bytes)) ||
    { echo "wheel: ${made[0]##*/} has $bytes bytes, expected at most $most_bytes" >&2; exit 1; }
  try "${made[0]}"
  rm -rf "dist/$1" "$work/plain"
  mkdir -p "dist/$1"
  mv "${made[0]}" "dist/$1/"
  rm -rf "$work/whole"
  echo "wheel: dist/$1/$(ls "dist/$1"), $((bytes / 1000)) kB"
}

sources() {
  rm -f dist/*.tar.gz
  mkdir -p dist
  "$python" -c "from scikit_build_core.build import build_sdist; build_sdist('dist')" >/dev/null
  echo "wheel: $(ls dist/*.tar.gz)"
}

for what in "${@:-cpu cuda sources}"; do
  for one in $what; do
    case $one in
      cpu) wheel cpu OFF ;;
      cuda)
        if nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc); then
          cuobjdump=$(echo .venv/lib/python3.*/site-packages/nvidia/*/bin/cuobjdump)
          wheel "cuda$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')" ON
        else
          echo "wheel: nvcc not found: there is no wheel for CUDA"
        fi
        ;;
      sources) sources ;;
      *) echo "wheel: $one: expected cpu, cuda or sources" >&2; exit 2 ;;
    esac
  done
done
