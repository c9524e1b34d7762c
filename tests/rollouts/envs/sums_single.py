import verifiers as vf
from datasets import Dataset


def rows(numbers):
    return Dataset.from_dict({"question": [f"{i}+{i}?" for i in numbers], "answer": [str(2 * i) for i in numbers]})


def load_environment(n=5, evaluation=0, **kw):
    parser = vf.XMLParser(["answer"])

    def right(completion, answer, parser):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    return vf.SingleTurnEnv(
        dataset=rows(range(n)) if n else None,
        eval_dataset=rows(range(100, 100 + evaluation)) if evaluation else None,
        system_prompt="Answer in <answer> tags.",
        parser=parser,
        rubric=vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser),
    )
