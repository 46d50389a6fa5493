"""Another project's GDN kernels at the shapes of `boleinfer bench tree`, timed in processes of their own.

FOLDER, which is no part of this project, holds gdn_peers.py with Shape(key_heads, value_heads, width),
graph_us(calls, inner), tree_verify_call(shape, B, N, parents) -> (call, inputs, state, parents),
chain_verify_us(shape, B, N, ring, filled), decode_us(shape, B) and torch, on SGLang's kernels and PyTorch.
`python -m boleinfer.bench_peers FOLDER` reads cases as JSON and answers each with a line.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
TILES_CHANGE = 64  # requests, above which SGLang takes wider tiles
LIMIT_S, FAILURES = 60.0, 4  # of a case; cases that may fail before the rest is given up
ANSWER = "case: "  # begins the lines that are answers; their libraries print too


def measured(folder: str, cases: Sequence[Case], limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """{peer, peer_us}, with trees also peer_rel_err, of each case.

    {} where there is no such kernel; peer_error instead of peer_us where it failed, or took over limit_s: the cases
    behind it are run in a new process, since a GPU's error stays with the one that made it.
    cases: op, Hk, Hv, width, ring, filled, and the parents of each request's nodes
    Raises UsageError for a folder without gdn_peers.py."""
    if not (Path(folder) / "gdn_peers.py").is_file():
        raise UsageError(f"--peers names a folder that holds gdn_peers.py; there is none in {folder}")
    found: list[dict[str, Any]] = []
    failures = 0
    while len(found) < len(cases):
        rest = cases[len(found) :]
        if failures == FAILURES:
            return found + [{"peer_error": f"not run: {failures} cases before it failed"}] * len(rest)
        answers, problem = _process(folder, rest, limit_s)
        found += answers
        if problem:
            failures += 1
            found.append({"peer_error": problem})
    return found


def compiled(folder: str, cases: Sequence[Case]) -> None:
    """Has their kernels compiled, which Triton keeps on disk: few requests of each kind, in processes side by side."""
    kinds: dict[tuple, dict[bool, Case]] = {}
    for case in cases:
        few = case["parents"][: TILES_CHANGE + 1]
        kind = kinds.setdefault((case["op"], case["Hv"], len(few[0])), {})
        kind[len(few) > TILES_CHANGE] = {**case, "parents": few}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kind: measured(folder, list(kind.values())), kinds.values()))


def _process(folder: str, cases: Sequence[Case], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """The answers of one process to the first cases, and why it gave none to the next; "" where it answered all."""
    path = os.pathsep.join([str(Path(boleinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command, pipe = [sys.executable, "-m", "boleinfer.bench_peers", folder], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": path}
    found: list[dict[str, Any]] = []
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(cases))
        process.stdin.close()
        for _ in cases:
            late = threading.Event()

            def end(late: threading.Event = late) -> None:
                late.set()  # before the pipe ends
                process.kill()

            timer = threading.Timer(limit_s, end)
            timer.start()
            line = next((line for line in process.stdout if line.startswith(ANSWER)), None)
            timer.cancel()
            answer = {} if line is None else json.loads(line.removeprefix(ANSWER))
            if "peer_error" in answer:
                return found, answer["peer_error"]
            if late.is_set():
                return found, f"more than {limit_s:g} s"
            if line is None:
                return found, f"its process ended with {process.wait()}"
            found.append(answer)
    return found, ""


def main() -> None:
    """The other process: an answer a line, up to the first case that fails."""
    cases = json.load(sys.stdin)
    sys.path.insert(0, sys.argv[1])
    peers = importlib.import_module("gdn_peers")
    for case in cases:
        try:
            answer = measure(peers, case) if case["op"] in NAMES else {}
        except Exception as error:
            answer = {"peer_error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(ANSWER + json.dumps(answer), flush=True)
        if "peer_error" in answer:
            break


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
    peers.torch.cuda.synchronize()  # graph_us begins on a stream of its own, which does not wait for the arrays
    return made | {"peer_us": peers.graph_us(calls, inner=3 if len(calls) > 1 else 1)}


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
    no_k, no_u, no_g = (np.empty((few, 1, *a.shape[1:])) for a in (k, v, g))
    none = Ring(no_k, no_u, no_g)
    forest = Forest.of(list(trees[:few]), [0] * few)
    q = l2_norm(q) * q.shape[-1] ** -0.5
    wanted, _ = gdn(q, l2_norm(k), v, g, beta, S, none, np.arange(few), forest)
    return relative_error(host(o[0, :rows]), wanted)


if __name__ == "__main__":
    main()
