"""Start vLLM's API server faster than ``python -m vllm.entrypoints.openai.api_server``.

Garbage collections take a sixth of the time in which vLLM is imported and free nothing, so this module makes them rare.
The engine and the workers are forked from this process (on CPU by ``plugin.py``) and need not import vLLM again.
"""

import gc
import runpy

gc.set_threshold(50_000)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
