"""Chat templates: messages to prompt text by a model's own Jinja template, in a sandbox. Knows nothing of token ids.

The environment is the one that Hugging Face templates are written for: trim_blocks, lstrip_blocks, loop controls,
`raise_exception`, `strftime_now`, and a `tojson` that escapes neither HTML nor other alphabets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: never part of a text meant for interchange


class ChatTemplate:
    """A model's templates by name, and the special tokens they may refer to (`bos_token`, `eos_token`, ...)."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]):
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def of(cls, file: str | None, setting: Any, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """From chat_template.jinja, which wins, or from tokenizer_config.json: a string or a list of named ones."""
        if file is not None:
            return cls({"default": file}, special_tokens)
        if isinstance(setting, str):
            return cls({"default": setting}, special_tokens)
        named = [t for t in setting or [] if isinstance(t, Mapping)]
        return cls({str(t.get("name")): str(t.get("template")) for t in named}, special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text. Raises ValueError: no template, not a list of messages, or the template's own refusal."""
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError("a chat is a non-empty list of messages like {'role': 'user', 'content': 'Hello'}")
        wrong = [message for message in messages if not isinstance(message, Mapping)]
        if wrong:
            raise ValueError(f"a message must be like {{'role': 'user', 'content': 'Hello'}}, got {wrong[0]!r}")
        template = self._template("tool_use" if variables.get("tools") and "tool_use" in self._sources else "default")
        context = {**self._special_tokens, "add_generation_prompt": True, **variables, "messages": messages}
        try:
            return template.render(**context)
        except Exception as error:  # a template may fail in any way on messages that it does not expect
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def render_pieces(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], controls: Sequence[str]
    ) -> list[str]:
        """The prompt text cut so that no piece holds a control string that came from the messages or variables.

        Before rendering, a mark is put inside every control string in them, and after a beginning of one at the end of
        a string (another string could complete it); the rendering is cut at the marks. Without such text: one piece.
        """
        texts = list(_strings([messages, variables]))
        mark = next((m for m in _MARKS if not any(m in text for text in texts)), None)
        if mark is None:
            raise ValueError("the messages hold every Unicode noncharacter from U+FDD0 to U+FDEF; remove one")

        def defuse(text: str) -> str:
            for control in controls:
                text = text.replace(control, control[0] + mark + control[1:])
            body = text.rstrip()  # templates trim
            unfinished = any(body.endswith(control[:n]) for control in controls for n in range(1, len(control)))
            return body + mark + text[len(body) :] if unfinished else text

        return self.render(_mapped(defuse, messages), _mapped(defuse, variables)).split(mark)

    def _template(self, name: str) -> jinja2.Template:
        import jinja2

        if name not in self._sources:
            raise ValueError(
                "the model has no chat template (no chat_template.jinja, no chat_template in tokenizer_config.json); "
                "it may not be made for chats, give it plain text instead"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except jinja2.TemplateError as error:
                raise ValueError(f"the model's chat template is broken: {error}") from None
        return self._compiled[name]

    @cached_property
    def _environment(self) -> jinja2.Environment:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    """The same nested value with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(change, key): _mapped(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(change, item) for item in value]
    return value
