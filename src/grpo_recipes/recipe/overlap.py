"""Rules of ``overlap_generation``: the settings that it can't be combined with. No torch, no socket."""

from grpo_recipes.recipe.rules import COLOCATED, Rule, starts_server, uses_external_server
from grpo_recipes.recipe.sources import requested_sampler

# Describes the age of the sampling weights in plans, reports and messages.
OFF_POLICY = "one step off-policy: the server samples the next generation while the trainers update"


# fmt: off
RULES = (
    Rule("overlap_generation", lambda r: r.sampling.overlap_generation and not r.server.use_vllm,
        "overlap_generation needs a vLLM server, which samples while the trainers update",
        "{removal}, or write use_vllm: true"),
    Rule("overlap_generation", lambda r: r.sampling.overlap_generation and r.server.use_vllm and not starts_server(r)
        and not uses_external_server(r),
        f"overlap_generation contradicts {COLOCATED}, where vLLM samples in the processes that update",
        f"{{removal}}, or remove {COLOCATED}"),
    Rule("overlap_generation", lambda r: r.sampling.overlap_generation and uses_external_server(r),
        "overlap_generation needs the server that the launch starts, and vllm_server_base_url names another",
        "{removal}, or remove vllm_server_base_url"),
    Rule("overlap_generation", lambda r: r.sampling.overlap_generation and requested_sampler(r),
        "overlap_generation samples completions of prompts ahead, and can't play episodes of environments or tools",
        "{removal}"),
    Rule("overlap_generation", lambda r: r.sampling.overlap_generation and r.server.weight_sync == "shared",
        "overlap_generation contradicts weight_sync: shared: an update would change the weights of a generation",
        "write weight_sync: auto, or remove overlap_generation"),
    Rule("overlap_generation", lambda r: r.sampling.overlap_generation and r.server.gpu == "shared",
        "overlap_generation and vllm_gpu: shared can't be combined: server and trainers would compete for one GPU",
        "remove overlap_generation, or set vllm_gpu: own"),
    Rule("vllm_importance_sampling_correction",
        lambda r: r.sampling.overlap_generation and r.server.use_vllm and not r.sampling.importance_sampling_correction,
        "overlap_generation is one step off-policy, which vllm_importance_sampling_correction: false leaves as it is",
        "write vllm_importance_sampling_correction: true, or remove overlap_generation"),
)
# fmt: on
