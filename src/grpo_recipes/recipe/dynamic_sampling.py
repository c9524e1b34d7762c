"""Rules of ``dynamic_sampling``: the settings that it can't be combined with. No torch, no socket."""

from grpo_recipes.recipe.rules import Rule, set_by_user, uses_external_server
from grpo_recipes.recipe.sources import requested_sampler

# fmt: off
RULES = (
    Rule("dynamic_sampling", lambda r: r.batch.dynamic_sampling and r.sampling.overlap_generation,
        "dynamic_sampling and overlap_generation can't be combined: new prompts follow from rewards, but the next "
        "generation is sampled before its rewards are known",
        "remove dynamic_sampling, or remove overlap_generation"),
    Rule("dynamic_sampling", lambda r: r.batch.dynamic_sampling and requested_sampler(r),
        "dynamic_sampling replaces prompts of a dataset, but this recipe's completions come from episodes",
        "{removal}"),
    Rule("dynamic_sampling", lambda r: r.batch.dynamic_sampling and uses_external_server(r),
        "dynamic_sampling and vllm_server_base_url can't be combined: an external server may leave completions out",
        "remove dynamic_sampling, or remove vllm_server_base_url"),
    Rule("{item}", lambda r: not r.batch.dynamic_sampling
        and set_by_user(r, "dynamic_sampling_max_rounds", any_value=False),
        "{item} does nothing without dynamic_sampling", "add dynamic_sampling: true, or remove {item}"),
)
# fmt: on
