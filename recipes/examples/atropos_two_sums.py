"""An environment of one's own for Atropos: two sums, one after the other, each worth half."""

from grpo_recipes.extensions.atropos.environments import RecipeEnv


class TwoSums(RecipeEnv):
    def next_item(self):
        first, second, third, fourth = self.random.choices(range(10), k=4)
        return {"prompt": f"{first}+{second}=", "next": f"{third}+{fourth}=", "right": (first + second, third + fourth)}

    async def play(self, item, episode):
        said = [episode.text, await episode.turn(item["next"])]
        return [(text == f"<answer>{right}</answer>") / 2 for text, right in zip(said, item["right"], strict=True)]
