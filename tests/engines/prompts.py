"""Random prompts that share prefixes, so that engines hit parts of them and evict others."""

import random

_REMEMBERED = 30
_VOCABULARY = range(3, 1000)
_MAX_WORD = 120


class Prompts:
    """Draws prompts. Equal seeds give equal prompts.

    A prompt is made of words: three tokens, repeated. Prompts differ as others do, and recordings stay small.
    """

    def __init__(self, rng: random.Random, max_tokens: int) -> None:
        self._rng = rng
        self._max_tokens = max_tokens
        self._earlier: list[list[int]] = [self._words(4)]

    def draw(self) -> list[int]:
        """Return a new prompt, an earlier one, a part of one, or one that goes on differently."""
        rng, choice = self._rng, self._rng.random()
        earlier = self._earlier[-1 - min(int(rng.expovariate(0.12)), len(self._earlier) - 1)]
        if choice < 0.12:
            prompt = self._words(rng.randint(1, 12))
        elif choice < 0.25:
            prompt = earlier
        elif choice < 0.4:
            prompt = earlier[: rng.randint(1, len(earlier))]
        else:
            prompt = self.continued(earlier[: rng.randint(len(earlier) // 3, len(earlier))])
        prompt = prompt[: self._max_tokens]
        if rng.random() < 0.5:  # full blocks: the engine computes the last one again, into a copy
            prompt = prompt[: max(32, len(prompt) // 32 * 32)]
        self.remember(prompt)
        return prompt

    def continued(self, prompt: list[int]) -> list[int]:
        """Return a prompt that begins like another one."""
        return (prompt + self._words(self._rng.randint(1, 6)))[: self._max_tokens]

    def remember(self, prompt: list[int]) -> None:
        """Let later prompts begin like this one."""
        self._earlier = [*self._earlier[1 - _REMEMBERED :], prompt]

    def _words(self, count: int) -> list[int]:
        rng = self._rng
        words = [rng.sample(_VOCABULARY, 3) * _MAX_WORD for _ in range(count)]
        return [token for word in words for token in word[: rng.randint(5, _MAX_WORD)]]
