#!/usr/bin/env bash
# Runs a command with the Python package of this folder, built first for this machine's python3
# (which has to have nanobind; the tests also take pytest and torch from it).
#   with-python COMMAND...        as: with-python python3 -m pytest --gpu tests/python/torch/gpu
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
built=$here/build
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$built/python${PYTHONPATH:+:$PYTHONPATH}

if [[ ! -e $built/done ]]; then
  mkdir -p "$built"
  {
    cmake -S "$here/python" -B "$built" -DCMAKE_PREFIX_PATH="$here/install" \
      -DDLPACK_INCLUDE_DIR="$here/install/include" -DPython_EXECUTABLE="$(command -v python3)" &&
      cmake --build "$built" -j "$(nproc)"
  } >"$built/log" 2>&1 || { tail -n 30 "$built/log" >&2; exit 1; }
  touch "$built/done"
fi
exec "$@"
