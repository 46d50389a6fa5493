"""Text as it grows: stop strings never leak, streamed pieces join to the whole, whatever the pieces are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.output import TextOutput


class Pieces:
    """A token stream whose i-th token is the i-th piece; the last piece is held until the flush."""

    def __init__(self, pieces: list[str], tail: str = ""):
        self._pieces, self._tail = pieces, tail

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return self._tail


def run(pieces: list[str], stop: list[str], tail: str = "") -> tuple[TextOutput, str, int]:
    """(output, what was streamed, tokens used)."""
    out, streamed, used = TextOutput(Pieces(pieces, tail), stop), "", 0
    for token in range(len(pieces)):
        used += 1
        stopped = out.push(token)
        streamed += out.take()
        if stopped:
            break
    out.end()
    return out, streamed + out.take(), used


letters = st.text("abé", max_size=3)


@given(st.lists(letters, max_size=12), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), letters)
def test_f35_text_is_cut_before_the_earliest_stop(pieces, stop, tail):
    out, streamed, used = run(pieces, stop, tail)
    seen = "".join(pieces[:used]) + (tail if out.stopped_by is None or used == len(pieces) else "")
    found = sorted((seen.find(s), s) for s in stop if s in seen)
    if out.stopped_by is None:
        assert not found and out.text == seen and used == len(pieces)
    else:
        at = out.text + out.stopped_by
        assert seen.startswith(at) and not any(s in out.text for s in stop)
        assert not any(s in "".join(pieces[: used - 1]) for s in stop), "the stop was noticed late"
    assert streamed == out.text


@pytest.mark.parametrize(
    "used,pieces", [(1, ["a</s>b"]), (3, ["a<", "/s", ">b"]), (2, ["a", "</s>"]), (3, ["a</", "s", "> "])]
)
def test_a_stop_may_span_tokens_and_is_never_streamed(used, pieces):
    out, streamed, n = run([*pieces, "never"], ["</s>"])
    assert (out.text, streamed, n, out.stopped_by) == ("a", "a", used, "</s>")


def test_of_two_stops_that_start_together_the_shorter_ends_first():
    out, streamed, _ = run(["x<", "/", "s>"], ["</s>", "</"])
    assert (out.text, streamed, out.stopped_by) == ("x", "x", "</")


def test_what_could_be_a_stop_is_held_back_only_as_long_as_needed():
    out = TextOutput(Pieces(["ab", "c", "STO", "X"]), ["STOP"])
    got = []
    for token in range(4):
        out.push(token)
        got.append(out.take())
    assert got == ["ab", "c", "", "STOX"]
