"""Another project's GDN kernels at the shapes of `boleinfer bench tree`, timed in a process of their own.

FOLDER, which is no part of this project, holds gdn_peers.py with Shape(key_heads, value_heads, width), graph_us(calls),
tree_verify_call(shape, B, N, parents) -> (call, inputs, state, parents), chain_verify_us(shape, B, N, ring, filled)
and decode_us(shape, B), on SGLang's kernels and PyTorch. `python -m boleinfer.bench_peers FOLDER` reads cases as JSON.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import boleinfer
from boleinfer import timing
from boleinfer.forest import Forest, Tree
from boleinfer.ops import relative_error
from boleinfer.ops.gdn import gdn
from boleinfer.ops.gdn_inputs import gates, l2_norm
from boleinfer.options import UsageError
from boleinfer.ring import Ring

Case = dict[str, Any]
NAMES = {
    "tree": "SGLang, recurrent tree kernel",
    "chain": "SGLang, factor ring of chains",
    "token": "SGLang, packed decode",
}
CHECKED = 2  # requests


def measured(folder: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """{peer, peer_us}, with trees also peer_rel_err, of each case; {} where there is no such kernel.

    cases: op, Hk, Hv, width, ring, filled, and the parents of each request's nodes
    Raises UsageError for a folder without gdn_peers.py, CalledProcessError where the other process fails, whose own
    words are on stderr."""
    if not (Path(folder) / "gdn_peers.py").is_file():
        raise UsageError(f"--peers names a folder that holds gdn_peers.py; there is none in {folder}")
    command = [sys.executable, "-m", __name__, folder]
    path = os.pathsep.join([str(Path(boleinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The other process: results as the last line of stdout."""
    sys.path.insert(0, sys.argv[1])
    peers = importlib.import_module("gdn_peers")
    print(json.dumps([measure(peers, case) if case["op"] in NAMES else {} for case in json.load(sys.stdin)]))


def measure(peers: Any, case: Case) -> dict[str, Any]:
    """One case; as many sets of arrays as leave none in L2."""
    parents, shape = case["parents"], peers.Shape(case["Hk"], case["Hv"], case["width"])
    B, N, state = len(parents), len(parents[0]), 4 * len(parents) * case["Hv"] * case["width"] ** 2
    made: dict[str, Any] = {"peer": NAMES[case["op"]]}
    if case["op"] == "tree":
        theirs = [[max(p, 0) for p in parent] for parent in parents]  # a root is its own parent there
        sets = timing.copies(state * (1 + N), least=1, most=64)
        found = [peers.tree_verify_call(shape, B, N, theirs) for _ in range(sets)]
        made["peer_rel_err"] = tree_error(found[0], [Tree.of([0] * N, p) for p in parents])
        calls = [call for call, *_ in found]
    elif case["op"] == "chain":
        one = functools.partial(peers.chain_verify_us, shape, B, N, case["ring"], case["filled"])
        calls = collected(peers, one, timing.copies(state, least=1, most=64))
    else:
        calls = collected(peers, functools.partial(peers.decode_us, shape, B), timing.copies(state, least=1, most=64))
    return made | {"peer_us": peers.graph_us(calls)}


def collected(peers: Any, one: Callable[[], Any], n: int) -> list[Callable[[], object]]:
    """The calls that n runs of `one` would have timed, each on arrays of its own."""
    honest = peers.graph_us
    peers.graph_us = lambda calls: calls
    try:
        return [call for _ in range(n) for call in one()]
    finally:
        peers.graph_us = honest


def tree_error(made: tuple, trees: Sequence[Tree]) -> float:
    """Relative error of o of the first requests against float64."""
    call, x, state, _ = made
    o, few = call(), min(len(trees), CHECKED)
    rows = few * len(trees[0])

    def host(tensor: Any) -> np.ndarray:
        return tensor.double().cpu().numpy()

    q, k, v = (host(x[name][0, :rows]) for name in "qkv")
    g, beta = gates(host(x["a"][:rows]), host(x["b"][:rows]), host(x["A_log"]), host(x["dt_bias"]))
    S = host(state[:few]).swapaxes(-1, -2)
    no_k, no_u, no_g = (np.empty((few, 0, *a.shape[1:])) for a in (k, v, g))
    none = Ring(no_k, no_u, no_g, np.zeros(few, int))
    forest = Forest.of(list(trees[:few]), [0] * few)
    q = l2_norm(q) * q.shape[-1] ** -0.5
    wanted, _ = gdn(q, l2_norm(k), v, g, beta, S, none, np.arange(few), forest)
    return relative_error(host(o[0, :rows]), wanted)


if __name__ == "__main__":
    main()
