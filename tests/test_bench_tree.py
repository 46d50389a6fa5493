"""`boleinfer bench tree` on the emulated GPU: what it compares, counts and shows, and how it asks for other kernels."""

import json
import threading
from functools import partial

import pytest

from boleinfer import bench_peers, bench_ring, bench_tables, bench_tree, cli, device, timing
from boleinfer.bench_peers import measured
from boleinfer.forest import Tree
from boleinfer.options import UsageError
from tests.test_bench_gpu import GPU, TINY, pretend  # noqa: F401

PEERS = """
from typing import NamedTuple
import numpy as np

class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    width: int

class Tensor(np.ndarray):
    def double(self): return self.astype(np.float64)
    def cpu(self): return self
    def numpy(self): return np.asarray(self)

class torch:
    class cuda:
        synchronize = staticmethod(lambda: None)

def graph_us(calls, inner=3):
    return float(len(calls) + sum(call() is None for call in calls))

def tree_verify_call(shape, batch, nodes, parents):
    (Hk, Hv, K), R = shape, batch * nodes
    q, k, v, a, b, A_log, dt_bias, state = (
        np.random.default_rng(0).standard_normal(s).view(Tensor)
        for s in ((1, R, Hk, K), (1, R, Hk, K), (1, R, Hv, K), (R, Hv), (R, Hv), (Hv,), (Hv,), (batch, Hv, K, K))
    )
    print("not a result")
    return lambda: v * 0, dict(q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias), state, parents

def chain_verify_us(shape, batch, nodes, ring, filled):
    return graph_us([lambda: None])

def decode_us(shape, batch):
    return graph_us([lambda: 0])
"""


@pytest.fixture
def small(monkeypatch):
    for name, value in {"HK": 2, "WIDTH": 16, "VALUE_HEADS": (4,), "REQUESTS": (1, 2), "TREES": (1, 5)}.items():
        monkeypatch.setattr(bench_tree, name, value)
    for name, value in {"CHAINS": (3,), "HEADS": ((4, 2, 32),), "NODES": (1, 5), "CONTEXTS": (40,)}.items():
        monkeypatch.setattr(bench_tree, name, value)
    monkeypatch.setattr(bench_tree, "BATCHES", (2,))
    monkeypatch.setattr(bench_tree, "gpu_provenance", lambda: {**GPU, "sources_sha256": "0"})
    monkeypatch.setattr(bench_tree.device, "memory", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(timing, "copies", lambda nbytes, least=2, most=4: 2)


def test_tree(pretend, small, tmp_path, capsys):  # noqa: F811
    (tmp_path / "gdn_peers.py").write_text(PEERS)
    file = tmp_path / "gdn_tree.json"
    assert cli.main(["bench", "tree", "--peers", str(tmp_path), "-o", str(file)]) == 0
    record = json.loads(file.read_text())
    assert {"gpu", "driver", "date", "read_gb_s", "source_hash"} <= record.keys()
    gdn = [row for row in record["rows"] if row["op"] != "attention"]
    assert [(r["op"], r["N"]) for r in gdn if r["B"] == 2] == [
        ("tree", 1), ("tree", 5), ("chain", 3), ("token with front and back", 1), ("tree with front and back", 1),
        ("tree with front and back", 5),
    ]  # fmt: skip
    for row in gdn:
        assert row["rel_err"] < 8e-3 and row["rel_err_u"] < 8e-3 and row["ring"] == 16
        assert row["peer_us"] > 0 and ("peer_rel_err" in row) == ("tree" in row["op"])
    others = [r["peer_us"] for r in gdn if r["op"] in ("chain", "token with front and back") and r["B"] == 2]
    assert others == [128, 64]  # 64 sets each
    alone, whole = (
        [(r["N"], r["peer_us"]) for r in gdn if r["op"] == op] for op in ("tree", "tree with front and back")
    )
    assert alone == whole
    assert [row["T"] for row in record["rows"] if row["op"] == "attention"] == [40, 40]
    assert "| 2 | " in bench_tables.tree_in_short(record)
    out = capsys.readouterr().out
    for part in ("**chain**, beside SGLang", "| 4, 2 |", "**attention**", "| 4 / 2, 2 x 40 |"):
        assert part in out, out


def test_floor_counts_each_byte_once(pretend, small):  # noqa: F811
    case = bench_tree.Case("tree", 4, [Tree.of([0] * 3, [-1, 0, 0])] * 2)
    row = bench_tree.gdn_row(case, read_gb_s=1e-3)  # a byte a microsecond
    state = 2 * (4 * 4 * 16 * 16 + 16 * (2 * 2 * 16 + 4 * 4 * 17))
    rows = 6 * (2 * 2 * 2 * 16 + (2 + 2 + 4) * 4 * 16 + 2 * 4 * 4)  # q, k, v, o; u; g, beta
    assert row["floor_us"] == pytest.approx(state + rows)


def test_errors_see_a_wrong_row(pretend, small, monkeypatch):  # noqa: F811
    case = bench_tree.Case("tree", 4, [Tree.of([0] * 3, [-1, 0, 0])] * 2)
    honest = bench_tree.gdn

    def spoilt(*args, **named):
        o, u = honest(*args, **named)
        if device.on_gpu(o):
            o[4] = 0
        return o, u

    monkeypatch.setattr(bench_tree, "gdn", spoilt)
    row = bench_tree.gdn_row(case, read_gb_s=1.0)
    assert row["rel_err"] > 0.1 > row["rel_err_u"]


def test_other_kernels_get_the_same_trees(tmp_path):
    (tmp_path / "gdn_peers.py").write_text(PEERS + "\n\ndef graph_us(calls, inner): return len(calls)\n")
    case = bench_tree.Case("tree", 16, [Tree.of([0] * 3, [-1, 0, 0])] * 2)
    (found,) = measured(str(tmp_path), [case.asked()])
    assert found["peer_us"] == 32 and found["peer_rel_err"] == 1  # it gives zeros; a set has 8 states of 1 MB


def test_a_folder_without_other_kernels_is_a_mistake(tmp_path):
    with pytest.raises(UsageError, match=r"gdn_peers\.py"):
        measured(str(tmp_path), [])


def test_an_unfinished_record_is_shown():
    assert "floor" in bench_tables.tree({**GPU, "read_gb_s": 1.0, "rows": []})


SPOILT = """

honest = tree_verify_call

def tree_verify_call(shape, batch, nodes, parents):
    if nodes == 2:
        raise RuntimeError("an illegal memory access\\nand more")
    if nodes == 3:
        import os; os._exit(7)
    if nodes == 4:
        import pathlib, time; pathlib.Path(__file__).with_name("late").touch(); time.sleep(60)
    return honest(shape, batch, nodes, parents)
"""


class Timer(threading.Thread):
    """In place of threading's: over when the other process says that it is late, however busy the machine is."""

    def __init__(self, limit_s, end, sign):
        super().__init__(daemon=True)
        self.end, self.sign, self.over = end, sign, threading.Event()

    def run(self):
        while not self.over.wait(0.02):
            if self.sign.exists():
                self.sign.unlink()
                self.over.set()
                self.end()

    def cancel(self):
        self.over.set()


def test_a_case_that_fails_costs_no_other(tmp_path, monkeypatch):
    """What a case ended with is said in its place, and the next ones run in a new process, up to a few failures."""
    (tmp_path / "gdn_peers.py").write_text(PEERS + SPOILT)
    monkeypatch.setattr(bench_peers.threading, "Timer", partial(Timer, sign=tmp_path / "late"))
    nodes = (1, 2, 3, 5, 4, 1, 2, 1, 2)
    cases = [bench_tree.Case("tree", 16, [Tree.chain([0] * n)]).asked() for n in nodes]
    found = measured(str(tmp_path), cases, limit_s=5)
    assert [("peer_us" in answer) for answer in found] == [True, False, False, True, False, True, False, False, False]
    said = [answer["peer_error"] for answer in found if "peer_error" in answer]
    access = "RuntimeError: an illegal memory access"
    assert said == [
        access,
        "its process ended with 7",
        "more than 5 s",
        access,
        *["not run: 4 cases before it failed"] * 2,
    ]


def test_kernels_are_compiled_with_few_requests(tmp_path, monkeypatch):
    """Each kind once with at most 64 requests and once with more."""
    seen = []
    monkeypatch.setattr(bench_peers, "measured", lambda folder, cases: seen.extend(cases))
    cases = [bench_tree.Case("token", 4, [Tree.chain([0])] * B).asked() for B in (1, 32, 128)]
    bench_peers.compiled("", cases)
    assert [len(case["parents"]) for case in seen] == [32, 65]


def test_ring(pretend, small, monkeypatch, tmp_path, capsys):  # noqa: F811
    """Folding and reading for every capacity; what is folded is compared with the definition."""
    for name, value in {
        "SIZE": TINY,
        "LAYERS": 2,
        "HV": 4,
        "CAPACITIES": (16, 32),
        "ACCEPTED": ((1, 1), (2, 5)),
    }.items():
        monkeypatch.setattr(bench_ring, name, value)
    monkeypatch.setattr(bench_ring, "gpu_provenance", lambda: dict(GPU))
    file = tmp_path / "ring.json"
    assert cli.main(["bench", "ring", "--requests", "1", "2", "--prompt", "20", "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["B"], r["C"], r["tokens"]) for r in rows] == [
        (B, C, tokens) for B in (1, 2) for C in (16, 32) for tokens in (1, 2)
    ]
    for row in rows:
        assert row["rel_err"] < 2e-6 and row["read_us"] > 0
        assert row["fold_us"] == pytest.approx(
            row["none_us"] + row["B"] * row["tokens"] / row["C"] * (row["one_us"] - row["none_us"])
        )
        assert row["share"] == pytest.approx(row["fold_us"] / 1e3 / row["step_ms"])
    assert "| 32 | " in capsys.readouterr().out
