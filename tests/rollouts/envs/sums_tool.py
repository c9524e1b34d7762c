import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return a + b


def load_environment():
    ds = Dataset.from_dict({"question": ["2+3?"], "answer": ["5"]})

    def right(completion, answer):
        return float(answer in completion[-1]["content"])

    return vf.ToolEnv(dataset=ds, tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[right]))
