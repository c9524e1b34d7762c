"""The endpoint of Atropos' vLLM client: ``POST /generate`` with token ids, answered with log-probs.

atroposlib's ``VLLMServer`` sends vLLM's ``SamplingParams`` as JSON, next to ``prompt``, and reads ``logprobs`` and
``finish_reasons``. No released vLLM has this endpoint. Here, vLLM's completions code answers it, so adapters,
priorities and aborted requests work as in other endpoints. Two rules differ from ``/v1/completions``:

* A missing sampling parameter has the recipe's value, or is neutral. vLLM would read the model's generation config.
* ``max_tokens`` is lowered to the tokens that fit after the prompt. vLLM would reject the request.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.outputs import RequestOutput

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.server.middleware import GENERATE_PATH, SAMPLING_VARIABLE
from grpo_recipes.server.wire import LOWEST_LOGPROB

_NEUTRAL = {"temperature": 1.0, **NEUTRAL_SAMPLING}
_NOT_ALLOWED = ("stream", "stream_options", "echo", "use_beam_search", "model", "priority")  # parameters of vLLM
router = APIRouter()


class _ServingGroups(OpenAIServingCompletion):
    """vLLM's completions code, changed to return the format that atroposlib's ``VLLMServer`` reads."""

    def request_output_to_completion_response(  # type: ignore[override]
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, request_id: str, *_: Any
    ) -> dict[str, Any]:
        """Return the answer's JSON: lists of texts, token ids, finish reasons and log-probs, one entry a completion.

        Override of vLLM's method, which builds an OpenAI response.
        """
        (result,) = final_res_batch
        for output in result.outputs:
            self._raise_if_error(output.finish_reason, request_id)
        answer = {
            "text": [output.text for output in result.outputs],
            "token_ids": [list(output.token_ids) for output in result.outputs],
            "finish_reasons": [output.finish_reason for output in result.outputs],
            "prompt_token_ids": result.prompt_token_ids,
        }
        if request.logprobs is not None:
            all_logprobs = []
            for output in result.outputs:
                positions = [_map_token_logprobs(position) for position in output.logprobs or ()]
                pairs = zip(output.token_ids, positions, strict=True)
                all_logprobs.append([[{token: logprobs[token], **logprobs}] for token, logprobs in pairs])
            answer["logprobs"] = all_logprobs  # each position begins with the sampled token
        if request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [_map_token_logprobs(position) for position in result.prompt_logprobs or ()]
        return answer


def _map_token_logprobs(position: Mapping[int, Any] | None) -> dict[int, float]:
    """Return ``{token id: log-prob}`` of the tokens that vLLM lists at one position; {} for None.

    Minus infinity, which JSON does not have, becomes the lowest finite log-prob.
    """
    return {token: max(entry.logprob, LOWEST_LOGPROB) for token, entry in (position or {}).items()}


def read_request(body: Mapping[str, Any], longest: int, sampling: Mapping[str, Any]) -> CompletionRequest:
    """Convert the JSON body of a request to ``/generate`` to vLLM's ``CompletionRequest``.

    Args:
        body: the prompt and vLLM's sampling parameters. A ``max_tokens`` above the remaining room is lowered.
        longest: most tokens of a prompt with its completion.
        sampling: defaults of missing parameters.

    Raises:
        ConfigError: if a parameter is unknown or not allowed, a value is wrong, or the prompt leaves no room.
    """
    parameters = dict(body)
    prompt = parameters.pop("prompt", None)
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        fix = 'send "prompt": {"prompt_token_ids": [1, 2, 3]}'
        raise config_error(GENERATE_PATH, "the prompt must be a list of token ids", fix)
    if len(ids) >= longest:
        fix = f"send at most {longest - 1} tokens, or raise max_prompt_length in the recipe"
        raise config_error(GENERATE_PATH, f"the prompt has {len(ids)} tokens and leaves no room for a completion", fix)
    if parameters.get("stream") is False:
        del parameters["stream"]
    known = set(CompletionRequest.model_fields) - {"prompt", *_NOT_ALLOWED}
    if unknown := [name for name in parameters if name not in known]:
        raise config_error(
            GENERATE_PATH, f"unknown parameter '{unknown[0]}'", f"use some of {', '.join(sorted(known))}"
        )
    limit = parameters.get("max_tokens", CompletionRequest.model_fields["max_tokens"].default)
    values = {**_NEUTRAL, **sampling, **{name: value for name, value in parameters.items() if value is not None}}
    room = longest - len(ids)
    values["max_tokens"] = room if limit is None else min(limit, room) if isinstance(limit, int) else limit
    try:
        return CompletionRequest(prompt=ids, stream=False, **values)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise config_error(GENERATE_PATH, problem, "correct the value") from error


@router.post(GENERATE_PATH, dependencies=[Depends(validate_json_request)])
@with_cancellation
@load_aware_call
async def generate(body: dict[str, Any], raw_request: Request) -> JSONResponse:
    """Sample completions of one prompt with the trained weights: the adapter if the server has one, else the model.

    A wrong request is answered with status 400 and the problem.
    """
    serving = copy.copy(raw_request.app.state.openai_serving_completion)
    serving.__class__ = _ServingGroups
    try:
        sampling = json.loads(os.environ.get(SAMPLING_VARIABLE, "{}"))
        request = read_request(body, serving.model_config.max_model_len, sampling)
    except ConfigError as error:
        return JSONResponse({"error": str(error)}, 400)
    request.model = next(iter(serving.models.lora_requests), None)
    answer = await serving.create_completion(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return JSONResponse(answer)
