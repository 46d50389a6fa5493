"""`boleinfer verify`: what it says of tokens that are the same, that differ, and that differ at a near tie."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest

from boleinfer import cli, executor, verify
from boleinfer.sampling import SamplingParams, accept

GREEDY = ["-n", "30", "--temp", "0", "--repeat-penalty", "1", "--draft", "none"]
PROMPTS = ["def f(x):\n", "a, b, a, b, a,"]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(PROMPTS))
    return str(file)


def run(*arguments):
    return cli.main(["verify", "--device", "cpu", "-n", "8", *arguments])


def test_nothing_differs(prompts, capsys):
    assert run("--prompts", prompts, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "identical" and record["prompts"] == PROMPTS
    ways = Counter((r["sampling"], r["draft"], r["together"]) for r in record["runs"])
    assert set(ways.values()) == {1}
    assert {(s, d, t) for s in ("greedy", "seeded") for d in ("mtp", "auto", "known") for t in (False, True)} <= set(
        ways
    )
    assert ("greedy", "none", True) in ways and ("greedy", "none", False) not in ways
    for r in record["runs"]:
        assert r["verdict"] == "identical" and r["differences"] == [] and r["tokens"] == 16
        assert r["draft"] not in ("mtp", "known") or 0 < r["accepted"] < r["drafted"]
    assert record["sampling"]["seeded"]["temperature"] == 0.5 and record["sampling"]["greedy"]["temperature"] == 0


def credulous(tree, logits, sampler, root=0):
    """Where no guess is the model's own token, takes the drafter's word for it."""
    nodes, tokens = accept(tree, logits, sampler, root)
    guesses = tree.token[tree.parent == root]
    return nodes, tokens if len(tokens) > 1 or not len(guesses) else [int(guesses[0])]


def test_a_wrong_walk_is_found(prompts, capsys, monkeypatch):
    monkeypatch.setattr(executor, "accept", credulous)
    assert run("--prompts", prompts, *GREEDY) == 1
    out = capsys.readouterr().out
    assert "greedy  none    in a batch  identical" in out and "greedy  known   alone       different" in out
    assert "DIFFERENT: " in out and re.search("first difference: greedy, known, prompt ", out)
    assert "plain decoding has " in out and "standard deviations of the row" in out


def test_rounding_is_no_failure(prompts, capsys, monkeypatch):
    monkeypatch.setattr(executor, "accept", credulous)
    monkeypatch.setitem(verify.BOUNDS, "float", 100.0)
    assert run("--prompts", prompts, *GREEDY, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "near ties"
    d = next(d for r in record["runs"] for d in r["differences"])
    assert d["near_tie"] and d["expected"] != d["got"] and d["bound"] == 100
    np.testing.assert_allclose(d["gap"], d["logits"][0] - d["logits"][1], rtol=1e-6)
    assert 0 < d["deviations"] < d["bound"]


def test_an_answer_that_ends_sooner_differs():
    class Output:
        prompt_token_ids = [1]

        def __init__(self, token_ids, reason, error=None):
            self.token_ids, self.finish_reason = token_ids, reason
            self.outputs, self.stats = [type("", (), {"error": error})], type("", (), {"drafted": 0, "accepted": 0})

    right = Output([1, 2, 3], "length")
    for other, got in ((Output([1, 2], "error", "NaN"), None), (Output([1, 2, 3, 4], "length"), 4)):
        run = verify.held_against(None, verify.Run("greedy", "mtp", False), SamplingParams(), [right], [other])
        (d,) = run.differences
        assert d.position == len(right.token_ids) - (got is None) and d.got == got and not d.near_tie
        assert verify.verdict([run]) == "different"
        json.dumps(verify._plain(run), allow_nan=False)
        assert "DIFFERENT" in verify._summary([run], ["x"]) and (
            "the end (NaN)" if got is None else "4"
        ) in verify._summary([run], ["x"])


def test_spoilt_drafts_are_spoilt_where_they_should_be():
    assert verify.spoilt_draft([1, 2, 3], 1, wide=False, vocab=9).token.tolist() == [1, 3, 3]
    wide = verify.spoilt_draft([1, 2, 3], 5, wide=True, vocab=9)
    assert wide.token[wide.path(5)].tolist() == [1, 2, 3] and len(wide) == 6


@pytest.mark.parametrize(
    "name,content,why",
    [
        ("p.txt", None, "No such file"),
        ("p.txt", "\n\n", "holds no prompts; name a file with a prompt a line"),
        ("p.txt", b"\xff\xfe", "can't decode"),
        ("p.json", "[1]", "array of non-empty strings"),
        ("p.json", '["a", ""]', "array of non-empty strings"),
        ("p.json", "{", "p.json: "),
        ("p.json", '["\\ud800"]', "surrogate"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path, capsys, name, content, why):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert run("--prompts", str(file)) == 2
    assert why in capsys.readouterr().err


def test_the_help_says_how_long_answers_are(capsys):
    for command, tokens in (("verify", verify.TOKENS), ("generate", SamplingParams().max_tokens)):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert f"stop after N tokens (default: {tokens})" in capsys.readouterr().out


def test_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\n")
    assert verify.read_prompts(file) == ["one", "two words"]


def test_plain_decoding_that_fails_is_said(prompts, capsys, monkeypatch):
    from boleinfer.decoder import Decoder

    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: logits(self, hidden) * np.float32("nan"))
    assert run("--prompts", prompts) == 1
    assert "plain decoding of prompt 0 ended early: the model's logits hold NaN" in capsys.readouterr().err
