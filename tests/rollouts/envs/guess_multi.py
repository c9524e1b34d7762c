import random

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["lucky"] = random.random()
        return state

    async def env_response(self, messages, state, **kw):
        said = messages[-1]["content"]
        state["tries"] = state.get("tries", 0) + 1
        if said == state["answer"]:
            state["won"] = True
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"wrong {random.randrange(1000)}"}]


def load_environment():
    ds = Dataset.from_dict({"question": ["guess"] * 4, "answer": ["1", "2", "3", "4"]})

    def won(state):
        return 1.0 / state["tries"] if state.get("won") else 0.0

    return Guess(dataset=ds, max_turns=4, rubric=vf.Rubric(funcs=[won]))
