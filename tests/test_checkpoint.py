"""Broken, missing, doubled and dangerous weight files: each is refused with its name."""

from __future__ import annotations

import json

import pytest

from boleinfer.checkpoint import INDEX, Checkpoint, WeightsError
from boleinfer.config import read_config
from tests.checkpoints import expected, load, make_model, write


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 200, -1])
def test_file_cut_short(tmp_path, keep):
    make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model.safetensors .*fetch"):
        load(tmp_path)


def test_file_with_more_than_its_header_says(tmp_path):
    make_model(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(WeightsError, match="longer than its header says"):
        load(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff\xff\xff",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}',
    ],
)
def test_broken_header(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match="model.safetensors"):
        Checkpoint(tmp_path)


def test_header_length_beyond_the_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        Checkpoint(tmp_path)


def test_missing_shard_is_named_with_and_without_an_index(tmp_path):
    make_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00003.safetensors"):
        load(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00003.safetensors"):
        load(tmp_path)


def test_shards_without_an_index(tmp_path):
    tensors = make_model(tmp_path, shards=3)
    (tmp_path / INDEX).unlink()
    assert load(tmp_path).keys() == expected(read_config(tmp_path), tensors).keys()


def test_dangling_link(tmp_path):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model-00001-of-00001.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(WeightsError, match="model-00001-of-00001"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(tmp_path, text):
    make_model(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=INDEX):
        load(tmp_path)


def test_index_that_points_outside_or_to_the_wrong_shard(tmp_path):
    make_model(tmp_path / "m", shards=2)
    index = tmp_path / "m" / INDEX
    listed = json.loads(index.read_text())
    name = "model.norm.weight"
    for wrong in ("../secret.safetensors", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": listed["weight_map"] | {name: wrong}}))
        with pytest.raises(WeightsError, match="not a valid index"):
            load(tmp_path / "m")
    other = next(file for file in listed["weight_map"].values() if file != listed["weight_map"][name])
    index.write_text(json.dumps({"weight_map": listed["weight_map"] | {name: other}}))
    with pytest.raises(WeightsError, match=f"{name} in model-0000"):
        load(tmp_path / "m")


def test_name_in_two_shards(tmp_path):
    tensors = make_model(tmp_path, shards=2)
    twin = {"model.norm.weight": tensors["model.norm.weight"]}
    for shard in tmp_path.glob("*.safetensors"):
        here = {n: tensors[n] for n in names_in(shard)}
        write(shard, here | twin)
    with pytest.raises(WeightsError, match="model.norm.weight is stored twice"):
        load(tmp_path)


def names_in(shard):
    data = shard.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [n for n in header if n != "__metadata__"]


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path, pickle):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / pickle).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(WeightsError, match=f"{pickle} is a pickle, which can run code"):
        load(tmp_path)


def test_folder_without_weights(tmp_path):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="no .safetensors file"):
        load(tmp_path)
    with pytest.raises(WeightsError, match="is not a folder"):
        Checkpoint(tmp_path / "none")
