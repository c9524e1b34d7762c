#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --output=logs/slurm_%j.out
#SBATCH --error=logs/slurm_%j.err
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --time=72:00:00
#
# What differs between clusters is given when submitting: sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh
# To fix it here, write #SBATCH in front of:
#   --gres=gpu:8   --cpus-per-task=64   --mem=256G   --account=NAME   --partition=NAME   --exclusive

# Slurm announces the end of the time limit with USR1; the launcher takes it over.
trap '' USR1

usage() {
    cat <<'TEXT'
usage: sbatch [SLURM OPTIONS] training.sh [OPTIONS]    train on a cluster, e.g.
           sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh
       bash training.sh [OPTIONS]                      the same on this machine

OPTIONS go to "grpo launch"; "grpo launch --help" lists them once the environment exists (bash scripts/setup.sh).

  DEVICE=cuda|cpu|auto   packages to install          ENV_MODE=venv|conda   kind of environment
  ENV_DIR=DIR            where the environment is     MODULES="NAME ..."    modules to load first
  ENV_ACTIVATE=FILE      source FILE and use that environment as it is
  CONDA_ENV=NAME         use that conda environment as it is (CONDA_SH=FILE: conda's etc/profile.d/conda.sh)
  GRPO_HOME=DIR          the repository, where jobs are submitted from elsewhere
TEXT
}

fail() { printf 'training.sh: %s\n' "$*" >&2; exit 2; }
holds_ours() { [[ -n $1 && -f $1/training.sh && -d $1/src/grpo_recipes ]]; }

# Under sbatch this file runs from Slurm's spool directory, so its own path says nothing.
find_repository() {
    local here
    here=$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")
    if [[ -z $SLURM_JOB_ID ]] || holds_ours "$here"; then # inside salloc it is no copy
        echo "$here"
    elif holds_ours "$SLURM_SUBMIT_DIR"; then
        echo "$SLURM_SUBMIT_DIR"
    elif holds_ours "$GRPO_HOME"; then
        echo "$GRPO_HOME"
    else
        fail "the job was submitted from ${SLURM_SUBMIT_DIR:-an unknown directory}, which is not the repository;" \
            "submit from the repository, or with: GRPO_HOME=/path/to/repository sbatch training.sh"
    fi
}

# Module and conda code reads unset variables and ignores failures, so neither -u nor -e is set in this file.
# shellcheck disable=SC1090,SC1091
prepare_shell() {
    local name
    if [[ -n $MODULES ]]; then
        type module >/dev/null 2>&1 || source /etc/profile.d/modules.sh 2>/dev/null ||
            source /etc/profile.d/lmod.sh 2>/dev/null || fail "MODULES is set, but there is no module command"
        for name in $MODULES; do
            module load "$name" || fail "module load $name failed"
        done
    fi
    if [[ -n $CONDA_SH ]]; then
        source "$CONDA_SH" || fail "CONDA_SH=$CONDA_SH could not be sourced"
    fi
    if [[ -n $ENV_ACTIVATE ]]; then
        source "$ENV_ACTIVATE" || fail "ENV_ACTIVATE=$ENV_ACTIVATE could not be sourced"
    elif [[ -n $CONDA_ENV ]]; then
        [[ $(type -t conda) == function ]] || eval "$(conda shell.bash hook)"
        conda activate "$CONDA_ENV" || fail "conda activate $CONDA_ENV failed; CONDA_SH names conda's etc/profile.d/conda.sh"
    fi
}

# run_atropos_grpo.sh goes on here too, with the door of Atropos in the place of grpo launch.
launch() {
    [[ $GRPO_DOOR != atropos ]] || exec "${grpo%/*}/python" -P -s -m grpo_recipes.extensions.atropos.main "$@"
    exec "$grpo" launch "$@"
}

repository=$(find_repository) || exit
[[ -z $ENV_DIR ]] || { ENV_DIR=$(realpath -ms -- "$ENV_DIR"); export ENV_DIR; }
grpo=${ENV_DIR:-$repository/.venv}/bin/grpo
if [[ $1 == --help || $1 == -h ]]; then
    [[ -x $grpo ]] && launch --help
    usage
    exit 0
fi

cd -- "$repository" || fail "cannot enter $repository"
mkdir -p logs
prepare_shell
if [[ -n $ENV_ACTIVATE || -n $CONDA_ENV ]]; then
    grpo=$(type -P grpo) || fail "the environment has no grpo command; install it there with:" \
        "pip install --no-deps -r requirements/gpu.txt -r requirements/environments.txt -r requirements/search.txt -e ."
    python=${grpo%/*}/python
    code=$("$python" -I scripts/installed_checkout.py 2>/dev/null)
    [[ -z $code || $code -ef $repository ]] || fail "$python runs the code of $code, not of $repository." \
        "Fix: $python -m pip install --no-deps -e $(printf %q "$repository"), or activate another environment"
else
    bash scripts/setup.sh || exit
fi
# Packages of the login shell must not reach into the environment.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
export GRPO_DEFAULT_RECIPE=1 # this script alone takes the default recipe where none is named
launch "$@"
