"""`kvsight query --show-hashes` compared with the events that SGLang's released recorder makes of a page."""

from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from kvsight.cli.query import hashes_of
from tests.support.engines.released_modules import forget_engine_modules, sglang_recorder

TOKENS = list(range(1, 13))


@pytest.fixture(scope="module")
def recorder() -> Iterator[Any]:
    yield sglang_recorder(native_hash)
    forget_engine_modules()


def native_hash(key: Any, prior: bytes | None, page_size: int) -> list[str]:
    """What SGLang computes in C++."""
    digest, hashes = prior or b"", []
    for start in range(0, len(key), page_size):
        page = b"".join(token.to_bytes(4, "little") for token in key.token_ids[start : start + page_size])
        digest = sha256(digest + page).digest()
        hashes.append(digest.hex())
    return hashes


class Key(SimpleNamespace):
    token_ids: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)


@pytest.mark.parametrize("form", ["sglang", "sglang_dynamo"])
@pytest.mark.parametrize("salt", [None, "salt", "sältchen"])
@pytest.mark.parametrize("extra_key", [None, "0123456789abcdef0123456789abcdef"])
def test_the_command_prints_what_sglang_publishes(
    recorder: Any, form: str, salt: str | None, extra_key: str | None
) -> None:
    names = recorder.KvEventLoraNames()
    names.register(SimpleNamespace(lora_id=extra_key, extra_key=extra_key), "adapter")
    events = recorder.KVCacheEventRecorder(
        enabled=True, page_size=4, dynamo_format=form == "sglang_dynamo", lora_names=names
    )
    root = SimpleNamespace(key=Key(token_ids=[]), parent=None, hash_value=[], event_hash_value=[])
    key = Key(token_ids=TOKENS, extra_key=extra_key, cache_salt=salt, is_bigram=False)
    events.record_store(SimpleNamespace(key=key, parent=root, hash_value=None, event_hash_value=None))
    published = [name for event in events.take() for name in event.block_hashes]
    assert hashes_of(TOKENS, 4, 1337, extra_key, salt)[form] == published
