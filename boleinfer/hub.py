"""From what a user calls a model, a folder or a hub id, to a complete local folder. Reads no file but the index.

huggingface_hub does the work (cache, resuming, progress bar) and is imported only for a hub id. Only safetensors, JSON
and templates are fetched: never a pickle, never code.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_SUBFOLDERS = ["*/*"]  # other formats and copies of the weights
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NETWORK_MODULES = ("httpx", "httpcore", "requests", "urllib3")


class HubError(RuntimeError):
    """A model that cannot be found, fetched or read from the cache; the text says what to do."""


def load_model_files(
    model: str | Path,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """The local folder of a model: an existing folder as it is, else a hub id `owner/name`, fetched unless cached.

    An existing folder wins over a hub id of the same spelling (write the id with another working folder to fetch it).
    revision: branch, tag or commit (hub ids only). token: for private and gated models; else `hf auth login`'s.
    offline: True never connects; None asks the environment variable HF_HUB_OFFLINE. cache_dir: else the hub's own.
    Raises HubError.
    """
    if not str(model).strip():
        raise HubError("the model's name is empty; give a folder or a hub id (owner/name)")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise HubError(f"{model} is a file; give the folder that holds config.json and the .safetensors files")
    name = str(model)
    if not _REPO_ID.fullmatch(name):
        raise HubError(f"there is no folder {name}, and it is not a hub id (owner/name, like Qwen/Qwen3.5-0.8B)")
    if offline is None:
        offline = _offline_by_default()
    what = _at(name, revision)
    folder = _snapshot(name, revision, cache_dir) if offline else _fetched(name, revision, token, cache_dir)
    if folder is None:
        raise HubError(f"{what} is not in the cache, and offline mode is on; fetch it once while online")
    missing = _missing(folder)
    if missing:
        hint = "fetch the rest while online" if offline else "the hub cannot be reached, or the repository lacks it"
        raise HubError(f"{what} is incomplete in {folder}: it lacks {', '.join(missing)}; {hint}")
    return folder


def load_headers(
    model: str | Path,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Path, dict[str, tuple[str, tuple[int, ...]]] | None]:
    """As load_model_files without the weights: the folder, and what their files' headers say, {name: (type, shape)}.

    None in place of the headers when the weights are in the folder, which is so where nothing has to be fetched.
    """
    name, path = str(model), Path(model).expanduser()
    online = not (offline or (offline is None and _offline_by_default()))
    cached = _snapshot(name, revision, cache_dir) if online and _REPO_ID.fullmatch(name) and not path.exists() else None
    if not online or path.exists() or not _REPO_ID.fullmatch(name) or (cached is not None and not _missing(cached)):
        return load_model_files(model, revision, token, True if cached is not None else offline, cache_dir), None
    from huggingface_hub import get_safetensors_metadata

    folder = _fetched(name, revision, token, cache_dir, wanted=["*.json", "*.jinja"])
    try:
        files = get_safetensors_metadata(name, revision=revision, token=token).files_metadata.values()
    except Exception as error:  # as in _fetched
        raise HubError(_without(token, _explain(error, _at(name, revision)))) from None
    return folder, {n: (t.dtype, tuple(t.shape)) for file in files for n, t in file.tensors.items()}


def _offline_by_default() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _snapshot(name: str, revision: str | None, cache_dir: str | Path | None) -> Path | None:
    """The cache's folder of this revision, complete or not, found without any connection."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _fetched(
    name: str, revision: str | None, token: str | None, cache_dir: str | Path | None, wanted: list[str] = _WANTED
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=wanted,
            ignore_patterns=_SUBFOLDERS,
            library_name="boleinfer",
        )
    except Exception as error:  # the classes differ between releases of huggingface_hub and its HTTP library
        text = _explain(error, _at(name, revision))
        partial = _snapshot(name, revision, cache_dir)
        missing = [] if partial is None or wanted is not _WANTED else _missing(partial)
        text += f" (the cache lacks {', '.join(missing)})" if missing else ""
        raise HubError(_without(token, text)) from None
    return Path(folder)


def _at(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} (revision {revision})"


def _explain(error: BaseException, what: str) -> str:
    """One sentence on what went wrong and what to do, from the error and the errors that led to it."""
    chain = list(_chain(error))
    kinds = {cls.__name__ for e in chain for cls in type(e).__mro__}
    status = next((s for e in chain if (s := getattr(getattr(e, "response", None), "status_code", None))), None)
    full = next((e for e in chain if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)), None)
    if full is not None:
        return f"the disk is full while fetching {what}; free some space or set HF_HOME to a folder on another disk"
    if "GatedRepoError" in kinds or status == 403:
        return (
            f"access to {what} is restricted: accept its licence on its page at the hub, "
            "then give a token of that account (token=..., --token or `hf auth login`)"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{what}: the model exists, this revision does not; check the branch, tag or commit"
    if "RepositoryNotFoundError" in kinds or status in (401, 404):
        return (
            f"{what} was not found on the hub: check the spelling; "
            "if the model is private, a token of an account that may read it is needed (token=... or `hf auth login`)"
        )
    if status == 429:
        return f"the hub refuses more requests for now (429) while fetching {what}; wait a little, or give a token"
    if status is not None:
        return f"the hub answers with an error ({status}) for {what}; try again later"
    denied = next(
        (e for e in chain if isinstance(e, PermissionError) or getattr(e, "errno", None) == errno.EROFS), None
    )
    if denied is not None:
        return f"the cache cannot be written while fetching {what} ({denied}); set HF_HOME to a folder of your own"
    if any(
        type(e).__module__.startswith(_NETWORK_MODULES) or isinstance(e, ConnectionError | TimeoutError) for e in chain
    ):
        return (
            f"the hub cannot be reached or was cut off; {what} is not all in the cache; check the network and try again"
        )
    return f"{what} could not be fetched: {type(error).__name__}: {error}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _without(token: str | None, text: str) -> str:
    from huggingface_hub import get_token

    for secret in (token, get_token()):
        text = text.replace(secret, "<token>") if secret else text
    return text


def _missing(folder: Path) -> list[str]:
    """Files that the model needs and the folder lacks; a link whose target is gone counts as absent."""
    needed = ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            needed += sorted({str(name) for name in listed.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise HubError(f"{index} is broken: delete {index.resolve()} and fetch the model again") from None
    absent = [name for name in needed if not (folder / name).exists()]
    weights = [file for file in folder.glob("*.safetensors") if file.exists()]
    return absent if absent or weights else ["every .safetensors file (no other format is read)"]
