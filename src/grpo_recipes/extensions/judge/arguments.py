"""Keys of the reward ``llm_judge``. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import key
from grpo_recipes.recipe.sections import Key, Section


# fmt: off
@dataclass
class JudgeArguments:
    """Keys of the reward ``llm_judge``."""

    judge_base_url: str | None = key(None, "Address of the judge's server with OpenAI's protocol, ending in /v1.")
    judge_model: str | None = key(None, "Name of the judge on its server.")
    judge_api_key_variable: str | None = key(None,
        "Environment variable that contains the key of the judge's server. List it in reward_environment too.")
    judge_mode: str = key("absolute",
        "Grade each completion (absolute), or compare it with the reference answer in both orders (pairwise).",
        ["absolute", "pairwise"])
    judge_prompt: str | None = key(None,
        "Text for the judge. {prompt}, {completion} and {answer} are replaced; with judge_mode: pairwise, {prompt}, "
        "{first} and {second}.")
    judge_scale: list[float] = key([0, 10], "Lowest and highest grade; the reward is the grade scaled to 0 to 1.")
    judge_max_tokens: int = key(256, "Most tokens of the judge's reply, including its reasoning.", min=1)
    judge_temperature: float = key(0.0, "Sampling temperature of the judge.", min=0.0, max=2.0)
    judge_retries: int = key(2, "Number of further tries if the judge's server fails.", min=0, max=10)
    judge_cache: str | None = key(None,
        "Folder for the judge's replies. Equal requests, also of other runs, are then answered from it.")
# fmt: on


class JudgeKeys(Section):
    """The keys of the reward ``llm_judge`` that code reads, with their types."""

    base_url = Key[str | None]("judge_base_url")
    model = Key[str | None]("judge_model")
    api_key_variable = Key[str | None]("judge_api_key_variable")
    mode = Key[str]("judge_mode")
    prompt = Key[str | None]("judge_prompt")
    scale = Key[list[float]]("judge_scale")
