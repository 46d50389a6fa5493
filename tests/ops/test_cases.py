"""Every op's CASES in float32 against the same op in float64, and the measure itself."""

import importlib
import pkgutil

import numpy as np
import pytest

from boleinfer import ops
from boleinfer.ops import Case, case_error, cast, relative_error

FILES = [importlib.import_module(f"boleinfer.ops.{m.name}") for m in pkgutil.iter_modules(ops.__path__)]
ALL = [(file, name, case) for file in FILES for name, cases in getattr(file, "CASES", {}).items() for case in cases]


@pytest.mark.parametrize("file,name,case", ALL, ids=[f"{name} {case.label}" for _, name, case in ALL])
def test_float32_is_near_float64(file, name, case):
    assert case_error(getattr(file, name), case) <= case.bound


def test_every_file_has_cases():
    assert len(FILES) >= 5
    assert [file.__name__ for file in FILES if not getattr(file, "CASES", None)] == []


def test_the_measure():
    ref = np.asarray([3.0, 4.0])
    assert relative_error(ref, ref) == 0
    assert relative_error(ref + [0, 0.5], ref) == pytest.approx(0.1)
    assert relative_error((ref, ref + [0, 0.5]), (ref, ref)) == pytest.approx(0.1)
    assert relative_error(np.asarray([np.inf, np.nan, 1]), np.asarray([np.inf, np.nan, 1])) == 0
    for out, other in ([np.nan, 1], [1, 1]), ([1, 1], [np.inf, 1]), ([1e-9, 0], [0, 0]):
        assert relative_error(np.asarray(out), np.asarray(other)) == np.inf
    for out in (np.zeros(2), np.zeros((2, 3))):
        with pytest.raises(ValueError, match="shape"):
            relative_error(out, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="expected 2 results"):
        relative_error((ref,), (ref, ref))


def test_a_wrong_op_is_found_even_in_an_argument_it_changes():
    def add_in_place(x, n):
        x += np.float32(1 / 3) if x.dtype == np.float32 else n

    case = Case("R=3", lambda rng: {"x": rng.standard_normal(3), "n": 1 / 3}, outputs=("x",))
    assert case_error(add_in_place, case) < 1e-6
    assert case_error(lambda x, n: add_in_place(x, 0.4), case) > 1e-3
    assert case_error(lambda x, n: None, case._replace(outputs=())) == 0


def test_cast_copies_and_leaves_integers_alone():
    value = {"a": np.asfortranarray(np.ones((2, 3))), "b": [np.arange(3, dtype=np.int32)], "c": 1.5, "d": None}
    out = cast(value, np.float32)
    assert out["a"].dtype == np.float32 and out["a"].flags.f_contiguous and out["b"][0].dtype == np.int32
    assert out["c"] == 1.5 and out["d"] is None
    out["a"][:], out["b"][0][:] = 0, 9
    assert value["a"].all() and value["b"][0].tolist() == [0, 1, 2]
