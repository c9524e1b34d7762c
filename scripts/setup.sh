#!/bin/bash
# Makes the Python environment, or finds it complete and changes nothing.
#   bash scripts/setup.sh             install what is missing
#   bash scripts/setup.sh --rebuild   remove the environment and make it again
#   DEVICE=cuda|cpu|auto   flavour (auto: CUDA where nvidia-smi or Slurm's view of the cluster names a GPU)
#   ENV_DIR=DIR            where it lives (default: .venv at the repository root)
#   ENV_MODE=venv|conda    venv, or a conda prefix
#   PYTHON=FILE            the interpreter to build on (3.11 to 3.13)
#   EXTRAS=none   leave out the libraries of games and tasks (environments) and Optuna (search), until EXTRAS names them
# Indexes, proxies, certificates and find-links are those of pip's own configuration.
set -euo pipefail

# What a login shell carries must reach neither the new environment nor pip's builds.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Some sites make --user the default, or refuse pip in conda prefixes; here the environment is always the target.
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
env_dir=$(realpath -ms -- "${ENV_DIR:-$root/.venv}")
mode=${ENV_MODE:-venv}
device=${DEVICE:-auto}
stamp=$env_dir/grpo-environment.json
python=$env_dir/bin/python
torch_cpu_index=https://download.pytorch.org/whl/cpu
probe_package=iniconfig
# shellcheck source=scripts/pip_settings.sh
source "$root/scripts/pip_settings.sh"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# command_line [OPTION]: the command that runs this set-up again as it was asked for.
command_line() {
    local words=() variable
    for variable in DEVICE ENV_DIR ENV_MODE PYTHON EXTRAS; do
        [[ -z ${!variable:-} ]] || words+=("$variable=$(printf %q "${!variable}")")
    done
    printf 'cd %q && %sbash scripts/setup.sh%s' "$root" "${words[*]:+${words[*]} }" "${1:+ $1}"
}

# --- flavour ---------------------------------------------------------------------------------------------------------

machine_has_gpu() {
    [[ $(timeout 10 nvidia-smi -L 2>/dev/null) =~ GPU\ [0-9] ]]
}

# The machine that installs is usually a login node without a GPU. sinfo waits long for a controller that is down.
cluster_has_gpu() {
    [[ $(timeout 10 sinfo -h -o %G 2>/dev/null) =~ (^|[^a-z])gpu: ]]
}

python_version() { "$python" -IS -c 'import platform; print(platform.python_version())'; }

stamped() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" "$stamp" 2>/dev/null || true; }

# An environment that exists has decided already; only a GPU in this very machine contradicts a CPU environment.
choose_flavour() {
    local recorded
    recorded=$(stamped flavour)
    case $device in
    cpu | cuda) flavour=$device ;;
    auto)
        if [[ $recorded == cuda ]]; then
            flavour=cuda
        elif machine_has_gpu || { [[ -z $recorded ]] && cluster_has_gpu; }; then
            flavour=cuda
        else
            flavour=cpu
        fi
        ;;
    *) fail "DEVICE=$device is none of cuda, cpu, auto" ;;
    esac
    lock_file=$root/requirements/$flavour.txt
    [[ $flavour == cpu ]] || lock_file=$root/requirements/gpu.txt
    [[ -f $lock_file ]] || fail "$lock_file is missing; restore it with: git checkout -- requirements"
    lock_hash=$(sha256sum "$lock_file" | cut -d' ' -f1)
}

# Each extra with its key in the stamp. The value there is the hash of the extra's lock, or "none" if it was left out.
declare -A extra_keys=([environments]=extras [search]=search) extra_hashes=()

# Install every extra by default. EXTRAS selects some of them, or none; an installed extra is kept in any case.
choose_extras() {
    local name selected recorded
    selected=${EXTRAS:-environments,search}
    [[ $selected != none ]] || selected=
    selected=" ${selected//,/ } "
    for name in $selected; do
        [[ -n ${extra_keys[$name]:-} ]] ||
            fail "EXTRAS=$EXTRAS: '$name' is unknown. Fix: set EXTRAS=environments,search or EXTRAS=none"
    done
    for name in "${!extra_keys[@]}"; do
        recorded=$(stamped "${extra_keys[$name]}")
        extra_hashes[$name]=none
        if [[ -n $recorded && $recorded != none ]] || { [[ $selected == *" $name "* ]] && ! left_out "$recorded"; }; then
            extra_hashes[$name]=$(sha256sum "$root/requirements/$name.txt" | cut -d' ' -f1)
        fi
    done
}

# left_out RECORDED: whether an earlier EXTRAS left this extra out, and this call does not set EXTRAS.
left_out() { [[ $1 == none && -z ${EXTRAS:-} ]]; }

# The two flavours share module names (vllm), so one is never installed over the other.
refuse_other_flavour() {
    local recorded keep
    recorded=$(stamped flavour)
    [[ -z $recorded || $recorded == "$flavour" ]] && return
    keep="DEVICE=$recorded keeps it"
    fail "$env_dir holds the $recorded flavour, but ${flavour} is wanted here ($keep); replace it with:" \
        "$(DEVICE=$flavour command_line --rebuild)"
}

# --- state -----------------------------------------------------------------------------------------------------------

# Prints why the environment must be installed; nothing when it is complete.
what_is_missing() {
    local version name
    [[ -f $stamp ]] || { echo "no complete $flavour environment in $env_dir"; return; }
    [[ $(stamped lock) == "$lock_hash" ]] || { echo "requirements/${lock_file##*/} has changed"; return; }
    for name in "${!extra_hashes[@]}"; do
        [[ ${extra_hashes[$name]} == none || $(stamped "${extra_keys[$name]}") == "${extra_hashes[$name]}" ]] ||
            { echo "requirements/$name.txt is not installed, or has changed"; return; }
    done
    version=$(python_version 2>/dev/null) || { echo "$python does not run"; return; }
    [[ $(stamped python) == "$version" ]] || { echo "its Python is now $version"; return; }
    [[ $(installed_checkout) -ef $root ]] || { echo "$env_dir does not run the code of $root"; return; }
    # scripts name their interpreter by its full path, which breaks when an environment is moved or copied
    grep -qsF "$env_dir/bin/python" "$env_dir/bin/grpo" || { echo "$env_dir/bin/grpo is missing or was moved"; return; }
}

installed_checkout() { "$python" -I "$root/scripts/installed_checkout.py" 2>/dev/null; }

# An environment imports the code of one checkout, so a second checkout must not train with it.
refuse_other_checkout() {
    local owner own=$root/.venv
    [[ -x $python ]] || return 0
    owner=$(installed_checkout) || return 0
    [[ ! $owner -ef $root && -f $owner/scripts/setup.sh ]] || return 0
    [[ ! $env_dir -ef $own ]] || own=$root/.venv.own
    fail "ENV_DIR=$env_dir: this environment runs the code of $owner, not of $root." \
        "Fix: ENV_DIR=$(printf %q "$own") bash $(printf %q "$root/scripts/setup.sh")"
}

write_stamp() {
    local version
    version=$(python_version)
    printf '{"flavour": "%s", "lock": "%s", "extras": "%s", "search": "%s", "python": "%s", "root": "%s"}\n' \
        "$flavour" "$lock_hash" "${extra_hashes[environments]}" "${extra_hashes[search]}" "$version" "$root" \
        >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

# --- interpreter -----------------------------------------------------------------------------------------------------

# usable FILE: an interpreter that runs (pyenv's shims may not), is 3.11 to 3.13 and can make environments.
usable() {
    "$1" -Ic 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

# python3.11 comes first: some indexes carry torch's CPU build for it alone.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.13 with the venv module"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        ! usable "$candidate" || { command -v "$candidate"; return; }
    done
    if command -v uv >/dev/null && candidate=$(uv python find '>=3.11,<3.14' 2>/dev/null) && usable "$candidate"; then
        echo "$candidate"
    fi
}

no_python() {
    fail "no Python 3.11 to 3.13 with the venv module found (tried python3.11, 3.12, 3.13, python3, conda, uv);" \
        "load a module that has one, or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh"
}

find_conda() {
    local candidate
    for candidate in "${CONDA_EXE:-}" conda mamba micromamba; do
        [[ -n $candidate ]] && command -v "$candidate" && return
    done
    return 1
}

make_conda() {
    local conda
    conda=$(find_conda) || fail "ENV_MODE=conda, but no conda, mamba or micromamba found; set CONDA_EXE or load its module"
    say "conda prefix $env_dir with Python 3.11"
    # conda waits four minutes for a silent channel unless set otherwise
    CONDA_REMOTE_READ_TIMEOUT_SECS=15 CONDA_REMOTE_MAX_RETRIES=1 \
        "$conda" create --yes --quiet --prefix "$env_dir" python=3.11 pip ||
        fail "conda could not make $env_dir (its message is above); check its channels and your network"
}

make_venv() {
    local base
    base=$(find_python)
    if [[ -n $base ]]; then
        "$base" -m venv "$env_dir" || fail "$base could not make a virtual environment in $env_dir (its message is above)"
    elif find_conda >/dev/null; then
        make_conda
    else
        no_python
    fi
}

# is_environment: so that nothing is installed into, or removed from, a directory of another kind (/usr, a home).
is_environment() { [[ -f $env_dir/pyvenv.cfg || -d $env_dir/conda-meta ]]; }

# An interrupted set-up leaves an environment without a stamp: a working one is completed, a broken one made again.
make_environment() {
    if [[ -n $(ls -A -- "$env_dir" 2>/dev/null) ]] && ! is_environment; then
        fail "ENV_DIR=$env_dir exists and is not a Python environment; name another directory"
    fi
    if "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    case $mode in
    conda) make_conda ;;
    venv) make_venv ;;
    *) fail "ENV_MODE=$mode is neither venv nor conda" ;;
    esac
}

remove_environment() {
    [[ -e $env_dir ]] || return 0
    is_environment || fail "$env_dir is not a Python environment; it was left alone"
    say "removing $env_dir"
    rm -rf -- "$env_dir"
}

# --- packages --------------------------------------------------------------------------------------------------------

pip() { "$python" -m pip "$@"; }

# pip goes on without an index that does not answer and, for every package, waits for it again. So each one is asked
# once, within 50 s in all; -vvv is the only level at which pip says which of them stayed silent.
probe_indexes() {
    local report silent status=0
    report=$(timeout 50 "$python" -m pip -vvv install --dry-run --no-deps --ignore-installed --no-cache-dir \
        --timeout 8 --retries 1 "$probe_package" 2>&1) || status=$?
    silent=$(grep -oE 'Could not fetch URL .*: (connection error|timed out|There was a problem confirming)' <<<"$report" |
        sed -E 's/^Could not fetch URL ([^ ]+):.*/\1/; s#//[^/@ ]*@#//#' | sort -u | paste -sd' ' -) || true
    if [[ -z $silent && $status == 0 ]]; then
        return
    fi
    fail "no answer from a package index: ${silent:-$(last_words "$report")};" \
        "check network and proxy, or name another one (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL; see: pip config list)"
}

# The most telling line of pip's output, without credentials in URLs.
last_words() {
    local line
    line=$(grep -E '^ *(ERROR|WARNING: Retrying)|Looking in indexes' <<<"$1" | tail -n 1) || true
    sed -E 's#//[^/@ ]*@#//#g' <<<"${line:-nothing within 50 s}"
}

# uv installs the locks several times faster than pip. It comes from PATH or, at the version of the lock, from the package
# index. Without it, and in a conda prefix, pip installs everything.
choose_installer() {
    local pin
    uv=
    [[ ! -d $env_dir/conda-meta ]] || return 0
    pin=$(grep '^uv==' "$lock_file") || true
    if command -v uv >/dev/null; then
        uv=$(command -v uv)
    elif [[ -n $pin ]] && pip install --quiet --no-deps "$pin" 2>/dev/null && "$env_dir/bin/uv" --version >/dev/null; then
        uv=$env_dir/bin/uv
    fi
    if [[ -z $uv ]]; then
        say "uv is not available from the configured indexes; using pip"
        return
    fi
    export_uv_settings "$python"
    choose_uv_cache
}

# uv links packages from its cache into the environment. If the home is on another file system, they would be copied and
# also fill the home's quota, so a cache next to the environment is used and removed at the end.
choose_uv_cache() {
    local default=${XDG_CACHE_HOME:-${HOME:-}/.cache}
    own_cache=
    [[ -z ${UV_CACHE_DIR:-} ]] && mkdir -p "$default" || return 0
    [[ $(stat -c %d "$default") != $(stat -c %d "$env_dir") ]] || return 0
    own_cache=$env_dir.uv-cache
    export UV_CACHE_DIR=$own_cache
}

# The files that pin what is installed: the lock of the flavour, then those of the extras.
choose_locks() {
    local name
    locks=("$lock_file")
    for name in "${!extra_hashes[@]}"; do
        [[ ${extra_hashes[$name]} == none ]] || locks+=("$root/requirements/$name.txt")
    done
}

# Every installation has --no-deps: the locks are complete, and on CPU the dependencies left out of them would break the
# environment.
uv_install() { "$uv" pip install --python "$python" --no-deps "${uv_options[@]}" "$@"; }

install_with_uv() {
    local pin start=$SECONDS
    [[ -n $uv ]] || return
    pin=$(grep '^torch==.*+cpu' "$lock_file") || true
    if [[ -n $pin ]] && ! uv_install --quiet --dry-run "$pin" 2>/dev/null; then
        say "$pin is not in the configured indexes; using $torch_cpu_index"
        export UV_INDEX="${UV_INDEX:+$UV_INDEX }$torch_cpu_index"
    fi
    say "installing $(cat "${locks[@]}" | wc -l) packages with uv"
    uv_install "${locks[@]/#/--requirements=}" &&
        uv_install --no-build-isolation --editable "$root" || return
    rm -f "$env_dir/.lock" # uv leaves it writable for every user
    say "installed the packages in $((SECONDS - start)) s"
}

# On the public internet the CPU build of torch is in PyTorch's own index; a site may offer it in the configured ones.
install_cpu_torch() {
    local pin errors status=0
    pin=$(grep '^torch==' "$lock_file")
    errors=$(mktemp)
    pip install --no-deps "$pin" 2>"$errors" || status=$?
    if [[ $status != 0 ]] && grep -q 'No matching distribution found for torch' "$errors"; then
        say "$pin is not in the configured indexes; using $torch_cpu_index"
        status=0
        pip install --no-deps --timeout 10 --retries 2 --index-url "$torch_cpu_index" "$pin" || status=$?
    elif [[ $status != 0 ]]; then
        cat "$errors" >&2
    fi
    rm -f "$errors"
    [[ $status == 0 ]] || fail "$pin could not be installed (pip's message is above);" \
        "where $torch_cpu_index is out of reach, name a source that has it: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
}

install_with_pip() {
    local lock start=$SECONDS
    say "installing $(cat "${locks[@]}" | wc -l) packages with pip, which takes minutes"
    [[ $flavour != cpu ]] || install_cpu_torch
    for lock in "${locks[@]}"; do
        pip install --no-deps --no-compile -r "$lock" || fail "pip could not install requirements/${lock##*/} (its message is above)"
    done
    pip install --no-deps --no-build-isolation --editable "$root" ||
        fail "pip could not install the project (its message is above)"
    say "installed the packages in $((SECONDS - start)) s"
}

# Python compiles a module at its first import. For the modules of a run this happens here, not in the first run.
compile_imports() {
    local start=$SECONDS
    say "compiling the modules that a run imports"
    timeout --foreground 300 "$python" -I "$root/scripts/compile_imports.py" </dev/null >/dev/null 2>&1 || true
    say "compiled them in $((SECONDS - start)) s"
}

install_packages() {
    export DS_BUILD_OPS=0
    [[ $flavour != cpu ]] || export DS_ACCELERATOR=cpu
    choose_locks
    choose_installer
    install_with_uv && return
    [[ -z $uv ]] || say "uv failed (its message is above); trying pip"
    install_with_pip
}

install_environment() {
    make_environment
    say "$flavour environment in $env_dir (python $(python_version))"
    probe_indexes
    # the stamp goes first and comes last, so that an interrupted installation is never taken for a complete one
    rm -f -- "$stamp"
    install_packages
    compile_imports
    write_stamp
    [[ -z ${own_cache:-} ]] || rm -rf -- "$own_cache"
    say "done in ${SECONDS} s"
}

# One set-up at a time: two jobs submitted together would write into each other's files.
hold_lock() {
    mkdir -p -- "$(dirname -- "$env_dir")"
    command -v flock >/dev/null || return 0
    exec 9>"$env_dir.lock"
    flock -n 9 || {
        say "another set-up is at work on $env_dir; waiting for it"
        flock 9 || say "this file system has no locks; do not start two set-ups at once"
    }
}

# --- main ------------------------------------------------------------------------------------------------------------

main() {
    local reason
    case ${1:-} in
    '') ;;
    --rebuild) [[ -n ${SLURM_JOB_ID:-} ]] || { hold_lock; remove_environment; } ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [[ $1 == --help ]] || exit 2; exit 0 ;;
    esac
    choose_flavour
    choose_extras
    refuse_other_flavour
    refuse_other_checkout
    reason=$(what_is_missing)
    if [[ -n $reason ]]; then
        # jobs never install: compute nodes may be offline, and many jobs may start at once
        [[ -z ${SLURM_JOB_ID:-} ]] || fail "$reason, and a job installs nothing; on the login node run: $(command_line)"
        say "$reason"
        hold_lock
        [[ -z $(what_is_missing) ]] || install_environment
    else
        say "$flavour environment in $env_dir (python $(stamped python)) is complete"
    fi
}

main "$@"
