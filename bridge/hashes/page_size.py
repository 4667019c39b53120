"""The block size of a worker stream: registered, or learned from the engine's stores."""

from __future__ import annotations

_MAX_REFUSED = 64


class PageSize:
    """Decides which stores have the stream's block size.

    Only stores on the device prove it. Storage behind the engine may cut pages in its own way.
    """

    def __init__(self, registered: int | None) -> None:
        self.tokens = registered
        """Tokens a page; None until the first store."""
        self.mismatch = ""
        """Names both sizes while stores arrive and none has the registered size; else empty."""
        self.is_registered = self._is_proved = registered is not None
        self._has_matched = False
        self._refused = 0  # device stores since the last one that matched

    def is_changed_by(self, size: int, num_stores: int, *, is_on_device: bool) -> bool:
        """Whether stores of another size prove that the assumed size is wrong. If so, call `learn`.

        Device stores do if no device store proved the assumed size, or if none has matched it for long.
        """
        if self.is_registered or size == self.tokens:
            return False
        self._refused += num_stores * is_on_device
        return self.tokens is None or (is_on_device and (not self._is_proved or self._refused > _MAX_REFUSED))

    def learn(self, size: int) -> None:
        """Assume this size."""
        self.tokens = size
        self.forget_proof()

    def forget_proof(self) -> None:
        """Keep the size as an assumption only, because the engine may have been replaced."""
        self._is_proved, self._has_matched, self._refused, self.mismatch = self.is_registered, False, 0, ""

    def admits(self, size: int, *, is_on_device: bool) -> bool:
        """Whether a store has the stream's size."""
        if size == self.tokens:
            self._is_proved = self._is_proved or is_on_device
            self._has_matched, self._refused, self.mismatch = True, 0, ""
            return True
        if self.is_registered and not self._has_matched:
            self.mismatch = f"block size {size}, registered with {self.tokens}"
        return False
