"""Public reports of what goes wrong elsewhere that fit no test of one part; the others name theirs, such as f01."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import device
from boleinfer.sampling import SamplingParams
from boleinfer.state import GDNLayer, State
from tests.checkpoints import plausible_checkpoint
from tests.running import engine_of, finish, load, request_of
from tests.test_cuda_executor import cuda_engine

BATCHES = 8, 3, 5, 1, 3


@pytest.mark.parametrize("gpu", ["forward", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_f17_rows_that_nobody_uses_touch_nobody(tmp_path, gpu):
    """Batches of a step of 8 rows shrink and grow, the first and the last slot taken: what no live request owns keeps
    its bytes, and each request's tokens are those that it has alone."""
    folder = plausible_checkpoint(tmp_path, "qwen3_5")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 470, 1 + i % 3).tolist() for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine, made = cuda_engine(folder, "none", max_batch=8), []
    outermost = 0
    for wanted in BATCHES:
        live = sorted((r for r in made if not r.finished), key=lambda r: r.home.slot)
        for request in live[1 : 1 + max(0, len(live) - wanted)]:  # the outermost slots go on
            engine.drop(request)
        for _ in range(wanted - len(live)):
            made.append(request_of(prompts[len(made)], params))
            engine.add(made[-1])
        for _ in range(6):
            engine.step()  # reads the prompts that are new, starts the next step
        running = [r.home for r in engine.scheduler.running]
        assert len(running) == wanted and 0 in (slots := {p.slot for p in running})
        outermost += 7 in slots
        before = _of_others(engine.state, running)
        engine.step()
        assert _of_others(engine.state, running) == before
    assert outermost >= 3
    for request in made:
        engine.drop(request)
    alone = engine_of(load(folder))
    for request, prompt in zip(made, prompts):
        ((*tokens,),) = finish(alone, [request_of(prompt, params)])
        assert request.generated == tokens[: len(request.generated)] and request.generated


def _of_others(state: State, running) -> list[bytes]:
    """All that lies in slots and pages of nobody who is running."""
    slots = sorted(set(range(state.slots.size)) - {p.slot for p in running})
    pages = sorted(set(range(state.pages.size)) - {int(page) for p in running for page in p.pages})
    found = []
    for layer in state.layers:
        if isinstance(layer, GDNLayer):
            of_slots = layer.S, layer.window, *layer.ring
            found += [device.download(array)[slots].tobytes() for array in of_slots]
        else:
            found += [device.download(array)[pages].tobytes() for array in (layer.k, layer.v)]
    return found
