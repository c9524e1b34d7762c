"""Our code inside the vLLM server: token check, sampling endpoint, weight reports, and the CPU plug-in."""
