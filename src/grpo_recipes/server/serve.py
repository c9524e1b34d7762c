"""vLLM's API server, as ``python -m vllm.entrypoints.openai.api_server`` runs it, started sooner.

Its engine and its workers are processes of their own, which each import vLLM anew after this module. A sixth of that
time goes into garbage collections among objects that stay, so that here there are fewer.
"""

import gc
import runpy

gc.set_threshold(50_000)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
