"""How large a worker stream's pages are: told beforehand, or learned from what its engine stores."""

from __future__ import annotations

_MOST_REFUSED = 64


class PageSize:
    """Only device pages say it for sure: a store behind the engine may cut its pages in its own way."""

    def __init__(self, told: int | None) -> None:
        self.tokens = told
        """None: not known yet."""
        self.doubt = ""
        """Not empty while stores came, and none of this size: names both sizes."""
        self._is_told = self._is_sure = told is not None
        self._has_fitted = False
        self._refused = 0  # device stores since the last one that fitted

    def is_news(self, size: int, num_stores: int, *, is_on_device: bool) -> bool:
        """Whether stores prove that pages are of another size than was thought; `learn` it then. Device stores do, if
        the size was not sure, or if by now none fits any more.
        """
        if self._is_told or size == self.tokens:
            return False
        self._refused += num_stores * is_on_device
        return self.tokens is None or (is_on_device and (not self._is_sure or self._refused > _MOST_REFUSED))

    def learn(self, size: int) -> None:
        """Pages are of this size."""
        self.tokens = size
        self.forget_proof()

    def forget_proof(self) -> None:
        """It may be another engine by now."""
        self._is_sure, self._has_fitted, self._refused, self.doubt = self._is_told, False, 0, ""

    def admits(self, size: int, *, is_on_device: bool) -> bool:
        """Whether pages are of this size."""
        if size == self.tokens:
            self._is_sure = self._is_sure or is_on_device
            self._has_fitted, self._refused, self.doubt = True, 0, ""
            return True
        if self._is_told and not self._has_fitted:
            self.doubt = f"block size {size}, registered with {self.tokens}"
        return False
