"""What a .cu file declares is read as it is written, and what cannot be read is refused with its file and line."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.declaration import SCALARS, TYPES, KernelError, parse, read
from boleinfer.kernels import cuda_folder

PATH = Path("k.cu")
LETTERS = ["R", "D", "Hk", "Hv", "K", "V2"]


def kernel(*lines: str, header: str = "", name: str = "k") -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f'{header}\nextern "C" __global__ void __launch_bounds__(128) {name}(\n{body}\n)\n{{\n  f(x);\n}}\n'


def one(line: str, header: str = ""):
    (parameter,) = parse(kernel(line, header=header), PATH).kernels["k"]
    return parameter


# ---- what can be written ----

identifiers = st.from_regex(r"[a-z][a-z_0-9]{0,6}", fullmatch=True)
expressions = st.recursive(
    st.sampled_from(LETTERS) | st.integers(0, 300).map(str),
    lambda inner: st.builds(
        lambda a, op, b, close: f"({a} {op} {b})" if close else f"{a}{op}{b}",
        inner,
        st.sampled_from("+-*/%"),
        inner,
        st.booleans(),
    ),
    max_leaves=5,
)


@st.composite
def parameters(draw):
    """(line without its comma, comment, expected fields)"""
    name, array = draw(identifiers), draw(st.booleans())
    if not array:
        kind = draw(st.sampled_from(sorted(SCALARS)))
        return (
            f"{kind} {name}",
            draw(st.sampled_from(["", "// free text, with (brackets) and // more"])),
            {"type": kind},
        )
    kind = draw(st.sampled_from(sorted(TYPES)))
    const, restrict, optional = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    shape = draw(st.lists(expressions, max_size=4))
    strides = draw(st.none() | st.lists(expressions, min_size=len(shape), max_size=len(shape)))
    aligned = draw(st.sampled_from([1, 4, 16]))
    star = draw(st.sampled_from(["* ", " *", "*"])) + ("__restrict__ " if restrict else "")
    comment = f"// [{', '.join(shape)}]"
    comment += f" strides [{','.join(strides)}]" if strides is not None else ""
    comment += f" aligned {aligned}" if aligned > 1 else ""
    comment += " or null" if optional else ""
    comment += draw(st.sampled_from(["", ", raw, bf16", " of all heads [not this]"]))
    fields = {"type": kind, "writes": not const, "restrict": restrict, "optional": optional, "aligned": aligned}
    return f"{'const ' if const else ''}{kind}{star}{name}", comment, fields | {"shape": shape, "strides": strides}


@given(st.lists(parameters(), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_parameters_are_read_as_they_are_written(params, own_line, blank):
    names = [f"{re.split(r'[ *]', code)[-1]}{i}" for i, (code, *_) in enumerate(params)]
    lines = []
    for i, (code, comment, _) in enumerate(params):
        end = "," if i < len(params) - 1 else "" if own_line else ")"
        lines.append(f"  {code}{i}{end}  {comment}")
        if blank:
            lines += ["", "  // only a comment"]
    close = "  )\n" if own_line else ""
    text = f'extern "C" __global__ void k(\n{chr(10).join(lines)}\n{close}{{\n}}\n'
    found = parse(text, PATH).kernels["k"]
    assert [p.name for p in found] == names
    for parameter, (_, _, fields) in zip(found, params):
        for field, expected in fields.items():
            value = getattr(parameter, field)
            if field in ("shape", "strides") and value is not None:
                value = [dim.text for dim in value]
            assert value == expected, (field, parameter)
        assert text.splitlines()[parameter.line - 1].split() == parameter.text.split()


@given(expressions, st.lists(st.integers(0, 10**6), min_size=len(LETTERS), max_size=len(LETTERS)))
@settings(max_examples=150)
def test_sizes_are_computed_with_integers(expression, values):
    (dim,) = one(f"float* x // [{expression}]").shape
    sizes = dict(zip(LETTERS, values))
    try:
        expected = eval(expression.replace("/", "//"), {}, dict(sizes))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            dim.value(sizes)
    else:
        assert dim.value(sizes) == expected
    assert set(dim.names()) == set(re.findall(r"[A-Z]\w*", expression))
    assert dim.letter == (expression if expression in LETTERS else "")


def test_constants_may_be_types():
    header = "// Adds.\n// sizes: K=64,128 Act=bf16 Fast=true | Act=float K=-3 Fast=false\n#include <x>"
    source = parse(kernel("const Act* x,  // [K]", "int n", header=header), PATH)
    assert source.sizes == (
        {"K": 64, "Act": "bf16", "Fast": True},
        {"K": 128, "Act": "bf16", "Fast": True},
        {"Act": "float", "K": -3, "Fast": False},
    )
    assert source.kernels["k"][0].type == "Act"


def test_the_header_ends_at_the_first_line_of_code():
    source = parse(
        kernel("int n", header="// arch: 90a, 100a\n//spills:  few rows \n\n#x\n// sizes: K=1\n// arch: 80"), PATH
    )
    assert (source.archs, source.spills, source.sizes) == (("90a", "100a"), "few rows", ({},))
    assert [source.target(a) for a in ("90", "90a", "100", "80", "9")] == ["90a", "90a", "100a", None, None]
    assert parse(kernel("int n"), PATH).target("86") == "86"


def test_a_file_may_hold_several_kernels_and_functions():
    text = kernel("int n", name="a") + "__device__ void helper(int x, float* y) {}\n// __global__ in a comment\n"
    assert list(parse(text + kernel("float f", name="b"), PATH).kernels) == ["a", "b"]


def test_every_shipped_file_is_read():
    files = sorted(cuda_folder().glob("*.cu"))
    assert {f.name for f in files} >= {"rms_norm.cu", "embedding.cu"}
    for file in files:
        source = read(file)
        assert source.kernels and source.text.startswith("// "), file
        comment = source.text[: source.text.index("#include")]
        assert "grid" in comment and "block" in comment, f"{file} does not say who owns what"


# ---- what cannot ----


@pytest.mark.parametrize(
    "line, why",
    [
        ("const float* x", "begins with its shape"),
        ("const float* x // R, D", "begins with its shape"),
        ("float* x // of shape [R]", "begins with its shape"),
        ("float* x // [r]", "'r' is no size"),
        ("float* x // [R + ]", "no size"),
        ("float* x // [R, , D]", "no size"),
        ("float* x // [R**2]", "no size"),
        ("float* x // [R//2]", "no size"),
        ("float* x // [f(R)]", "no size"),
        ("float* x // [-R]", "no size"),
        ("float* x // [2.5]", "no size"),
        ("float* x // [True]", "no size"),
        ("float* x // [R] strides [D, 1]", "differ in length"),
        ("float** x // [R]", "write it like"),
        ("float& x // [R]", "write it like"),
        ("float x[3]", "write it like"),
        ("float const* x // [R]", "no type of an array"),
        ("float4* x // [R]", "'float4' is no type of an array"),
        ("Act* x // [R]", "'Act' is no type of an array"),
        ("bf16 x", "'bf16' is no type passed by value"),
        ("size_t n", "'size_t' is no type passed by value"),
        ("int", "write it like"),
        ("int n = 3", "write it like"),
        ("int a, int b", "write it like"),
    ],
)
def test_a_line_that_cannot_be_read_names_file_and_line(line, why):
    with pytest.raises(KernelError) as caught:
        parse(
            kernel("int first,", f"{line.partition('//')[0].strip()},{'  //' + line.partition('//')[2]}", "int n"), PATH
        )
    assert str(caught.value).startswith("k.cu:4: ") and why in str(caught.value)


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "0 kernels"),
        ("__global__ void k(int n) {}", "1 kernels, of which 0"),
        ('extern "C" __global__ void k(int n) {}', "one parameter a line"),
        ('extern "C" __global__ void\nk(\n int n)\n{}', "on one line"),
        (kernel("int n") * 2, "under a name of its own"),
        (kernel("int n,", "float n"), "same name"),
        (kernel("int n", "int m"), "neither a comma"),
        ('extern "C" __global__ void k(\n  int n,\n', "has no end"),
        (kernel("int n", header="// arch: sm_90"), "write it like 90 or 90a"),
        (kernel("int n", header="// sizes: K=x"), "'x' is no number"),
        (kernel("int n", header="// sizes: K="), "no number"),
        (kernel("int n", header="// sizes: 3=3"), "write it like K=64,128"),
        (kernel("int n", header="// sizes: K=3 | V=3"), "differ in their names"),
        (kernel("int n", header="// sizes: K=3 | K=bf16"), "differ in their names"),
    ],
)
def test_a_file_that_cannot_be_read(text, why):
    with pytest.raises(KernelError, match=re.escape(why)) as caught:
        parse(text, PATH)
    assert str(caught.value).startswith("k.cu:")


def test_a_missing_or_binary_file(tmp_path):
    (tmp_path / "b.cu").write_bytes(b"\xff\xfe\x00")
    for name in ("b.cu", "none.cu"):
        with pytest.raises(KernelError, match=f"{name}: the kernel file cannot be read"):
            read(tmp_path / name)


def test_kernels_that_wait_by_themselves_are_known():
    first, second, third = (kernel("int n", name=name) for name in "abc")
    text = first.replace("f(x);", "after_previous();") + second + third.replace("f(x);", "after_all_previous();")
    assert parse(text, PATH).early == {"a", "c"}


def test_every_kernel_of_a_step_can_be_launched_before_the_previous_one_is_done():
    files = [read(path) for path in sorted(cuda_folder().glob("*.cu"))]
    late = {name for file in files for name in file.kernels if name not in file.early}
    assert not late & {"gdn", "gdn_inputs", "gated_rms_norm", "gdn_fold", "gdn_append", "move_kv", "embedding", "plant"}


@pytest.mark.parametrize("array,writes", [("const float", False), ("float", True), ("unsigned int", True)])
def test_one_array_of_each_layer(array, writes):
    parameter = one(f"const __grid_constant__ Each<{array}> x)  // [R, D] strides [Ld, 1] aligned 16; of each layer")
    assert parameter.each and parameter.writes == writes and parameter.type == array.removeprefix("const ")
    assert [d.text for d in parameter.strides] == ["Ld", "1"] and parameter.aligned == 16 and not parameter.restrict
    with pytest.raises(KernelError, match="write it like"):
        one(f"Each<{array}> x)  // [R, D]")


def test_a_matrix_that_is_read_in_boxes():
    parameter = one(
        "const __grid_constant__ TensorMap<const bf16> w)  // [Dout, Din] strides [Ld, 1] box [64 * Groups]"
    )
    assert parameter.by_value and not parameter.each and not parameter.writes and parameter.type == "bf16"
    assert [dim.value({"Groups": 3}) for dim in parameter.box] == [192]
    parameter = one("const __grid_constant__ TensorMap<const bf16> w)  // [F, 2, D] strides [D, F * D, 1] box [32, 2]")
    assert [dim.text for dim in parameter.box] == ["32", "2"]
    for array, comment in [
        ("bf16", "[R, D] box [8]"),
        ("const bf16", "[R, D]"),
        ("const bf16", "[R, H, D] box [8]"),
        ("const bf16", "[R, D] box [8, 2]"),
        ("const bf16", "[A, B, R, H, D] box [1, 1, 8, 2]"),
    ]:
        with pytest.raises(KernelError, match="TensorMap is of a const array"):
            one(f"const __grid_constant__ TensorMap<{array}> w)  // {comment}")
