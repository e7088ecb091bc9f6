#!/usr/bin/env bash
# Runs a command with the Python package of this folder, built first for the python3 of the tree's
# .venv, where there is one, else this machine's. Ends with 77, which says skipped, where that lacks
# what the tests take from it.
#   with-python COMMAND...        as: with-python python3 -m pytest --gpu tests/python/torch/gpu
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
built=$here/build
venv=$here/../../.venv/bin
if [[ -x $venv/python3 ]]; then export PATH=$venv:$PATH; fi
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$built/python${PYTHONPATH:+:$PYTHONPATH}

for module in nanobind pytest torch; do
  if ! python3 -c "import $module" 2>/dev/null; then
    echo "skipped: $(command -v python3 || echo python3) has no $module"
    exit 77
  fi
done

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
