"""From tokens to text: streaming pieces, stop strings that never leak, and where a text ends. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """Turns ids into text piece by piece and never gives half a character (see tokenizer)."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class TextOutput:
    """The text of one request as it grows.

    stream: ids -> text
    stop:   strings that end the text; the earliest match counts, and it is not part of the text
    """

    def __init__(self, stream: TokenStream, stop: Sequence[str] = ()):
        self._stream = stream
        self._stop = tuple(stop)
        self.text = ""
        self.stopped_by: str | None = None
        self._handed_out = 0
        self._final = False

    def push(self, token: int) -> bool:
        """Takes one more token; True when a stop string is now complete (the text is cut before it)."""
        return self._append(self._stream.push(token))

    def end(self) -> None:
        """No more tokens will come: what was held back becomes part of the text."""
        if self.stopped_by is None:
            self._append(self._stream.flush())
        self._final = True

    def take(self) -> str:
        """The text since the last call that is certain to stay."""
        sure = len(self.text) if self._final or self.stopped_by is not None else len(self.text) - self._held()
        piece = self.text[self._handed_out : sure]
        self._handed_out = max(self._handed_out, sure)
        return piece

    def _append(self, piece: str) -> bool:
        searched = len(self.text)
        self.text += piece
        found = [
            (at, stop) for stop in self._stop if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        at, self.stopped_by = min(found)
        self.text = self.text[:at]
        return True

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string could start with."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
