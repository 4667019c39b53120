"""Random bodies of OpenAI's and Anthropic's clients: conversations that go on, with tools and images."""

import base64
import random
import struct
import zlib
from typing import Any, NamedTuple

from tests.engines.chat_model import WORDS

_STRANGE = ["café", "naïve", "日本", "🙂", "x=1;", "\n\n", "  ", "<|im_end|>", "'quoted'", "Zürich"]
_MOST_TURNS = 9
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


class Chat(NamedTuple):
    """A request."""

    path: str
    """The engine's route."""
    body: dict[str, Any]


class Chats:
    """Draws requests. Equal seeds give equal requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._openai: list[dict[str, Any]] = []
        self._anthropic: list[dict[str, Any]] = []
        self._texts = [self._text(60)]

    def draw(self) -> Chat:
        """Return a new request, or the next turn of an earlier one."""
        rng, fields = self._rng, {"model": "tiny", "temperature": 0}
        match rng.choices(["openai", "anthropic", "completion", "tokens", "responses"], [120, 50, 20, 5, 15])[0]:
            case "openai":
                body = self._next(self._openai, self._new_openai)
                self._turn_of_openai(body["messages"], has_tools="tools" in body)
                if rng.random() < 0.15:
                    fields["chat_template_kwargs"] = {"enable_thinking": True}
                if rng.random() < 0.1 and body["messages"][-1]["role"] == "assistant":
                    fields |= {"add_generation_prompt": False, "continue_final_message": True}
                return Chat("/v1/chat/completions", {**body, **fields, "max_tokens": 1})
            case "anthropic":
                body = self._next(self._anthropic, self._new_anthropic)
                self._turn_of_anthropic(body["messages"], has_tools="tools" in body)
                return Chat("/v1/messages", {**body, **fields, "max_tokens": 1})
            case "responses":
                text = self._next_text()
                said: Any = text if rng.random() < 0.5 else [{"role": "user", "content": text}]
                return Chat("/v1/responses", {**fields, "input": said, "max_output_tokens": 16, "store": False})
            case "tokens":
                return Chat("/v1/completions", {**fields, "prompt": rng.choices(range(8, 500), k=90), "max_tokens": 1})
        return Chat("/v1/completions", {**fields, "prompt": self._next_text(), "max_tokens": 1})

    def _next(self, kept: list[dict[str, Any]], new: Any) -> dict[str, Any]:
        """Return a conversation of which nothing changes when it goes on."""
        if not kept or self._rng.random() < 0.25:
            kept.append(new())
        number = self._rng.randrange(max(0, len(kept) - 4), len(kept))
        if len(kept[number]["messages"]) > _MOST_TURNS:
            kept[number] = new()
        kept[number] = {**kept[number], "messages": list(kept[number]["messages"])}
        return kept[number]

    def _new_openai(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": []}
        if self._rng.random() < 0.6:
            body["messages"].append({"role": "system", "content": self._text(40)})
        if self._rng.random() < 0.4:
            body["tools"] = [{"type": "function", "function": tool} for tool in self._tools("parameters")]
        if self._rng.random() < 0.15:
            body["cache_salt"] = self._rng.choice(["blue", "green"])
        return body

    def _new_anthropic(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": []}
        if self._rng.random() < 0.6:
            text = self._text(40)
            body["system"] = text if self._rng.random() < 0.5 else [{"type": "text", "text": text}]
        if self._rng.random() < 0.4:
            body["tools"] = self._tools("input_schema")
        return body

    def _tools(self, schema: str) -> list[dict[str, Any]]:
        count = self._rng.randint(1, 3)
        return [{"name": f"f{number}", "description": self._text(6), schema: _SCHEMA} for number in range(count)]

    def _turn_of_openai(self, messages: list[dict[str, Any]], *, has_tools: bool) -> None:
        rng = self._rng
        if messages and messages[-1]["role"] == "user":
            call: dict[str, Any] = {"id": f"c{len(messages)}", "type": "function"}
            if has_tools and rng.random() < 0.7:
                call["function"] = {"name": "f0", "arguments": f'{{"city": "{rng.choice(WORDS)}"}}'}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._text(8)})
            else:
                messages.append({"role": "assistant", "content": self._text(20)})
        if rng.random() < 0.9 or not messages:
            messages.append({"role": "user", "content": self._content("image_url")})

    def _turn_of_anthropic(self, messages: list[dict[str, Any]], *, has_tools: bool) -> None:
        rng = self._rng
        if messages:
            use = {"type": "tool_use", "id": f"c{len(messages)}", "name": "f0", "input": {"city": rng.choice(WORDS)}}
            if has_tools and rng.random() < 0.7:
                result = {"type": "tool_result", "tool_use_id": use["id"], "content": self._text(8)}
                messages.append({"role": "assistant", "content": [{"type": "text", "text": self._text(5)}, use]})
                messages.append({"role": "user", "content": [result]})
            messages.append({"role": "assistant", "content": self._text(20)})
        messages.append({"role": "user", "content": self._content("image")})

    def _content(self, image: str) -> Any:
        """Return a text, or parts with an image. image: type of its part."""
        rng, text = self._rng, self._text(self._rng.choice([5, 20, 20, 90]))
        if rng.random() < 0.65:
            return text
        part: dict[str, Any] = {"type": "text", "text": text}
        if rng.random() < 0.2:
            return [{**part, "cache_control": {"type": "ephemeral"}} if image == "image" else part]
        data = base64.b64encode(png(rng.randrange(4), 56 * rng.randint(1, 3))).decode()
        if image == "image":
            shown: dict[str, Any] = {"source": {"type": "base64", "media_type": "image/png", "data": data}}
        else:
            shown = {"image_url": {"url": f"data:image/png;base64,{data}"}}
            if rng.random() < 0.3:
                shown["uuid"] = f"picture-{zlib.crc32(data.encode())}"
        return [part, {"type": image, **shown}, {"type": "text", "text": self._text(12)}]

    def _next_text(self) -> str:
        self._texts.append(f"{self._rng.choice(self._texts[-5:])[:2500]} {self._text(20)}")
        return self._texts[-1]

    def _text(self, most: int) -> str:
        rng = self._rng
        words = [rng.choice(_STRANGE if rng.random() < 0.1 else WORDS) for _ in range(rng.randint(1, most))]
        return " ".join(words)


def png(colour: int, width: int) -> bytes:
    """Return a picture of one colour, 56 pixels high."""
    rows = b"".join(b"\0" + bytes([60 * colour, 99, 255]) * width for _ in range(56))
    head = struct.pack(">2I5B", width, 56, 8, 2, 0, 0, 0)
    chunks = (b"IHDR" + head, b"IDAT" + zlib.compress(rows), b"IEND")
    packed = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
