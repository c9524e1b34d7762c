#!/bin/bash
# Resolves requirements/*.in into the full locks requirements/cpu.txt and requirements/gpu.txt, and
# what the extras "environments" and "search" add to either into requirements/environments.txt and search.txt.
# Needs uv. uv reads no pip configuration, so pip's indexes and find-links are handed to it.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../requirements"
torch_cpu_index=https://download.pytorch.org/whl/cpu

command -v uv >/dev/null || { echo "lock: uv is missing; install it with: pip install uv" >&2; exit 2; }

# pip_setting NAME: what pip itself would use, its environment variable before its files.
pip_setting() {
    local variable=PIP_${1^^}
    variable=${variable//-/_}
    if [[ -n ${!variable+set} ]]; then
        printf '%s\n' "${!variable}"
    else
        python3 -m pip config get "install.$1" 2>/dev/null || python3 -m pip config get "global.$1" 2>/dev/null || true
    fi
}

# add_options FLAG NAME: one uv option for every word of a pip setting.
add_options() {
    local word
    for word in $(pip_setting "$2"); do
        options+=("$1" "$word")
    done
}

# Versions from every index are compared, as pip does; uv alone stops at the first index that has the name.
options=(--index-strategy unsafe-best-match)
add_options --default-index index-url
add_options --extra-index-url extra-index-url
add_options --find-links find-links
certificates=$(pip_setting cert)
[[ -z $certificates ]] || export SSL_CERT_FILE=$certificates

# resolve NAME [OPTION...]: NAME.in becomes NAME.txt, without a header or comments that could hold local paths.
resolve() {
    local name=$1
    shift
    uv pip compile "$name.in" --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        "${options[@]}" "$@" --output-file "$name.txt.new"
}

# keep NAME: puts a new lock in place once it is known to hold pinned packages and nothing else.
keep() {
    if grep -vnE '^[a-z0-9-]+==[^ /;]+$' "$1.txt.new"; then
        echo "lock: $1.txt would hold the lines above; it was left as it was" >&2
        exit 1
    fi
    mv "$1.txt.new" "$1.txt"
    echo "lock: requirements/$1.txt has $(wc -l <"$1.txt") packages"
}

trap 'rm -f {cpu,gpu,environments,search}.txt.new' EXIT
upgrade=("$@")
for name in cpu gpu environments search; do
    # uv prefers the pins it finds in the output file; pass --upgrade for the newest instead
    [[ ! -f $name.txt ]] || cp "$name.txt" "$name.txt.new"
done
export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu
resolve cpu --overrides overrides.txt "${upgrade[@]}" 2>/dev/null ||
    resolve cpu --overrides overrides.txt --extra-index-url "$torch_cpu_index" "${upgrade[@]}"
keep cpu
resolve gpu "${upgrade[@]}"
# A local version is never asked for by ==, and pip would take a CPU build of torch where it finds one.
sed -i 's/^\(torch==\([0-9.]*\)\)$/\1,!=\2+cpu/' gpu.txt.new
keep gpu
# Only what cpu.txt lacks: set-up installs it after either lock, and replaces nothing.
for name in environments search; do
    resolve "$name" --constraints cpu.txt --overrides overrides.txt "${upgrade[@]}"
    grep -vxFf cpu.txt "$name.txt.new" >"$name.txt.left"
    mv "$name.txt.left" "$name.txt.new"
    keep "$name"
done
