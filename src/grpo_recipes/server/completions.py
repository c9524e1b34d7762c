"""The server's endpoint for the trainer's sampling: requests as for ``/v1/completions``, answers as arrays.

Everything except the answer is vLLM's own: parsing and validation, adapters, priorities, seeds, errors, and the end of
requests after their client has disconnected. Tokens are not converted to text.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
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
from grpo_recipes.server import replicas
from grpo_recipes.server.wire import COMPLETIONS_PATH, flatten_completions, pack_completions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

router = APIRouter()


@dataclass(eq=False)
class AddServerEndpoints:
    """Middleware that adds endpoints of the core and of extensions, and seeds replicas, when vLLM starts."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the endpoints and seed replicas at the application's startup event; pass every request on."""
        if scope["type"] == "lifespan":
            for endpoints in (router, replicas.router, *parts("server_routes")):
                scope["app"].include_router(endpoints)
            await replicas.seed_replicas(scope["app"])
        await self.app(scope, receive, send)


class TokensRequest(CompletionRequest):
    """A request for tokens without text."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        """Return vLLM's parameters; tokens are decoded only if stop strings must be found in the text."""
        parameters = super().to_sampling_params(*args, **kwargs)
        parameters.detokenize, parameters.flat_logprobs = bool(parameters.stop), True
        return parameters


class _ServingTokens(OpenAIServingCompletion):
    """vLLM's completion handler. It answers with token ids and log-probs as arrays instead of text."""

    def request_output_to_completion_response(  # type: ignore[override]
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, request_id: str, *_: Any
    ) -> bytes:
        """Return the completions of all prompts as bytes, with the log-prob of each sampled token."""
        outputs = [output for result in final_res_batch for output in result.outputs]
        for output in outputs:
            self._raise_if_error(output.finish_reason, request_id)
        logprobs_BT = None  # the first log-prob of each position belongs to the sampled token
        if request.logprobs is not None:
            flat: list[Any] = [output.logprobs for output in outputs]
            logprobs_BT = [[row.logprobs[start] for start in row.start_indices] for row in flat]
        return pack_completions(flatten_completions([output.token_ids for output in outputs], logprobs_BT))


@router.post(COMPLETIONS_PATH, dependencies=[Depends(validate_json_request)])
@with_cancellation
@load_aware_call
async def complete(request: TokensRequest, raw_request: Request) -> Response:
    """Answer a sampling request like ``/v1/completions``, but with arrays (``wire``) instead of text; no streaming.

    Errors are JSON, as in vLLM.
    """
    serving = copy.copy(raw_request.app.state.openai_serving_completion)
    serving.__class__ = _ServingTokens
    request.stream = False
    answer = await serving.create_completion(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer, media_type="application/octet-stream")
