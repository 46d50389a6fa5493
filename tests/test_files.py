"""Files that are there whole or not at all."""

import os
from pathlib import Path

import pytest

from boleinfer.files import write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path):
    file = tmp_path / "a.json"
    write_whole(file, b"old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_fails_leaves_the_old_file_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "a.json"
    write_whole(file, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_a_link_and_its_file_has_the_usual_permissions(tmp_path: Path):
    file, link, usual = tmp_path / "a", tmp_path / "link", tmp_path / "usual"
    usual.write_bytes(b"")
    link.symlink_to(file)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    assert file.stat().st_mode == usual.stat().st_mode


def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"through")
        assert os.read(reader, 20) == b"through"
    finally:
        os.close(reader)


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "a", b"")
