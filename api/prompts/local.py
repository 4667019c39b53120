"""A tokenizer in this process, for prompts that are plain text. Needs the extra `tokenizers`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from api.http_pool import NoAnswerError
from api.prompts.bodies import Rendered
from kv_events.errors import InvalidValueError
from kv_events.runtime.variables import variable


class LocalTokenizer:
    """The tokenizer of a `tokenizer.json`. Chat templates need an engine."""

    def __init__(self, file: Path, num_threads: int) -> None:
        """Raises InvalidValueError if the file cannot be read, or the package is missing."""
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  (the package raises nothing more specific)
            expected = f"a tokenizer.json, and the extra kvsight[tokenizers]: {error}"
            raise InvalidValueError(variable("tokenizer_file"), str(file), expected) from None
        self._tokenizer.no_truncation()  # an engine refuses what is too long
        self._tokenizer.no_padding()
        self._threads = ThreadPoolExecutor(num_threads, "tokenizer")

    def text_of(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    async def render(self, text: str, *, is_special: bool) -> Rendered:
        """Return the tokens of a text. is_special: with those that the tokenizer puts around a text.

        Raises NoAnswerError if the tokenizer has none for a part of it.
        """
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=is_special)  # `encode` holds the GIL
        try:
            (found,) = await asyncio.get_running_loop().run_in_executor(self._threads, encode, [text])
        except Exception as error:  # noqa: BLE001  (see above)
            raise NoAnswerError(str(error)) from None
        return Rendered(np.array(found.ids, np.uint32))
