"""The table of costs between its measured places, and its file: whole, of the right key, or not there."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from boleinfer.costs import CostFiles, CostTable


def table(stairs: bool = False) -> CostTable:
    rows, batch, context = (8, 16, 64), (1, 9), (100, 1100)
    seconds = np.asarray([[[r + b + t / 100 for t in context] for b in batch] for r in rows], float)
    return CostTable(rows, batch, context, seconds, stairs, {1: np.asarray([2.0, 10.0])})


def test_between_and_beyond_what_was_measured():
    t = table()
    rows = np.asarray([1, 8, 12, 64, 65])
    assert t.step_s(rows, 5, 608).tolist() == pytest.approx([8 + 5 + 6.08, 19.08, 12 + 11.08, 64 + 11.08, np.inf])
    assert t.one_s(1, 5, 3104) == pytest.approx(8 + 5 + 31.04), "a longer context goes on along the last line"
    assert t.one_s(1, 90, 0) == pytest.approx(8 + 9 + 1), "outside the other ends nothing is made up"
    assert table(stairs=True).step_s(rows, 5, 608).tolist() == pytest.approx([19.08, 19.08, 27.08, 75.08, np.inf])
    assert (t.one_s(64, 5, 608), t.one_s(65, 5, 608), t.one_s(999, 5, 608)) == (pytest.approx(75.08), np.inf, np.inf)
    assert (t.draft_s(1, 5), t.draft_s(1, 99), t.draft_s(2, 5)) == (6.0, 10.0, 0.0)


def test_single_rows_have_a_price_of_their_own():
    t = replace(table(stairs=True), single=np.asarray([[1.0, 2.0], [5.0, 6.0]]))
    assert t.one_s(1, 1, 96) == pytest.approx(1.0) and t.one_s(2, 1, 96) == table(stairs=True).one_s(2, 1, 96)
    assert t.one_s(5, 5, 608) == pytest.approx(3.0 + 508 / 1000) and t.one_s(6, 5, 608) == pytest.approx(19.08)


def test_more_of_anything_takes_no_less():
    noisy = CostTable((1, 2), (1, 2), (0, 9), np.asarray([[[3.0, 2.0], [2.5, 4.0]], [[1.0, 5.0], [6.0, 1.0]]]))
    for axis in range(3):
        assert (np.diff(noisy.seconds, axis=axis) >= 0).all()


@pytest.mark.parametrize(
    "wrong", [{"rows": (8, 8, 16)}, {"batch": ()}, {"seconds": -np.ones((3, 2, 2))}, {"seconds": np.ones((3, 2))}]
)
def test_what_is_no_table_is_refused(wrong):
    fields = {name: value for name, value in {**table().__dict__, **wrong}.items() if name[0] != "_"}
    with pytest.raises(ValueError, match="a table of costs"):
        CostTable(**fields)


def test_kept_under_its_key(tmp_path):
    files, key = CostFiles(tmp_path / "costs"), {"gpu": "H200", "shape": (1, 2)}
    assert files.get(key) is None
    files.put(key, replace(table(stairs=True), single=np.ones((2, 2))))
    found = CostFiles(tmp_path / "costs").get(key)
    assert found is not None and found.stairs and found.rows == (8, 16, 64)
    np.testing.assert_array_equal(found.seconds, table().seconds)
    np.testing.assert_array_equal(found.drafts[1], table().drafts[1])
    assert files.get({**key, "gpu": "A100"}) is None


@pytest.mark.parametrize("damage", ["cut", "number", "key", "empty"])
def test_f48_a_damaged_or_foreign_file_is_none(tmp_path, damage):
    files, key = CostFiles(tmp_path), {"gpu": "H200"}
    files.put(key, table())
    file = files.file(key)
    text = file.read_text()
    if damage == "key":  # another GPU's table under this one's name
        files.put({"gpu": "A100"}, table())
        text = files.file({"gpu": "A100"}).read_text()
    changed = {"cut": text[: len(text) // 2], "number": text.replace("10.0", "12.0", 1), "key": text, "empty": ""}
    file.write_text(changed[damage])
    assert damage == "key" or changed[damage] != json.dumps(json.loads(text), indent=1)
    assert files.get(key) is None
    files.put(key, table())
    assert files.get(key) is not None


def test_several_writers_leave_a_whole_file(tmp_path):
    files, key = CostFiles(tmp_path), {"gpu": "H200"}
    writers = [threading.Thread(target=lambda: [files.put(key, table()) for _ in range(20)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    while any(w.is_alive() for w in writers):
        assert not files.file(key).exists() or files.get(key) is not None
    assert [f.name for f in tmp_path.iterdir()] == [files.file(key).name]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    files = CostFiles(tmp_path / "file" / "costs")
    with pytest.warns(UserWarning, match="BOLEINFER_CACHE"):
        files.put({}, table())
    assert files.get({}) is None
