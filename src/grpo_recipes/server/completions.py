"""The endpoint of the run's server that the trainer samples by: the request of ``/v1/completions``, answered in arrays.

Everything but the answer is vLLM's own: how a request is read and validated, adapters, priorities, seeds, errors, and
that a request whose client has gone is aborted. No text is made of the tokens.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from grpo_recipes.recipe.extensions import parts
from grpo_recipes.server.wire import COMPLETIONS_PATH, completions_of, packed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

router = APIRouter()


class AnswerInArrays:
    """Add our endpoints, this one and ``/generate``, when vLLM's application starts: earlier there is none."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] == "lifespan":
            for endpoints in (router, *parts("server_routes")):
                scope["app"].include_router(endpoints)
        await self._app(scope, receive, send)


class TokensRequest(CompletionRequest):
    """A request for tokens alone."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        """Return vLLM's; a text is made only where texts end a completion, since they are looked for in it."""
        parameters = super().to_sampling_params(*args, **kwargs)
        parameters.detokenize, parameters.flat_logprobs = bool(parameters.stop), True
        return parameters


class _ServingTokens(OpenAIServingCompletion):
    def request_output_to_completion_response(  # type: ignore[override]
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, request_id: str, *_: Any
    ) -> bytes:
        """Return the completions, prompt by prompt; of each token the log-prob that comes first, which is its own."""
        every = [output for result in final_res_batch for output in result.outputs]
        for output in every:
            self._raise_if_error(output.finish_reason, request_id)
        scored = None
        if request.logprobs is not None:
            flat = [output.logprobs for output in every]
            scored = [[one.logprobs[begin] for begin in one.start_indices] for one in flat]  # type: ignore[union-attr]
        return packed(completions_of([output.token_ids for output in every], scored))


@router.post(COMPLETIONS_PATH, dependencies=[Depends(validate_json_request)])
@with_cancellation
@load_aware_call
async def complete(request: TokensRequest, raw_request: Request) -> Response:
    """Answer as ``/v1/completions`` does, in arrays."""
    serving = copy.copy(raw_request.app.state.openai_serving_completion)
    serving.__class__ = _ServingTokens
    request.stream = False
    answer = await serving.create_completion(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer, media_type="application/octet-stream")
