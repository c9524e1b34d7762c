#!/bin/bash
# The image's entry point. It runs a program of the image, such as bash, python or nvidia-smi, and passes all other
# words to grpo.
if [[ $# -gt 0 ]] && type -P -- "$1" >/dev/null; then
    exec "$@"
fi
exec grpo "$@"
