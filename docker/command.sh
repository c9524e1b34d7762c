#!/bin/bash
# The image's commands grpo and python (by the name of the link that is called), for any user and a read-only image.
# Apptainer hands over the caller's environment and home folder, whose packages and repository must stay out.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 GRPO_HOME=/opt/grpo/repository
export CACHE_ROOT=${CACHE_ROOT:-$PWD/.cache}
[[ -w ${HOME:-/} ]] || export HOME=$PWD # Docker's for a user that the image has no name for is /
exec "/opt/grpo/env/bin/${0##*/}" "$@"
