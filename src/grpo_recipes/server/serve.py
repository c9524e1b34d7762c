"""Start vLLM's API server faster than ``python -m vllm.entrypoints.openai.api_server``.

The engine and the workers are separate processes, and each imports vLLM after this module. Garbage collections take a
sixth of the import time and free nothing, so this module makes them rare.
"""

import gc
import runpy

gc.set_threshold(50_000)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
