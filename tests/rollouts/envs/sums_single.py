import verifiers as vf
from datasets import Dataset


def load_environment(n=5, **kw):
    ds = Dataset.from_dict({"question": [f"{i}+{i}?" for i in range(n)], "answer": [str(2 * i) for i in range(n)]})
    parser = vf.XMLParser(["answer"])

    def right(completion, answer, parser):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    return vf.SingleTurnEnv(
        dataset=ds,
        system_prompt="Answer in <answer> tags.",
        parser=parser,
        rubric=vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser),
    )
