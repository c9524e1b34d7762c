"""Ask a language model on another server to grade completions, as the reward ``llm_judge``.

Calls run in child processes, many at a time. A judge that fails leaves the completion unscored. The judge reads text
that the policy wrote, so a policy can learn to flatter it: compare its grades with a reward that can't be fooled.
"""

import asyncio
import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, TypedDict, Unpack

from openai import AsyncOpenAI

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds that the client waits before a further try, doubled each time
_ABSOLUTE = """Grade an answer from {low} (wrong) to {high} (right). Compare it with the reference answer.

Question:
{prompt}

Reference answer:
{answer}

Answer:
{completion}

End your reply with a line of this form: Grade: NUMBER"""
_PAIRWISE = """Which answer to the question is better, A or B?

Question:
{prompt}

Answer A:
{first}

Answer B:
{second}

End your reply with one of these lines: Better: A, Better: B, Better: equal"""
# After a label: ``: ``, ``:** ``, ``" = "``, `` (0-10): ``. Without a colon, "better. A" may be prose.
_COLON = r"""[\s*_"'`]*(?:\([^)]*\)[\s*_"'`]*)?[:=][\s*_"'`(\[]*"""
_NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"


class Settings(TypedDict):
    """The recipe keys of the judge, by their names, and the time limit of a call."""

    judge_base_url: str
    judge_model: str
    judge_api_key_variable: str | None
    judge_mode: str
    judge_prompt: str | None
    judge_scale: list[float]
    judge_max_tokens: int
    judge_temperature: float
    judge_retries: int
    judge_cache: str | None
    reward_timeout: float


async def llm_judge(
    completions: list[Any], prompts: list[Any], answer: list[str] | None = None, **settings: Unpack[Settings]
) -> list[float]:
    """Return the judge's grade of a single completion, from 0 to 1.

    ``completions`` and ``prompts`` contain a single chat or text, ``answer`` a single reference answer. It is None if
    the judge does not read it. With ``judge_mode: pairwise``, the grade is the fraction of comparisons with the
    reference answer that the completion wins, in both orders, where "equal" counts 0.5. Raise ValueError if a reply
    contains no grade or was cut off, and the client's error if the server gives no reply.
    """
    question, completion = _last_text(prompts[0]), _last_text(completions[0])
    reference = str(answer[0]) if answer else ""
    if settings["judge_mode"] == "absolute":
        low, high = settings["judge_scale"]
        texts = {"prompt": question, "completion": completion, "answer": reference}
        template = settings["judge_prompt"] or _ABSOLUTE.replace("{low}", f"{low:g}").replace("{high}", f"{high:g}")
        return [read_grade(await _request_reply(fill_template(template, texts), settings), low, high)]
    template = settings["judge_prompt"] or _PAIRWISE
    texts = {"prompt": question, "first": completion, "second": reference}
    swapped = {**texts, "first": reference, "second": completion}
    as_a, as_b = await asyncio.gather(
        *(_request_reply(fill_template(template, order), settings) for order in (texts, swapped))
    )
    return [(read_preference(as_a) + 1 - read_preference(as_b)) / 2]


def fill_template(template: str, texts: dict[str, str]) -> str:
    """Replace the placeholders of a template. Placeholders inside the inserted texts and other braces stay."""
    return re.sub(r"\{([a-z_]+)\}", lambda match: texts.get(match[1], match[0]), template)


def read_grade(reply: str, low: float, high: float) -> float:
    """Return the grade in a judge's reply, scaled from [low, high] to [0, 1].

    The grade follows the last "Grade:", or is the only number of the reply. Reasoning before ``</think>`` is ignored.
    Raise ValueError if there is no grade, or if it is outside of the scale.
    """
    final = reply.rpartition("</think>")[2]
    numbers = re.findall(f"grade{_COLON}({_NUMBER})", final, re.IGNORECASE)
    if not numbers:
        numbers = re.findall(rf"(?<![\w.]){_NUMBER}", final)
        if len(numbers) != 1:
            raise ValueError(f"no grade in the judge's reply {_shorten(reply)}")
    grade = float(numbers[-1])
    if not low <= grade <= high:
        raise ValueError(f"the judge's grade {grade:g} is outside of judge_scale [{low:g}, {high:g}]")
    return (grade - low) / (high - low)


def read_preference(reply: str) -> float:
    """Return 1 if a judge's reply prefers answer A, 0 if it prefers B, 0.5 if both are equal.

    The last "Better:" of the reply counts, after any ``</think>``. Raise ValueError if there is none.
    """
    final = reply.rpartition("</think>")[2]
    names = re.findall(rf"better{_COLON}(A|B|equal)\b", final, re.IGNORECASE)
    if not names:
        raise ValueError(f"no preference in the judge's reply {_shorten(reply)}")
    preferences = {"a": 1.0, "b": 0.0, "equal": 0.5}
    return preferences[names[-1].lower()]


async def _request_reply(text: str, settings: Settings) -> str:
    """Return the judge's reply to a message, from the cache folder if it has this request, else from the server.

    A new reply is stored in the cache folder. Raise the client's error if the server gives no reply, and ValueError if
    the reply was cut off.
    """
    messages = [{"role": "user", "content": text}]
    request: dict[str, Any] = {
        "model": settings["judge_model"],
        "messages": messages,
        "temperature": settings["judge_temperature"],
        "max_tokens": settings["judge_max_tokens"],
    }
    cached = _find_cache_file(request, settings)
    if cached and cached.is_file():
        return str(json.loads(cached.read_text())["reply"])
    client = _make_client(
        settings["judge_base_url"],
        settings["judge_api_key_variable"],
        settings["judge_retries"],
        settings["reward_timeout"],
    )
    choice = (await client.chat.completions.create(**request)).choices[0]
    if choice.finish_reason == "length":  # its last number may lack digits, or come from the reasoning
        raise ValueError(
            f"the judge's reply was cut off at judge_max_tokens {settings['judge_max_tokens']}; raise judge_max_tokens"
        )
    reply = choice.message.content or ""
    if cached:
        cached.parent.mkdir(parents=True, exist_ok=True)
        new = cached.with_suffix(f".{os.getpid()}.{id(request)}")
        new.write_text(json.dumps({"reply": reply, "request": request}))
        new.replace(cached)
    return reply


def compute_try_seconds(reward_timeout: float, retries: int) -> float:
    """Return the seconds of a try, so that ``retries`` + 1 tries and their pauses fit into 90 % of ``reward_timeout``.

    If the pauses alone exceed that time, all tries together get 0.1 s.
    """
    pauses: float = sum(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) for attempt in range(retries))
    return max(0.9 * reward_timeout - pauses, 0.1) / (retries + 1)


@functools.cache
def _make_client(base_url: str, key_variable: str | None, retries: int, reward_timeout: float) -> AsyncOpenAI:
    """Return the client of this process for a server, with ``retries`` further tries. It opens no connection yet.

    Raise KeyError if the variable ``key_variable``, which has the server's key, is not set. None sends no real key.
    """
    key = os.environ[key_variable] if key_variable else "unused"
    seconds = compute_try_seconds(reward_timeout, retries)
    return AsyncOpenAI(base_url=base_url, api_key=key, timeout=seconds, max_retries=retries)


def _find_cache_file(request: dict[str, Any], settings: Settings) -> Path | None:
    """Return the file with the reply to a request, which may not exist yet; None without ``judge_cache``."""
    if not settings["judge_cache"]:
        return None
    identity = json.dumps([settings["judge_base_url"], request], sort_keys=True)
    digest = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()
    return Path(settings["judge_cache"]).expanduser() / digest[:2] / f"{digest}.json"


def _last_text(chat: Any) -> str:
    """Return the text of a chat's last message, or a plain text as it is."""
    return str(chat if isinstance(chat, str) else chat[-1]["content"])


def _shorten(reply: str) -> str:
    """Return a reply in quotes, cut in the middle if it is long."""
    return repr(reply if len(reply) <= 120 else f"{reply[:60]} … {reply[-50:]}")
