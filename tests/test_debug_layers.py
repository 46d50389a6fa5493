"""`generate --debug-layers` on the emulator: a sound GPU passes, and each kind of broken layer is named."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import attention_core, cli, debug_layers, device, gdn_core, residual
from boleinfer.debug_layers import BOUNDS, Side, compare_prompt, first_wrong, table
from boleinfer.state import State
from tests import emulator
from tests.emulator import emulated
from tests.receipt.models import FAMILIES, tiny
from tests.tokenizers_made import make_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 470, 37).tolist()


@pytest.fixture(autouse=True)
def gpu():
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulated():
        yield


def side(decoder, act=None):
    state = State(decoder.config, 2, 8, 16, 7, True, device.dtype(act or "float"), gpu=act is not None, poison=True)
    return Side(decoder, state, state.take(len(TOKENS)))


def errors_of(model, act="float", rows=20):
    return compare_prompt(side(model.host), side(model.on(act), act), TOKENS, rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_gpu_differs_nowhere(tmp_path, family):
    model = tiny(tmp_path, family)
    errors = errors_of(model)
    assert first_wrong(errors, 1e-5) is None
    assert [e.name for e in errors][:3] == ["embedding", "layer 0 gated DeltaNet", errors[2].name]
    assert [e.name for e in errors][-3:] == ["final norm", "logits", "MTP layer"] and len(errors) == 2 * 4 + 4
    errors = errors_of(model, "bf16")
    assert first_wrong(errors, BOUNDS["bfloat16"]) is None and errors[3].drift > 1e-4


@pytest.mark.parametrize(
    "file,op,name",
    [
        (gdn_core, "gdn", "layer 0 gated DeltaNet"),
        (attention_core, "tree_attention", "layer 3 attention"),
        (residual, "gated_linear", "layer 0 feed-forward"),
        (gdn_core, "gated_rms_norm", "layer 0 gated DeltaNet"),
    ],
)
@pytest.mark.parametrize("act", ["float", "bf16"])
def test_a_broken_op_is_named(tmp_path, monkeypatch, file, op, name, act):
    model = tiny(tmp_path, "qwen3_5")
    right = getattr(file, op)

    def broken(*args, **kwargs):
        result = right(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        if device.on_gpu(out):
            values = device.download(out)
            values[..., ::2] = 0
            device.write(out, values)
        return result

    host = side(model.host)
    monkeypatch.setattr(file, op, broken)
    errors = compare_prompt(host, side(model.on(act), act), TOKENS, 64)
    bound = BOUNDS[{"float": "float32", "bf16": "bfloat16"}[act]]
    assert first_wrong(errors, bound).name == name
    if op == "tree_attention":  # what follows the broken layer is judged on NumPy's inputs, and is right
        assert [e.name for e in errors if e.own > bound] == [name, "MTP layer"]


def test_one_broken_layer_of_many_is_named(tmp_path):
    model = tiny(tmp_path, "qwen3_next")
    decoder = model.on("float")
    weight = decoder.weights["layers.2.mlp.experts.down_proj"]
    device.write(weight, -device.download(weight))
    errors = compare_prompt(side(model.host), side(decoder, "float"), TOKENS, 64)
    lines = list(table(errors, len(TOKENS), "float32"))
    assert [line for line in lines if "DIFFERS" in line] == [next(x for x in lines if x.startswith("layer 2 experts"))]
    assert lines[-1].startswith("the first that differs: layer 2 experts, ")


def test_nan_is_a_difference(tmp_path):
    model = tiny(tmp_path, "qwen3_5")
    decoder = model.on("float")
    device.fill(decoder.weights["layers.1.linear_attn.A_log"], device.NAN_BYTE)
    errors = compare_prompt(side(model.host), side(decoder, "float"), TOKENS, 64)
    assert first_wrong(errors, 1e-4).name == "layer 1 gated DeltaNet"


@pytest.fixture
def folder(tmp_path):
    made = tiny(tmp_path, "qwen3_5").folder
    make_tokenizer(made)
    return made


def test_the_command_says_that_nothing_differs(folder, capsys):
    asked = ["generate", "word1 word2 stem3ing", "--debug-layers", "-m", str(folder), "-c", "64", "--no-graphs"]
    assert cli.main([*asked, "--device", "cuda", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "layer 3 attention" in out and out.splitlines()[-1].startswith("no layer differs")
    assert cli.main([*asked, "--device", "auto"]) == 0 and "GPU in bfloat16" in capsys.readouterr().out


def test_the_command_fails_where_a_layer_differs(folder, capsys, monkeypatch):
    monkeypatch.setattr(debug_layers, "BOUNDS", dict.fromkeys(BOUNDS, 1e-12))
    asked = ["generate", "word1", "--debug-layers", "-m", str(folder), "-c", "64", "--no-graphs"]
    assert cli.main([*asked, "--device", "cuda"]) == 1
    assert "the first that differs: layer 0 gated DeltaNet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags,said", [(["--device", "cpu"], "add --device cuda"), (["--random-weights", "x"], "none")]
)
def test_where_there_is_nothing_to_compare_the_command_says_so(flags, said, capsys):
    assert cli.main(["generate", "a", "--debug-layers", *flags]) == 2
    assert said in capsys.readouterr().err
