#!/usr/bin/env bash
# Brings this machine to where `make TARGET` can run: system packages through apt, Python packages
# of tools/requirements-LIST.txt into .venv, or into the folder VENV; those of the list `beside`
# into its folder of that name. Prints nothing where all is there already.
#   [VENV=FOLDER] tools/setup.sh TARGET [LIST...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${1:?usage: tools/setup.sh TARGET [LIST...]}
shift
venv=${VENV:-.venv}
log=build/setup.log
mkdir -p build

# Packages of the target that are not installed: missing required|optional
missing() {
  local package groups kind
  while read -r package groups kind; do
    [[ -z $package || $package == \#* || ${kind:-required} != "$1" ]] && continue
    [[ ,$groups, == *,all,* || ,$groups, == *,$target,* ]] || continue
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      echo "$package"
  done <tools/packages.txt
}

as_root() {
  if [[ $(id -u) == 0 ]]; then env "$@"; else sudo -n env "$@"; fi
}

install() {
  echo "setup: installing $*"
  as_root DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" \
    </dev/null >>"$log" 2>&1
}

system_packages() {
  local required optional available=() package
  if ! command -v dpkg-query >/dev/null; then
    echo "setup: not a Debian or Ubuntu system; tools/packages.txt names what is needed" >&2
    return
  fi
  mapfile -t required < <(missing required)
  mapfile -t optional < <(missing optional)
  ((${#required[@]} + ${#optional[@]})) || return 0

  if [[ $(id -u) != 0 ]] && ! sudo -n true 2>/dev/null; then
    ((${#required[@]})) || return 0
    echo "setup: missing, and neither root nor passwordless sudo to install it. Please run:" >&2
    echo "  sudo apt-get install ${required[*]} ${optional[*]}" >&2
    exit 1
  fi
  # A machine that knows its packages already need not ask for lists again to try the optional ones.
  if ((${#required[@]})) || [[ ! -e build/.setup-optional-$target ]]; then
    as_root apt-get update </dev/null >"$log" 2>&1 || { tail -n 5 "$log" >&2; exit 1; }
  fi
  if ((${#required[@]})); then
    install "${required[@]}" || { tail -n 20 "$log" >&2; exit 1; }
  fi
  if [[ ! -e build/.setup-optional-$target ]]; then
    for package in "${optional[@]}"; do
      [[ -n $(apt-cache madison "$package" 2>/dev/null) ]] && available+=("$package")
    done
    if ((${#available[@]})) && ! install "${available[@]}"; then
      echo "setup: going on without ${available[*]} (see $log)" >&2
    fi
    touch "build/.setup-optional-$target"
  fi
}

virtual_environment() {
  "$venv/bin/python" -c '' 2>/dev/null && return 0
  python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>>"$log" || {
    echo "setup: python3 is older than 3.10 or has no venv (see $log)" >&2
    exit 1
  }
  rm -rf "$venv"
  python3 -m venv "$venv"
}

# One list after another, so that a list that changed leaves the packages of the others.
python_packages() {
  local requirements=tools/requirements-$1.txt names stamp options=()
  case $1 in
    alone) options=(--no-deps) ;;
    beside) options=(--no-deps --ignore-requires-python --only-binary=:all: --target "$venv/$1") ;;
  esac
  stamp=$venv/$1-$(sha256sum "$requirements" | cut -c1-16).stamp
  [[ -e $stamp ]] && return 0
  names=$(sed '/^#/d; /--hash/d; s/ \\$//' "$requirements" | paste -s -d ' ')
  echo "setup: installing $names into $venv"
  if [[ $1 == beside ]]; then rm -rf "${venv:?}/beside"; fi
  "$venv/bin/pip" install --disable-pip-version-check "${options[@]}" -r "$requirements" \
    </dev/null >>"$log" 2>&1 ||
    { tail -n 20 "$log" >&2; exit 1; }
  touch "$stamp"
}

system_packages
if (($#)); then virtual_environment; fi
for list in "$@"; do python_packages "$list"; done
