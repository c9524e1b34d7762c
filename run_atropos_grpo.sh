#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --output=logs/slurm_%j.out
#SBATCH --error=logs/slurm_%j.err
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --time=72:00:00
#
# src/atropos_grpo.py with the variables of verl's integration with Atropos: ATROPOS_API_URL, MODEL_PATH, OUTPUT_DIR,
# NUM_GPUS, BATCH_SIZE, MAX_EPOCHS, LORA_RANK and INFERENCE_BACKEND. Flags win over them; --help has both.
#   MODEL_PATH=Qwen/Qwen2.5-3B-Instruct LORA_RANK=16 bash run_atropos_grpo.sh --environment arithmetic
#   ATROPOS_API_URL=http://node7:8000 BATCH_SIZE=512 sbatch --gres=gpu:4 run_atropos_grpo.sh

# Slurm announces the end of the time limit with USR1; the launcher takes it over.
trap '' USR1

fail() { printf 'run_atropos_grpo.sh: %s\n' "$*" >&2; exit 2; }

# Under sbatch this file runs from Slurm's spool directory, so its own path says nothing.
find_repository() {
    local folder
    for folder in "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")" "$SLURM_SUBMIT_DIR" "$GRPO_HOME"; do
        if [[ -n $folder && -f $folder/training.sh && -d $folder/src/grpo_recipes ]]; then
            realpath -- "$folder"
            return
        fi
    done
    fail "the job was submitted from ${SLURM_SUBMIT_DIR:-an unknown directory}, which is not the repository;" \
        "submit from the repository, or with: GRPO_HOME=/path/to/repository sbatch run_atropos_grpo.sh"
}

# The variable's run-api is asked before anything heavy starts, unless a flag names another one, or nothing will start.
need_api() {
    local word
    for word in "$@"; do
        case $word in --atropos-url* | --atropos_api_url* | --dry-run | --help | -h) return ;; esac
    done
    [[ -n $ATROPOS_API_URL ]] && type -P curl >/dev/null || return 0
    curl --silent --fail --output /dev/null --max-time 10 --noproxy '*' "${ATROPOS_API_URL%/}/status" && return
    printf 'ERROR: Atropos API unreachable\n%s/status does not answer; start it with run-api --port PORT\n' \
        "${ATROPOS_API_URL%/}" >&2
    exit 1
}

repository=$(find_repository) || exit
need_api "$@"
export GRPO_DOOR=atropos
if [[ $1 == --help || $1 == -h ]]; then
    exec bash "$repository/training.sh" --help
fi
exec bash "$repository/training.sh" --read-variables "$@"
