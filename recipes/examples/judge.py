"""A language model as the judge: a reward from any server that speaks OpenAI's protocol.

    export JUDGE_URL=https://host/v1 JUDGE_MODEL=name JUDGE_KEY=...

The function is async and gets one completion: reward_concurrency calls run at once in one child process. What it raises
(no answer after the retries, or no grade in it) leaves the completion unscored.
"""

import os
import re

from openai import AsyncOpenAI

# Each try may take 20 s. With two more, and pauses between them, a call stays within reward_timeout: 90.
client = AsyncOpenAI(base_url=os.environ["JUDGE_URL"], api_key=os.environ["JUDGE_KEY"], timeout=20.0, max_retries=2)
MODEL = os.environ["JUDGE_MODEL"]
TASK = "Grade the answer from 0 (wrong) to 10 (right and clear). Reply with the number alone."


async def graded(completions, prompts, answer, **columns):
    """Return the judge's grade of one completion, from 0 to 1."""
    question, reply = prompts[0][-1]["content"], completions[0][-1]["content"]
    text = f"{TASK}\nQuestion: {question}\nSolution: {answer[0]}\nAnswer: {reply}"
    judged = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], temperature=0.0, max_tokens=16
    )
    said = judged.choices[0].message.content or ""
    grade = re.search(r"\d+", said)
    if grade is None:
        raise ValueError(f"no grade in {said!r}")
    return [min(int(grade[0]), 10) / 10]
