"""What kernels that are launched before the previous one is done may tell the compiler: after_previous() in common.cuh.

No result shows such a fault in a test of one kernel: nothing runs before it. Whole models were wrong by it."""

import re

import pytest

from boleinfer.declaration import read
from boleinfer.kernels import cuda_folder

FILES = sorted(cuda_folder().glob("*.cu"))
HEADERS = sorted(cuda_folder().glob("*.cuh"))
RESTRICTED = re.compile(r"__restrict__\s+(\w+)")

# What no kernel of a step writes: weights, as loaded.
WEIGHTS = {
    "attention_inputs.cu": {"q_norm", "k_norm"},
    "embedding.cu": {"table", "inv_freq"},
    "gated_rms_norm.cu": {"w"},
    "gdn_few.cu": {"taps", "A_log", "dt_bias", "norm"},
    "gdn_inputs.cu": {"taps", "A_log", "dt_bias"},
    **dict.fromkeys(("gdn_token.cu", "gdn_tokens.cu"), {"taps", "A_log", "dt_bias", "norm"}),
    "linear_any.cu": {"w", "scale"},
    "linear_few.cu": {"w", "scale"},
    "linear_fp8.cu": {"scale"},
    "linear_fp8_many.cu": {"scale"},
    "linear_fp8_row.cu": {"gain", "scale"},
    "linear_rows.cu": {"w", "scale"},
    "linear_tiles.cu": {"w", "scale"},
    "linear_whole.cu": {"gain"},
    "moe_experts.cu": {"weights", "scale", "shared", "shared_scale"},
    "moe_few.cu": {"norm", "router", "shared_gate", "gate_up", "down", "shared_up", "shared_down"},
    "moe_few_fp8.cu": {"norm", "router", "shared_gate", "gate_up", "up_scale", "down", "down_scale"}
    | {"shared_up", "shared_up_scale", "shared_down", "shared_down_scale"},
    "moe_plain.cu": {"weights", "scale"},
    "moe_router.cu": {"router", "shared_gate"},
    "mtp_inputs.cu": {"table", "wa", "wb", "inv_freq"},
    "rms_norm.cu": {"w"},
    "split_rows.cu": {"w"},
}


def code(path):
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_weights_may_be_read_before_the_wait_whatever_is_written(path):
    if not read(path).early:
        pytest.skip("none of its kernels is launched before the previous one is done")
    wrong = set(RESTRICTED.findall(code(path))) - WEIGHTS.get(path.name, set())
    assert not wrong, f"{path.name}: {sorted(wrong)} must not be __restrict__: loads would move before after_previous()"


@pytest.mark.parametrize("path", FILES + HEADERS, ids=lambda path: path.name)
def test_no_load_claims_that_nobody_writes(path):
    found = re.findall(r"__ldg\w*|ld\.global\.nc\S*", code(path))
    assert not found, f"{path.name}: {found[0]} may move before after_previous(); read through a plain pointer"


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_functions_say_nothing_of_their_own(path):
    assert not RESTRICTED.findall(code(path)), f"{path.name}: only kernels' weights are __restrict__"
