#!/usr/bin/env bash
# Stands in the compiler's place where ccache wants an object of a source: checks the source, and
# writes an empty object if nothing is wrong. So ccache keeps the verdicts of checks as it keeps
# objects: by the content of a source, of all that it includes, and of the command.
#   verdict.sh COMPILER ARGUMENT...    with XD_CLANG_TIDY in the environment
set -euo pipefail
words=("$@")
arguments=() source='' object=''
for ((i = 1; i < ${#words[@]}; i++)); do
  case ${words[i]} in
    -o) object=${words[++i]} ;;
    *.c | *.cc | *.cpp | *.cu) source=${words[i]} ;;
    -c) ;;
    *) arguments+=("${words[i]}") ;;
  esac
done

# Clang reads CUDA sources for the host, to tell the lengths of functions. Its wrapper asks for two
# headers that newer toolkits lack or that are installed apart, and that nothing here needs: they
# are empty. Its other findings are left to nvcc, but for headers that are not found: then it has
# not read on.
lengths_in_kernels() {
  local includes toolkit findings
  stubs=$(mktemp -d)
  trap 'rm -rf "$stubs"' EXIT
  touch "$stubs"/{texture_fetch_functions,curand_mtgp32_kernel}.h
  mapfile -t includes < <(printf '%s\n' "${arguments[@]}" | grep -E '^-[DI]|^-isystem' |
    sed 's/^-isystem=/-isystem/')
  toolkit=$(printf '%s\n' "${includes[@]}" | sed -n 's/^-isystem\(.*cuda.*\)\/include$/\1/p')
  "$XD_CLANG_TIDY" --quiet '--checks=-*,readability-function-size' "$source" -- -x cuda \
    --cuda-host-only -nocudalib "--cuda-path=$toolkit" -std=c++20 -w -ferror-limit=0 "-I$stubs" \
    "${includes[@]}" -isystem "$toolkit/include/cccl" >"$stubs/found" 2>/dev/null || true
  findings=$(grep -E '\[readability-function-size|file not found' "$stubs/found" || true)
  [[ -z $findings ]] || { echo "$findings" >&2; return 1; }
}

case $source in
  kernel_headers/* | */kernel_headers/*)
    "${words[0]}" "${arguments[@]}" -ptx "$source" -o "$object"
    ;;
  *.cu) lengths_in_kernels ;;
  *) "$XD_CLANG_TIDY" --quiet "$source" -- "${words[0]}" "${arguments[@]}" >&2 ;;
esac
echo passed >"$object"
