"""Text to token ids and back, as the model's own tokenizer files say, chats included. Knows nothing of the model.

Decoding is defined by bytes: every id stands for some bytes (special tokens and unknown ids for none), and the bytes
of a sequence are read as UTF-8 with U+FFFD for what is invalid. A stream gives the same text, never half a character.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boleinfer.template import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class TokenizerError(ValueError):
    """Tokenizer files that are missing, broken, or of a kind that is not supported."""


class Tokenizer:
    """A byte-level BPE tokenizer (tokenizer.json) with the model's end tokens, chat template and sampling defaults.

    eos_ids:             every end-of-text id named by config.json, generation_config.json or tokenizer_config.json
    n_ids:               1 + the largest id that stands for a token
    generation_defaults: sampling settings of generation_config.json, by SamplingParams' names
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        template: str | None = None,
    ):
        """backend: a `tokenizers.Tokenizer`; settings, generation, config: the contents of tokenizer_config.json,
        generation_config.json and config.json; template: the contents of chat_template.jinja."""
        settings, generation, config = settings or {}, generation or {}, config or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._added = {i: t.content.encode() for i, t in backend.get_added_tokens_decoder().items()}
        self._bytes_of = lru_cache(maxsize=None)(self._find_bytes)
        contents = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
        self.special_tokens = {name: text for name, text in contents.items() if text is not None}
        self._check_ids(settings.get("added_tokens_decoder") or {})
        self.eos_ids = self._end_ids(generation, config)
        self.generation_defaults = _defaults(generation)
        self._template = ChatTemplate.of(template, settings.get("chat_template"), self.special_tokens)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, the four files beside it. Raises TokenizerError."""
        import tokenizers

        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json, the only tokenizer file that is read here")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} is not a valid tokenizer ({error}); fetch it again") from None
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise TokenizerError(
                f"{file} is not a byte-level tokenizer (decoder {backend.decoder}), expected ByteLevel"
            )
        template = folder / "chat_template.jinja"
        return cls(
            backend,
            _read_object(folder / "tokenizer_config.json"),
            _read_object(folder / "generation_config.json"),
            _read_object(folder / "config.json"),
            _read_text(template) if template.is_file() else None,
        )

    # ---- text and ids ------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Nothing is added; control tokens written in the text count as such.

        Raises ValueError for what is not text: another type, or a lone surrogate.
        """
        if not isinstance(text, str):
            raise ValueError(f"expected text, got {type(text).__name__}")
        try:
            text.encode("utf-8")  # the library calls a lone surrogate a wrong type
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not valid Unicode: lone surrogate {text[error.start]!r} at {error.start}"
            ) from None
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out."""
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """A decoder to be fed id by id."""
        return TextStream(self)

    @cached_property
    def n_ids(self) -> int:
        return int(self._ids.max(initial=-1)) + 1

    def valid_ids(self, vocab_size: int) -> np.ndarray:
        """bool [vocab_size]: which rows of the output matrix stand for a token; the rest must never be sampled."""
        mask = np.zeros(vocab_size, bool)
        mask[self._ids[self._ids < vocab_size]] = True
        return mask

    def tokens(self) -> dict[int, str]:
        """Every id that stands for a token, and how the file spells it."""
        return {i: token for token, i in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def _ids(self) -> np.ndarray:
        """All ids that stand for a token, int64, in any order; they need not be contiguous."""
        return np.fromiter(self._backend.get_vocab(with_added_tokens=True).values(), np.int64)

    def bytes_of(self, token_id: int) -> bytes:
        """What an id contributes to the text: b"" for special tokens and for ids that stand for nothing."""
        return self._bytes_of(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return b"" if token_id in self._special else self._added[token_id]
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        table = _byte_of_character()
        return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()

    # ---- chats -------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a chat: the template's rendering, with the assistant's turn opened unless
        add_generation_prompt=False is given. Raises ValueError with the template's own words."""
        return self._template.render(messages, variables)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt ids of a chat. Control tokens come from the template only: where text inside the messages (or the
        other variables) spells one, it is encoded as ordinary text. For all other chats: encode(apply_chat_template).
        Raises ValueError as apply_chat_template does."""
        controls = [self._added[i].decode() for i in self._special]
        pieces = self._template.render_pieces(messages, variables, controls)
        return [i for piece in pieces for i in self.encode(piece)]

    # ---- settings ----------------------------------------------------------------------------------------------------

    def _check_ids(self, declared: Mapping[str, Any]) -> None:
        """The library renumbers an added token that its vocabulary lacks; the model would then see another id."""
        for token_id, entry in declared.items():
            content = _content(entry)
            found = None if content is None else self._backend.token_to_id(content)
            if found is not None and str(found) != token_id:
                raise TokenizerError(f"{content} has id {found} in tokenizer.json, {token_id} in tokenizer_config.json")

    def _end_ids(self, generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
        inner = config.get("text_config")
        sources = {
            "config.json": config.get("eos_token_id"),
            "config.json's text_config": inner.get("eos_token_id") if isinstance(inner, Mapping) else None,
            "generation_config.json": generation.get("eos_token_id"),
        }
        ids: set[int] = set()
        for where, value in sources.items():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                    ids.add(item)
                elif item is not None:
                    raise TokenizerError(f"eos_token_id of {where} is {value!r}, expected a token id, a list or null")
        named = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return frozenset(ids if named is None else ids | {named})


class TextStream:
    """Text of ids as they come: `push` and `flush` joined equal `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes: whole characters only, possibly none."""
        return self._decoder.decode(self._tokenizer.bytes_of(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character cut short, usually nothing. The stream starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes a byte as one printable character (GPT-2): itself where printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _content(token: Any) -> str | None:
    """A special token is written as a string or as {"content": string, ...}; null means none."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    found = {key: generation[key] for key in _SAMPLING if generation.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TokenizerError(f"{key} of generation_config.json is {value!r}, expected a number")
    if generation.get("do_sample") is False:
        return {"temperature": 0.0} | {k: v for k, v in found.items() if k == "repetition_penalty"}
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read ({error}); fetch it again") from None


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object, empty when the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds a JSON {type(value).__name__}, expected an object")
    return value
