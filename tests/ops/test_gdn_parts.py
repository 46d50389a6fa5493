"""Why the delta rule's kernels take S and W in two bf16 parts and u in three: with fewer the committed state is worse.

A tree is computed in NumPy as the kernels do it: q, k exact in bf16, S as parts, decayed scores and u as parts, sums in
float32. docs/tree-kernel.md shows the numbers.
"""

from typing import NamedTuple

import numpy as np
import pytest

from boleinfer.device import dtype
from boleinfer.ops.gdn import _decays, recurrent
from boleinfer.ring import fold
from tests import strategies as some

K = V = 128
N, C = 16, 32
BOUND = 2e-5  # of the committed state, relative


def parts(x, count):
    """x as a sum of so many bf16 numbers, what is left is lost; 0: as it is."""
    found, rest = [], x.astype(np.float32)
    for _ in range(count):
        found.append(rest.astype(dtype("bf16")).astype(np.float32))
        rest = rest - found[-1]
    return found or [rest]


def product(a, b):
    """Small products first; those of two low parts, as small as what is lost, are not made."""
    most = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most]
    return sum(a[i] @ b[j] for i, j in sorted(pairs, key=sum, reverse=True))


class Parts(NamedTuple):
    """Of how many parts the state, the decayed scores, u, and u in a fold are; 0: float32."""

    S: int
    W: int
    u: int
    fold: int


def tree_u(k, v, g, beta, S, ring, ancestors, count):
    """u [N, V] of a tree behind a ring, one head; the triangular system of 16 rows in float32."""
    ring_k, ring_u, ring_g = ring
    c = len(ring_k)
    (G,), (decay,) = _decays(g[:, None], ring_g[:, None], ancestors, np.float32)
    W = (k @ np.concatenate((ring_k, k)).T) * decay
    past = product([k], parts(S, count.S)) * G[:, None] + product(parts(W[:, :c], count.W), parts(ring_u, count.u))
    u, A = beta[:, None] * (v - past), beta[:, None] * np.tril(W[:, c:], -1)
    for n in range(1, len(k)):
        u[n] -= A[n, :n] @ u[:n]
    return u


def rows(rng, alike, decay):
    """k, v, g and beta of a tree's nodes; alike: keys that nearly coincide and beta near 1."""
    k, beta = rng.standard_normal((N, K)), rng.uniform(0, 1, N)
    if alike:
        k, beta = np.ones(K) + 0.03 * k, 1 - beta / 100
    numbers = some.unit(k), rng.standard_normal((N, V))
    k, v = (x.astype(dtype("bf16")).astype(np.float32) for x in numbers)
    return k, v, -decay * np.exp(rng.uniform(-5, 0, N)).astype(np.float32), beta.astype(np.float32)


def state_error(count, alike, decay, tokens):
    """Of the state after so many tokens, accepted as random paths of random trees and folded when the ring is full."""
    rng = np.random.default_rng(0)
    S, exact = np.zeros((1, K, V), np.float32), np.zeros((1, K, V))
    ring = [np.zeros((0, K), np.float32), np.zeros((0, V), np.float32), np.zeros(0, np.float32)]
    done = 0
    while done < tokens:
        k, v, g, beta = rows(rng, alike, decay)
        nodes = some.tree_of([int(rng.integers(max(-1, n - 4), n)) for n in range(N)])
        u = tree_u(k, v, g, beta, S[0], ring, nodes.ancestors, count)
        path = nodes.path(int(rng.integers(N)))
        accepted = (x[path, None].astype(np.float64) for x in (k, k, v, g, beta))  # no q: o is not looked at
        _, _, exact = recurrent(*accepted, exact)
        if len(ring[0]) + len(path) > C:
            total = np.exp(ring[2].sum())
            faded = ring[1] * np.exp(ring[2].sum() - ring[2].cumsum())[:, None]
            S = (S * total + product([ring[0].T], parts(faded, count.fold))).astype(np.float32)
            ring = [x[:0] for x in ring]
        ring = [np.concatenate((old, x[path])) for old, x in zip(ring, (k, u, g))]
        done += len(path)
    S = fold(S.astype(np.float64), *(x[:, None].astype(np.float64) for x in ring))
    return np.linalg.norm(S - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("alike,decay", [(False, 0), (False, 0.05), (True, 0), (True, 0.05)])
def test_these_parts_are_enough_and_fewer_are_not(alike, decay):
    def error(*count):
        return state_error(Parts(*count), alike, decay, 1024)

    assert error(0, 0, 0, 0) < BOUND / 10
    assert error(2, 2, 3, 3) < BOUND
    for fewer in ((1, 2, 3, 3), (2, 1, 3, 3), (2, 2, 1, 3), (2, 2, 3, 1)):
        assert error(*fewer) > 2 * BOUND, fewer
    if alike and decay:
        assert error(2, 2, 2, 3) > BOUND
