import random

import verifiers as vf
from datasets import Dataset


def load_environment():
    numbers = [str(random.random()) for _ in range(4)]
    right = vf.Rubric(funcs=[lambda completion, answer: float(completion[-1]["content"] == answer)])
    return vf.SingleTurnEnv(dataset=Dataset.from_dict({"question": numbers, "answer": numbers}), rubric=right)
