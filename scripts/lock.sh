#!/bin/bash
# Resolves requirements/*.in into the full locks requirements/cpu.txt and requirements/gpu.txt, and
# what the extras "environments" and "search" add to either into requirements/environments.txt and search.txt.
# Needs uv, which uses the indexes and find-links of pip's configuration.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../requirements"
# shellcheck source=scripts/pip_settings.sh
source ../scripts/pip_settings.sh
torch_cpu_index=https://download.pytorch.org/whl/cpu

command -v uv >/dev/null || { echo "lock: uv is missing; install it with: pip install uv" >&2; exit 2; }

export_uv_settings python3

# resolve NAME [OPTION...]: NAME.in becomes NAME.txt, without a header or comments that could hold local paths. The
# overrides of pyproject.toml are for CPU, and would leave packages out of gpu.txt.
resolve() {
    local name=$1
    shift
    uv pip compile "$name.in" --quiet --no-config --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        "${uv_options[@]}" "$@" --output-file "$name.txt.new"
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
    resolve cpu --overrides overrides.txt --index "$torch_cpu_index" "${upgrade[@]}"
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
