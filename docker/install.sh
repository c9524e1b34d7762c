#!/bin/bash
# The steps of the image, for docker/Dockerfile and docker/grpo.def alike; root runs them in a Debian 12.
#   DEVICE=cpu|cuda bash docker/install.sh environment   Debian's packages, and the environment from its lock
#   COMMIT=HASH bash docker/install.sh repository        the commands, the commit, and rights for every user
set -euo pipefail

grpo=/opt/grpo # Apptainer mounts the caller's /home, /tmp and working folder over the image's, and sites /scratch
umask 022

# Triton and DeepSpeed compile small C programs against Python's headers at run time; vLLM on CPU needs libnuma.
packages=(ca-certificates g++ gcc libc6-dev libnuma1 python3.11 python3.11-dev python3.11-venv)

install_environment() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install --yes --no-install-recommends "${packages[@]}"
    rm -rf /var/lib/apt/lists/*
    # Images may be built inside a Slurm job, where setup.sh installs nothing.
    env -u SLURM_JOB_ID ENV_DIR=$grpo/env PYTHON=/usr/bin/python3.11 PIP_NO_CACHE_DIR=1 \
        bash $grpo/repository/scripts/setup.sh
    # Users of the image can't write compiled modules.
    $grpo/env/bin/python -m compileall -q -j 0 $grpo/env/lib || true # some packages have templates that are no Python
    rm -f $grpo/env.lock
}

finish_repository() {
    local command
    for command in grpo python; do
        ln -sfn $grpo/repository/docker/command.sh "/usr/local/bin/$command"
    done
    [[ -z ${COMMIT:-} ]] || printf '%s\n' "$COMMIT" >$grpo/repository/.commit
    # A checkout made with umask 077 is for its owner alone.
    chmod -R u=rwX,go=rX $grpo/repository
    $grpo/env/bin/python -m compileall -q $grpo/repository/src
    install -d -m 1777 /work # the working folder where the caller mounts none
}

case ${1:-} in
environment) install_environment ;;
repository) finish_repository ;;
*)
    sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
