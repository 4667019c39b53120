"""The tokens of 200 requests are those from which a real vLLM generated. `make engines ARGS=chats` records them."""

from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from api.prompts.renderer import PromptRenderer
from api.settings import ApiSettings
from tests.engines.chat_model import trained_tokenizer
from tests.engines.recording import AskedText, read
from tests.support.engines.recorded_engine import recorded_engine

RECORDING = Path(__file__).parents[2] / "data" / "engines" / "server-chats.rec"


@pytest.fixture(scope="module")
def asked() -> list[AskedText]:
    return [step for step in read(RECORDING)[1] if isinstance(step, AskedText)]


async def test_the_tokens_of_every_request_are_the_engines(asked: list[AskedText]) -> None:
    num_compared = num_media = 0
    async with recorded_engine(asked) as url:
        renderer = PromptRenderer(ApiSettings(tokenize_url=url, tokenize_timeout_s=20))
        async with aclosing(renderer):
            for step in asked:
                found = await renderer.render(msgspec.json.decode(step.body))
                assert not found.degraded
                assert len(found.token_ids) == step.num_tokens
                if step.tokens is not None:
                    assert found.token_ids.tolist() == step.tokens
                    num_compared += 1
                num_media += len(found.media)
    assert len(asked) == 200
    assert num_compared > 100
    assert num_media > 50


def test_there_are_all_kinds(asked: list[AskedText]) -> None:
    text = b"\n".join(step.body for step in asked)
    for part in (b'"tool_calls"', b'"tool_use"', b'"uuid"', b'"source"', b'"system"', b'"input"', b'"cache_salt"'):
        assert text.count(part) >= 3, part
    assert sum(step.reused > 0 for step in asked) > 50


async def test_a_tokenizer_in_this_process_makes_the_same_tokens_of_plain_text(
    asked: list[AskedText], tmp_path: Path
) -> None:
    trained_tokenizer().save(str(tmp_path / "tokenizer.json"))
    renderer = PromptRenderer(ApiSettings(tokenizer_file=tmp_path / "tokenizer.json", tokenize_timeout_s=20))
    bodies = [(msgspec.json.decode(step.body), step.tokens) for step in asked]
    plain = [(body, tokens) for body, tokens in bodies if isinstance(body.get("prompt"), str)]
    assert len(plain) > 5
    for body, tokens in plain:
        assert (await renderer.render(body)).token_ids.tolist() == tokens
