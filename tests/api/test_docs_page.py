"""The documentation page, as a browser without a token and without other servers gets it."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from typing import Any
from urllib.parse import urljoin

import pytest
from httpx import AsyncClient


@pytest.mark.parametrize("settings", [{}, {"api_token": "s3cret"}])
async def test_the_page_needs_no_token_and_no_other_server(settings: dict[str, Any], serving: Any) -> None:
    async with serving(**settings) as (client, _):
        page = await client.get("/docs")
        named = re.findall(r"""(?:src|href)="([^"]+)"|url: '([^']+)'""", page.text)
        addresses = ["".join(each) for each in named]
        assert len(addresses) == 4, page.text
        for address in addresses:
            assert "://" not in address
            found = await client.get(urljoin("/docs", address))
            assert (found.status_code, len(found.content) > 1000) == (200, True), address


async def test_the_page_permits_no_other_script(client: AsyncClient) -> None:
    page = await client.get("/docs")
    policy = dict(each.split(" ", 1) for each in page.headers["content-security-policy"].split("; "))
    scripts = re.findall("<script>(.*?)</script>", page.text, re.DOTALL)
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy["script-src"].split() == ["'self'", *(f"'sha256-{digest}'" for digest in digests)]
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"


async def test_the_page_works_behind_a_prefix(client: AsyncClient) -> None:
    page = (await client.get("/docs")).text
    assert not re.findall(r"""(?:src|href)="/|url: '/""", page)


async def test_the_document_asks_for_the_token_where_one_is_needed(serving: Any) -> None:
    async with serving(api_token="s3cret") as (client, _):
        document = (await client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            if "get" in operations and "{" not in path and path != "/events":
                is_open = operations["get"].get("security", document["security"]) == []
                assert ((await client.get(path)).status_code != 401) == is_open, path
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"token": []}]


async def test_the_document_asks_for_no_token_where_none_is_needed(client: AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert "security" not in document
    assert "securitySchemes" not in document["components"]
