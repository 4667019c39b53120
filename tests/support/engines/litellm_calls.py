"""Calls of LiteLLM's SDK with kvsight's callback. Runs in LiteLLM's environment: `python -m ... JSON`, prints JSON.

The object has `kvsight`, `model_list` and either `waves` of chats, which a router answers one after the other, or
`filters`: arguments for the callback, of which the ids of the deployments that stay are printed.
"""

import asyncio
import json
import sys
from typing import Any

import litellm
from litellm import Router

from kvsight.routers.litellm import KvsightCallback


async def _chats(given: dict[str, Any]) -> list[int]:
    """Tokens that the engines reused. Raises the error of a request."""
    router, reused = Router(model_list=given["model_list"], num_retries=2), []
    for messages in given["waves"]:
        answer = await router.acompletion("chat", messages=messages)
        reused.append(answer.usage.prompt_tokens_details.cached_tokens)
        stream = await router.acompletion("chat", messages=messages, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream if part.choices]) == "yes"
    return reused


async def _filters(given: dict[str, Any], callback: KvsightCallback) -> list[list[str]]:
    kept = []
    for arguments in given["filters"]:
        found = await callback.async_filter_deployments("chat", **arguments)
        kept.append([each["model_info"]["id"] for each in found])
    return kept


async def _main(given: dict[str, Any]) -> None:
    callback = KvsightCallback(given["kvsight"], deadline_s=2.0)
    litellm.callbacks = [callback]
    print(json.dumps(await (_chats(given) if "waves" in given else _filters(given, callback))))
    await asyncio.sleep(0)  # lets LiteLLM begin what it does after the answer
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait([task], timeout=1)


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
