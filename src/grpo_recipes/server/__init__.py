"""What of ours runs inside the vLLM server: the token check, the weight report, the CPU plug-in."""
