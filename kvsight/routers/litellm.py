"""LiteLLM: a callback of its router that sends each request to the deployment with most of the prompt in its cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import litellm
from litellm.integrations.custom_logger import CustomLogger

from kv_events.runtime.outages import RateLimitedLogger
from kvsight.routers.placement import DEADLINE_S, Placement

_KEY = "kvsight"  # of our note in a request's metadata
_OF_CHATS = ("cache_salt", "chat_template_kwargs", "documents", "reasoning_effort", "tool_choice", "tools")
_OF_OTHERS = ("input", "instructions", "system", "thinking")  # of responses, and of Anthropic's messages
_Deployment = Mapping[str, Any]
_warnings = RateLimitedLogger(logging.getLogger(__name__), "LiteLLM chooses the deployment")


class KvsightCallback(CustomLogger):
    """Narrows the healthy deployments to the one that kvsight chooses, and books the request there.

    A deployment is a worker if its `api_base` is the worker's endpoint, up to `/v1` at its end. Without an answer
    within the deadline, all deployments stay, and LiteLLM chooses.
    """

    def __init__(self, url: str | None = None, token: str | None = None, deadline_s: float = DEADLINE_S) -> None:
        """url, token: of the service. None: those of KVSIGHT_URL and KVSIGHT_API_TOKEN."""
        super().__init__()
        self._url, self._token, self._deadline_s = url, token, deadline_s
        self._placements: WeakKeyDictionary[asyncio.AbstractEventLoop, Placement] = WeakKeyDictionary()

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: Any,
        messages: Any,
        request_kwargs: Any = None,
        parent_otel_span: Any = None,
    ) -> Any:
        """Return the deployments of the worker that kvsight chooses, else all. A hook of LiteLLM. Never raises."""
        try:
            return await self._chosen(healthy_deployments, messages, {} if request_kwargs is None else request_kwargs)
        except Exception as error:  # noqa: BLE001  (LiteLLM would fail the request)
            _warnings.warning("%r", error, error=error)
            return healthy_deployments

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: AsyncIterator[Any], request_data: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        """Note the first chunk of a stream, and its end. A hook of the proxy."""
        note: dict[str, Any] | None = None
        try:
            async for chunk in response:
                if note is None and (note := _noted(request_data)) is not None:
                    self._placement().complete(note["selection_id"])
                yield chunk
        finally:
            self._release(note)  # also after a caller that went away, of whom LiteLLM logs nothing

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Release the reservation of a request. A hook of LiteLLM."""
        self._release(_note_of_attempt(kwargs))

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Release the reservation, and leave the worker out for some seconds if it failed. A hook of LiteLLM."""
        note = _note_of_attempt(kwargs)
        if note is not None and getattr(kwargs.get("exception"), "status_code", 500) >= 500:
            self._placement().leave_out(note["worker"])
        self._release(note)

    async def _chosen(self, deployments: list[_Deployment], messages: Any, request: Any) -> list[_Deployment]:
        placement, candidates = self._placement(), _candidates(deployments, request)
        metadata = request.setdefault("litellm_metadata" if "litellm_metadata" in request else "metadata", {})
        before = metadata.get(_KEY)  # an attempt that has failed
        self._release(before)
        workers = await placement.by_worker(candidates, lambda each: each["litellm_params"].get("api_base") or "")
        if not workers:
            return deployments
        tried = [*before["tried"], before["worker"]] if before else []
        rest = [worker for worker in workers if worker not in tried] or list(workers)
        placed = await placement.place(_body(next(iter(workers.values()))[0], messages, request), rest)
        if placed is None:
            return deployments
        chosen = workers[placed.worker]
        note = {"worker": placed.worker, "selection_id": placed.selection_id, "tried": tried}
        metadata[_KEY] = note | {"deployments": [_id(each) for each in chosen]}
        return chosen

    def _placement(self) -> Placement:
        """Return the placement of the running loop: the SDK may be used in several, one after the other."""
        loop = asyncio.get_running_loop()
        if loop not in self._placements:
            self._placements[loop] = Placement(self._url, token=self._token, deadline_s=self._deadline_s)
        return self._placements[loop]

    def _release(self, note: dict[str, Any] | None) -> None:
        if note is not None and not note.get("released"):
            note["released"] = True
            self._placement().release(note["selection_id"])


def _candidates(deployments: list[_Deployment], request: Mapping[str, Any]) -> list[_Deployment]:
    """Return the deployments that LiteLLM's later filters let pass. Empty: they cannot be foreseen."""
    skipped = {*request.get("_excluded_deployment_ids", ()), *request.get("_retry_skipped_deployment_ids", ())}
    found = [each for each in deployments if _id(each) not in skipped]
    if "_target_order" in request or any(each["litellm_params"].get("tags") for each in found):
        return []
    orders = [each["litellm_params"].get("order") for each in found]
    first = min((order for order in orders if order is not None), default=None)
    return [each for each, order in zip(found, orders, strict=True) if order == first]


def _body(deployment: _Deployment, messages: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine gets, as far as its prompt depends on it."""
    params = deployment["litellm_params"]
    model = litellm.get_llm_provider(params["model"], params.get("custom_llm_provider"), params.get("api_base"))[0]
    given = {**params, **params.get("extra_body", {}), **request, **request.get("extra_body", {})}
    body = {name: given[name] for name in _OF_CHATS + _OF_OTHERS if given.get(name) is not None} | {"model": model}
    if (request.get("proxy_server_request") or {}).get("url", "").endswith("/v1/completions"):
        return body | {"prompt": messages[0]["content"]}  # the prompt of a completion is shown as a message
    return body | ({"messages": messages} if messages else {})


def _id(deployment: _Deployment) -> Any:
    return (deployment.get("model_info") or {}).get("id")


def _noted(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what `async_filter_deployments` noted about a request."""
    found = ((request.get(name) or {}).get(_KEY) for name in ("metadata", "litellm_metadata"))
    return next((note for note in found if note), None)


def _note_of_attempt(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the note about a request if it is about this attempt: the next one may have begun already."""
    note = _noted(params := event.get("litellm_params") or {})
    return note if note is not None and _id(params) in note["deployments"] else None


callback = KvsightCallback()
"""For the proxy's `litellm_settings.callbacks`."""
