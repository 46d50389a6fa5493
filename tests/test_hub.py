"""From a model's name to a folder: local folders, the hub's cache offline, and a stub hub that misbehaves (F45)."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from boleinfer.hub import HubError, load_headers, load_model_files

ROOT = Path(__file__).resolve().parent.parent
SHA, OLD = "a" * 40, "b" * 40
TOKEN = "hf_thisIsSecretAndNeverShown"
SHARD = "model-00002-of-00002.safetensors"
FILES = {
    "config.json": b'{"model_type": "qwen3_next"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model-00001-of-00002.safetensors": b"first" * 1000,
    SHARD: bytes(range(256)) * 4000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": SHARD}}
    ).encode(),
}
SERVED = FILES | {SHARD: bytes(range(256)) * 80_000}  # 20 MB: the hub's library resumes in steps of 10 MiB
UNWANTED = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "onnx/model.safetensors": b"x", "README.md": b"#"}


# ---- local -----------------------------------------------------------------------------------------------------------


def test_an_existing_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "Qwen" / "Qwen3.5-0.8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it would fail
    assert load_model_files("Qwen/Qwen3.5-0.8B") == Path("Qwen/Qwen3.5-0.8B")
    assert load_model_files(tmp_path, revision="x", token=TOKEN, offline=True) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_model_files("~/Qwen") == tmp_path / "Qwen"


@pytest.mark.parametrize(
    "name", ["gpt2", "no/such/", "./Qwen/x", "/no/such/folder", "a/b/c", "Qwen\\x", "../x", "a /b", "-a/b"]
)
def test_what_is_neither_folder_nor_hub_id(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=f"there is no folder {re.escape(name)}, and it is not a hub id"):
        load_model_files(name)


def test_an_empty_name():
    with pytest.raises(HubError, match="name is empty"):
        load_model_files("")


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(HubError, match="is a file; give the folder"):
        load_model_files(tmp_path / "model.gguf")


# ---- headers alone ---------------------------------------------------------------------------------------------------


@pytest.fixture
def far(monkeypatch, tmp_path):
    """A hub whose library is asked for nothing but what is noted in the list."""
    import huggingface_hub

    asked = []

    def snapshot(name, allow_patterns, **more):
        asked.append(allow_patterns)
        return str(tmp_path)

    def metadata(name, revision, token):
        asked.append((name, revision, token))
        tensor = SimpleNamespace(dtype="BF16", shape=[2, 3])
        files = {file: SimpleNamespace(tensors={name: tensor}) for file, name in (("1", "a"), ("2", "b"))}
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    monkeypatch.setattr("boleinfer.hub._snapshot", lambda *arguments: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked


def test_headers_are_read_without_fetching_the_weights(far, tmp_path):
    folder, headers = load_headers("owner/name", "v1", TOKEN)
    assert folder == tmp_path and headers == {"a": ("BF16", (2, 3)), "b": ("BF16", (2, 3))}
    assert far == [["*.json", "*.jinja"], ("owner/name", "v1", TOKEN)]


def test_headers_that_cannot_be_read(far, monkeypatch):
    import huggingface_hub

    def broken(*arguments, **named):
        raise ConnectionError(f"no route, {TOKEN}")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", broken)
    with pytest.raises(HubError, match="cannot be reached") as error:
        load_headers("owner/name", token=TOKEN)
    assert TOKEN not in str(error.value)


def test_headers_of_what_is_here_come_from_the_files(far, tmp_path, monkeypatch):
    assert load_headers(tmp_path) == (tmp_path, None)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("boleinfer.hub._snapshot", lambda *arguments: tmp_path)
    assert load_headers("owner/name") == load_headers("owner/name", offline=True) == (tmp_path, None)
    assert far == []


# ---- the cache, offline ----------------------------------------------------------------------------------------------


def fill_cache(cache: Path, sha: str = SHA, ref: str | None = "main", files: dict[str, bytes] = FILES) -> Path:
    """A snapshot laid out as huggingface_hub does; returns its folder."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / sha
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob = repo / "blobs" / f"{sha[:4]}-{name}"
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    if ref:
        (repo / "refs" / ref).write_text(sha)
    return snapshot


@pytest.fixture
def unplugged(monkeypatch):
    """Any attempt to connect or to look up a name fails the test."""

    def refuse(*_, **__):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("read_only", [False, True])
def test_f45_complete_cache_needs_no_connection(tmp_path, monkeypatch, unplugged, how, read_only):
    snapshot = fill_cache(tmp_path)
    if read_only:
        for path in [*tmp_path.rglob("*"), tmp_path]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    if how == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = True if how == "argument" else None
    assert load_model_files("org/name", offline=offline, cache_dir=tmp_path) == snapshot
    for path in [tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())]:
        path.chmod(0o755)


def test_f45_the_chosen_revision_only(tmp_path, unplugged):
    new, old = fill_cache(tmp_path), fill_cache(tmp_path, OLD, "v1", FILES | {"config.json": b"{}"})
    for revision, folder in ((None, new), ("main", new), ("v1", old), (OLD, old), (SHA, new)):
        assert load_model_files("org/name", revision, offline=True, cache_dir=tmp_path) == folder
    with pytest.raises(HubError, match=r"org/name \(revision v2\) is not in the cache, and offline"):
        load_model_files("org/name", "v2", offline=True, cache_dir=tmp_path)
    with pytest.raises(HubError, match="org/other is not in the cache"):
        load_model_files("org/other", offline=True, cache_dir=tmp_path)


@pytest.mark.parametrize("how", ["absent", "dangling link"])
def test_f45_missing_shard_is_named(tmp_path, unplugged, how):
    snapshot = fill_cache(tmp_path)
    if how == "absent":
        (snapshot / SHARD).unlink()
    else:
        (snapshot / SHARD).resolve().unlink()
    with pytest.raises(HubError, match=f"incomplete in .*: it lacks {SHARD}; fetch the rest"):
        load_model_files("org/name", offline=True, cache_dir=tmp_path)


def test_cache_without_weights_or_with_a_broken_index(tmp_path, unplugged):
    fill_cache(tmp_path / "a", files={"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(HubError, match=r"lacks every .safetensors file \(no other format is read\)"):
        load_model_files("org/name", offline=True, cache_dir=tmp_path / "a")
    fill_cache(tmp_path / "b", files=FILES | {"model.safetensors.index.json": b"{"})
    with pytest.raises(HubError, match="index.json is broken"):
        load_model_files("org/name", offline=True, cache_dir=tmp_path / "b")


# ---- a stub hub ------------------------------------------------------------------------------------------------------


class StubHub:
    """Answers as the hub does for org/name, or with an error for org/e<status>, and keeps a log of what was asked."""

    def __init__(self):
        self.log: list[tuple[str, str, str | None]] = []
        self.cut: set[str] = set()  # files whose first transfer ends in the middle
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_HEAD(self):
                outer.answer(self)

            do_GET = do_HEAD

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request) -> None:
        path = request.path.split("?")[0]
        self.log.append((request.command, path, request.headers.get("Range")))
        broken = re.search(r"/org/e(\d+)(\w*)", path)
        if broken:
            status, code = int(broken[1]), {"gated": "GatedRepo", "repo": "RepoNotFound", "rev": "RevisionNotFound"}
            headers = {"X-Error-Code": code[broken[2]]} if broken[2] else {}
            return self.send(request, status, b'{"error": "no"}', headers)
        if path.startswith("/api/models/org/name/revision/"):
            siblings = [{"rfilename": name} for name in SERVED | UNWANTED]
            return self.send(request, 200, json.dumps({"id": "org/name", "sha": SHA, "siblings": siblings}).encode())
        if path.startswith("/api/models/org/name/tree/"):
            entries = [
                {"type": "file", "path": n, "size": len(d), "oid": f"{len(n):040x}"}
                for n, d in (SERVED | UNWANTED).items()
            ]
            return self.send(request, 200, json.dumps(entries).encode())
        name = path.split("/resolve/")[-1].split("/", 1)[-1]
        if name not in SERVED | UNWANTED:
            return self.send(request, 404, b"{}")
        data = (SERVED | UNWANTED)[name]
        start = int((request.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self.send(request, 206 if start else 200, data[start:], headers, cut=name in self.cut)

    def send(self, request, status: int, data: bytes, headers: dict | None = None, cut: bool = False) -> None:
        request.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": len(data), **(headers or {})}.items():
            request.send_header(key, str(value))
        request.end_headers()
        if request.command != "HEAD":
            if cut:
                self.cut.clear()
                request.wfile.write(data[: len(data) * 3 // 4])
                request.connection.close()
            else:
                request.wfile.write(data)


@pytest.fixture(scope="module")
def hub():
    stub = StubHub()
    yield stub
    stub.server.shutdown()


def ask(home: Path, endpoint: str, *calls: dict, **environment: str) -> list[dict]:
    """Each call's result in a process of its own, as a user's command would run: {"ok": folder} or {"error": text}."""
    program = (
        "import json, sys\n"
        "from boleinfer.hub import HubError, load_model_files\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        print(json.dumps({'ok': str(load_model_files(**call))}))\n"
        "    except HubError as error:\n"
        "        print(json.dumps({'error': str(error)}))\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(calls)],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_f45_fetch_then_offline_then_unreachable(tmp_path, hub):
    hub.log.clear()
    hub.cut = {SHARD}
    (first,) = ask(tmp_path, hub.url, {"model": "org/name", "token": TOKEN})
    if "error" in first:  # older releases of huggingface_hub leave the second attempt to the user
        assert f"try again (the cache lacks {SHARD})" in first["error"]
        (first,) = ask(tmp_path, hub.url, {"model": "org/name", "token": TOKEN})
    folder = Path(first["ok"])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == SERVED
    asked = {path.split("/resolve/")[1].split("/", 1)[1] for _, path, _ in hub.log if "/resolve/" in path}
    assert asked == set(SERVED)  # no pickle, no code, no subfolder
    resumed = [int(r.split("=")[1].split("-")[0]) for c, p, r in hub.log if c == "GET" and p.endswith(SHARD) and r]
    assert any(start > 0 for start in resumed)  # the cut transfer went on where it had stopped
    hub.log.clear()
    calls = [{"model": "org/name", "offline": True}, {"model": "org/name", "offline": True, "revision": SHA}]
    assert ask(tmp_path, hub.url, *calls) == [first, first]
    assert ask(tmp_path, hub.url, {"model": "org/name"}, HF_HUB_OFFLINE="1") == [first]
    assert hub.log == []
    closed = "http://127.0.0.1:9"
    assert ask(tmp_path, closed, {"model": "org/name"}) == [first]
    (folder / SHARD).unlink()
    (partial,) = ask(tmp_path, closed, {"model": "org/name", "token": TOKEN})
    assert "cannot be reached" in partial["error"] and SHARD in partial["error"]
    assert ask(tmp_path, hub.url, {"model": "org/name"}) == [first]  # back online: the missing one is fetched
    assert (folder / SHARD).read_bytes() == SERVED[SHARD]


def test_f45_refusals_say_what_to_do(tmp_path, hub):
    expected = {
        "org/e401": "a token of an account that may read it",
        "org/e401gated": "accept its licence",
        "org/e403": "accept its licence",
        "org/e403gated": "accept its licence",
        "org/e404": "check the spelling",
        "org/e401repo": "check the spelling",
        "org/e404rev": "this revision does not",
        "org/e429": "refuses more requests",
        "org/e500": "answers with an error (500)",
    }
    calls = [{"model": name, "token": TOKEN} for name in expected]
    for name, answer in zip(expected, ask(tmp_path, hub.url, *calls)):
        assert expected[name] in answer["error"], (name, answer)
        assert name in answer["error"] and "\n" not in answer["error"]


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), "cache cannot be written"),
        (OSError(errno.EROFS, "Read-only file system"), "cache cannot be written"),
        (ConnectionResetError("cut"), "cannot be reached"),
        (TimeoutError("late"), "cannot be reached"),
        (RuntimeError(f"odd: {TOKEN}"), "RuntimeError: odd: <token>"),
    ],
)
def test_other_failures(tmp_path, monkeypatch, error, words):
    import huggingface_hub

    def fail(*_, **__):
        if isinstance(error, RuntimeError):
            raise error
        raise RuntimeError("wrapped") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HubError, match=re.escape(words)) as raised:
        load_model_files("org/name", token=TOKEN, offline=False, cache_dir=tmp_path)
    assert TOKEN not in str(raised.value)
