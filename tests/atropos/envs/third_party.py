"""A typical third-party environment for atroposlib: one trajectory at a time, through its ManagedServer."""

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from pydantic import Field, model_validator


class CountConfig(BaseEnvConfig):
    begin: int = Field(default=0, ge=0)
    temperature: float = 1.0


class Count(BaseEnv):
    name = "count"
    env_config_cls = CountConfig

    async def setup(self):
        self.next = self.config.begin

    async def get_next_item(self):
        self.next += 1
        return {"number": self.next}

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": f"{item['number'] % 10}+0="}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, n=1, max_tokens=self.config.max_token_length, temperature=self.config.temperature
            )
            (node,) = managed.get_state()["nodes"]
        row = {"tokens": node.tokens, "masks": node.masked_tokens, "inference_logprobs": node.logprobs}
        score = float(str(item["number"] % 10) in reply.choices[0].message.content)
        overrides = {"set_advantage_to_zero": True} if score else None
        return {**row, "scores": score, "group_overrides": {"note": 1}, "overrides": overrides}, [item]

    async def evaluate(self, *args, **kwargs):
        pass


class DerivedConfig(CountConfig):
    half: int = 0

    @model_validator(mode="after")
    def halve(self):
        self.half = self.group_size // 2
        return self


class Derived(Count):
    """Derives a field of its configuration from another."""

    env_config_cls = DerivedConfig


class Own(Count):
    """Collects several groups at once, fails one of them, and sets their sampling parameters itself."""

    async def collect_trajectories(self, item):
        rows = [(await self.collect_trajectory(item))[0] for _ in range(self.config.group_size)]
        group = {name: [row[name] for row in rows] for name in rows[0] if name not in ("group_overrides", "overrides")}
        return [{**group, "generation_params": {"temperature": 0.1}}, None], [{"number": 9}]


class Logs(Count):
    """Logs the results of ``evaluate``, like other environments."""

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({**(wandb_metrics or {}), "eval/percent_correct": 0.5})


class Broken(Count):
    async def collect_trajectory(self, item):
        raise ZeroDivisionError("a fault of its own")


class Unfinished(BaseEnv):
    async def setup(self):
        pass
