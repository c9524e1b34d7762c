"""An environment like Atropos' ``gsm8k_server.py``: unmodified atroposlib, started by hand with ``serve``."""

import random
import sys

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Sums(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=8, total_steps=1000, steps_per_eval=2, max_token_length=2048, wandb_name="sums"
        )
        server = APIServerConfig(model_name="default", base_url="http://localhost:9001/v1", api_key="x")
        return config, [server]

    async def setup(self):
        self.evaluations = 0

    async def get_next_item(self):
        return random.randrange(10), random.randrange(10)

    async def collect_trajectories(self, item):
        first, second = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            chat = await managed.chat_completion(
                messages=[{"role": "user", "content": f"{first}+{second}="}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(chat.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(1.0 if f">{first + second}<" in choice.message.content else -1.0)
        return group, []

    async def evaluate(self, *args, **kwargs):
        self.evaluations += 1
        reply = await self.server.chat_completion(
            messages=[{"role": "user", "content": "1+2="}], n=1, max_tokens=8, temperature=0.0, split="eval"
        )
        print(f"evaluation {self.evaluations}: {reply.choices[0].message.content!r}", file=sys.stderr, flush=True)


class Alone(Sums):
    """One server outside a list: atroposlib ignores its address."""

    @classmethod
    def config_init(cls):
        config, (server,) = Sums.config_init()
        return config, server


if __name__ == "__main__":
    (Alone if sys.argv.pop(1) == "alone" else Sums).cli()
