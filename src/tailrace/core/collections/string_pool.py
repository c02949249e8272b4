"""Short texts (members, reasons, errors) under small numbers, for as long as messages refer to them."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class StringPool:
    """Texts by number. A new text gets the lowest free number; 0 is the empty text. Uses count messages."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self._numbers: dict[str, int] = {}
        self._texts: dict[int, tuple[str, int]] = {}
        self._free: list[int] = []

    def use(self, text: str, times: int) -> int:
        """Add uses of a text; return its number."""
        if not text:
            return 0
        number = self._numbers.get(text)
        if number is None:
            number = heappop(self._free) if self._free else len(self._texts) + 1
            self._numbers[text] = number
            self._texts[number] = (text, times)
        else:
            self._texts[number] = (text, self._texts[number][1] + times)
        return number

    def drop(self, number: int, times: int) -> None:
        """Remove uses of a text; without a use the text is forgotten and its number free."""
        if not number:
            return
        text, uses = self._texts[number]
        if uses > times:
            self._texts[number] = (text, uses - times)
        else:
            assert uses == times, f"{text!r} is used {uses} times, not {times}"
            del self._texts[number], self._numbers[text]
            heappush(self._free, number)

    def __getitem__(self, number: int) -> str:
        return self._texts[number][0] if number else ""

    def rows(self) -> list[tuple[int, str, int]]:
        """Number, text and uses of each text, for a snapshot."""
        return [(number, *self._texts[number]) for number in sorted(self._texts)]

    def fill(self, rows: list[tuple[int, str, int]]) -> None:
        """Restore the pool from `rows`."""
        self._texts = {number: (text, uses) for number, text, uses in rows}
        self._numbers = {text: number for number, text, _ in rows}
        self._free = sorted(set(range(1, max(self._texts, default=0))) - self._texts.keys())
        heapify(self._free)
