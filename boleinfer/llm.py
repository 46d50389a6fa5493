"""The library's front door: load a model, generate, stream, chat. Text in, text out; the loop itself is in engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from boleinfer import backend, hub, models
from boleinfer import device as device_arrays
from boleinfer.config import ConfigError, read_config
from boleinfer.decoder import Decoder
from boleinfer.draft import make_drafter
from boleinfer.draft.base import Drafter, Limits
from boleinfer.draft.levels import Levels
from boleinfer.draft.model import ModelDrafter, check_same_tokens
from boleinfer.engine import Engine
from boleinfer.memory_plan import Options
from boleinfer.output import TextOutput
from boleinfer.published import published
from boleinfer.request import Request, RequestError, Stats
from boleinfer.sampling import Sampler, SamplingParams, new_seed
from boleinfer.scheduler import Scheduler
from boleinfer.tokenizer import Tokenizer

BUNDLED = Path(models.__file__).parent / "bole-coder-16m"
CPU_ROWS, GPU_ROWS = 512, 2048  # max_rows unless asked for
CPU_NODES, GPU_NODES = 8, 63  # draft_nodes unless asked for
READS_MTP = {"mtp": True, "none": False, "suffix": False, "ngram": False, "model": False}  # others: if there is one
LONGEST_DEFAULT = 8192  # context unless asked for more: its KV pages are reserved when the model is loaded

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    finish_reason: "stop", "length", "error" or "abort"; logprobs: per token {id: natural log}, the chosen id first
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, float]] | None
    stats: Stats
    seed: int
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt; the first one's fields are there directly too."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.outputs[0].logprobs

    @property
    def stats(self) -> Stats:
        return self.outputs[0].stats


@dataclass(frozen=True)
class StreamChunk:
    """A piece of an answer; finish_reason and output come with the last piece only."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None


@dataclass(frozen=True)
class _Running:
    """A request and the text it grows."""

    request: Request
    text: TextOutput
    choice: int

    def completion(self) -> CompletionOutput:
        r, s = self.request, self.request.sampler
        self.text.end()
        return CompletionOutput(
            index=self.choice,
            text=self.text.text,
            token_ids=r.generated,
            finish_reason=r.finish_reason,
            stop_reason=self.text.stopped_by if r.stop_reason is None else r.stop_reason,
            logprobs=r.logprobs if r.params.logprobs is not None else None,
            stats=r.stats,
            seed=s.seed,
            error=r.error,
        )


class LLM:
    """A loaded model with its engine.

    model:          folder or hub id of a checkpoint (None: the model that ships with the package)
    device:         "auto" (a GPU that works, else the CPU), "cpu" or "cuda"
    dtype:          "auto" (float32 on the CPU, bfloat16 on the GPU), "float32" or "bfloat16", the activations' type
    draft:          "auto", "none", "suffix", "mtp", "graft", "model", or a Drafter
    draft_model:    folder or hub id of a smaller model of the same tokenizer, which drafts too (on the CPU)
    max_model_len:  tokens of a request at most, prompt included (None: the model's own limit, at most 8,192, and on a
                    GPU what its memory holds, at least 512)
    max_batch:      requests that run at once, each with its own state; others wait
    max_rows:       rows of one step; longer prompts are cut into pieces (None: 512, on the GPU 2,048 where they fit)
    page_size:      positions of a page of keys and values
    memory_fraction: the part of the GPU's memory that may be in use, other programs' included, once all is loaded
    draft_nodes:    drafted tokens of a request and step at most (None: 8, on a GPU 63); draft_depth: of one path
    draft_top_k, draft_width: children of a node, and nodes of a level that have some, in a tree that a model or the MTP
                    layer drafts on the CPU
    draft_earlier:  tokens of earlier answers, of whatever request, that are looked up too
    ring:           committed factors kept before the state is folded
    random_weights: the name of a published size, such as "qwen3.5-9b": its shapes with seeded random weights and the
                    bundled model's tokenizer, for measuring; or "NAME-fp8"
    graphs:         False launches the GPU's kernels one by one (debugging)
    poison:         fill unwritten memory with NaN (tests)
    progress:       called with (bytes done, bytes in all) while weights load

    Raises ConfigError, WeightsError, HubError for a model or an option that cannot be used, ToolchainError for a GPU
    that cannot.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        draft: str | Drafter = "auto",
        revision: str | None = None,
        token: str | None = None,
        offline: bool | None = None,
        max_model_len: int | None = None,
        max_batch: int = 8,
        max_rows: int | None = None,
        page_size: int = 16,
        ring: int = 32,
        draft_nodes: int | None = None,
        draft_depth: int = 8,
        draft_top_k: int = 3,
        draft_width: int = 1,
        draft_earlier: int = 0,
        draft_model: str | Path | None = None,
        random_weights: str | None = None,
        memory_fraction: float = 0.9,
        graphs: bool = True,
        poison: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        _one_of("device", device, ("auto", "cpu", "cuda"))
        _one_of("dtype", dtype, ("auto", "float32", "bfloat16"))
        if model is not None and random_weights is not None:
            raise ConfigError(f"model={str(model)!r} and random_weights={random_weights!r} were both given; give one")
        gpu = backend.choose_device(device)
        asked_rows, max_rows = max_rows, max(max_batch, GPU_ROWS if gpu else CPU_ROWS) if max_rows is None else max_rows
        _at_least(1, max_batch=max_batch, max_rows=max_rows, page_size=page_size, ring=ring)
        if not 0 < memory_fraction <= 1:
            raise ConfigError(f"memory_fraction={memory_fraction}: above 0 and up to 1")
        _at_least(1, draft_top_k=draft_top_k, draft_width=draft_width)
        draft_nodes = (GPU_NODES if gpu else CPU_NODES) if draft_nodes is None else draft_nodes
        _at_least(0, draft_nodes=draft_nodes, draft_depth=draft_depth, draft_earlier=draft_earlier)
        if draft_model is not None and (gpu or draft not in ("auto", "graft", "model")):
            raise ConfigError(
                f"draft_model={str(draft_model)!r} with draft={draft!r} on the {'GPU' if gpu else 'CPU'}: a second "
                "model drafts on the CPU only, with draft='auto', 'graft' or 'model'"
            )
        if max_rows < max_batch:
            raise ConfigError(f"max_rows={max_rows} is less than max_batch={max_batch}; a running request needs a row")
        if dtype == "bfloat16" and not gpu:
            raise ConfigError("dtype='bfloat16': the CPU computes in float32; use 'auto' or 'float32'")
        self.gpu = gpu
        if random_weights is None:
            folder = BUNDLED if model is None else hub.load_model_files(str(model), revision, token, offline)
            self.config, source = read_config(folder / "config.json"), backend.Source(folder)
        else:
            size = random_weights.lower()
            folder, self.config = BUNDLED, published(size.removesuffix("-fp8"))
            source = backend.Source(seed=0, fp8=size.endswith("-fp8"))
        context = _context(max_model_len, self.config.max_position_embeddings)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.default_params = SamplingParams.from_dict(self.tokenizer.generation_defaults)
        self._valid = self.tokenizer.valid_ids(self.config.vocab_size)
        options = Options(
            context, max_batch, max_rows, page_size, ring, draft_nodes, draft_depth, poison, graphs, memory_fraction
        )
        mtp = READS_MTP.get(draft, "auto") if isinstance(draft, str) else "auto"
        if gpu:
            act = device_arrays.dtype("float" if dtype == "float32" else "bf16")
            drafts = draft in ("auto", "mtp", "graft")
            needs = backend.needs(self.config, source, options, mtp, act, drafts)
            options = backend.fit_cuda(needs, options, max_model_len is None, asked_rows is None)
            executor = backend.load_cuda(self.config, source, options, mtp, act, self._valid, needs, progress)
        else:
            executor = backend.load_host(self.config, source, options, mtp, progress)
        self.max_model_len, max_rows = options.context, options.max_rows
        self.model: Decoder = executor.model
        self._state = executor.state
        limits = Limits(nodes=draft_nodes, depth=draft_depth, min_prob=0.1)
        if isinstance(draft, str):
            levels = Levels(draft_top_k, draft_width, max(1, draft_depth))
            second = None
            if draft_model is not None:
                small = hub.load_model_files(str(draft_model), None, token, offline)
                second = self._second(small, options, levels, progress)
            drafter = make_drafter(draft, self.model, self._state, levels, draft_earlier, second)
        else:
            drafter = draft
        scheduler = Scheduler(self._state, max_batch, max_rows, max_rows, limits, options.scratch)
        self.engine = Engine(executor, drafter, scheduler)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers to one or many prompts, each a string or a list of ids, in their order.

        params: one for all, one a prompt, or None for the model's own defaults.
        Raises RequestError, naming the prompt, before anything runs."""
        many = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts need as many params, or one for all; got {len(each)}")
        groups = [
            self._start(p, q, f"prompt {i}" if len(many) > 1 else "the prompt")
            for i, (p, q) in enumerate(zip(many, each))
        ]
        everything = [running for group in groups for running in group]
        try:
            for running in everything:
                self._submit(running)
            while any(not r.request.finished for r in everything):
                self.engine.step()
        finally:
            for running in everything:
                self.engine.drop(running.request)
        return [self._output(p, group) for p, group in zip(many, groups)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamChunk, None, None]:
        """The answer piece by piece; closing the iterator early frees what the request holds."""
        group = self._start(prompt, params, "the prompt")
        if len(group) > 1:
            raise RequestError(f"n={len(group)}: a stream carries one answer; use generate for several")
        return self._stream(prompt, group[0])

    def chat(
        self, messages: Sequence[dict], params: SamplingParams | None = None, **template_vars: Any
    ) -> RequestOutput:
        """The answer to a conversation of {"role", "content"} messages, laid out by the model's own chat template."""
        return self.generate([self.tokenizer.chat_ids(messages, **template_vars)], params)[0]

    def chat_stream(
        self, messages: Sequence[dict], params: SamplingParams | None = None, **template_vars: Any
    ) -> Generator[StreamChunk, None, None]:
        """As chat, piece by piece."""
        return self.stream(self.tokenizer.chat_ids(messages, **template_vars), params)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, vocab]: row t holds the logits of the token after ids[t]."""
        tokens = self._check_ids(list(ids), "ids")
        rows = self.engine.scheduler.max_rows
        place = self._state.take(len(tokens))
        try:
            parts = [
                self.engine.executor.logits(tokens[start : start + rows], start, place)
                for start in range(0, len(tokens), rows)
            ]
            return np.concatenate(parts)
        finally:
            self._state.give_back(place)

    def _second(
        self, folder: Path, options: Options, levels: Levels, progress: Callable[[int, int], None] | None
    ) -> ModelDrafter:
        """A smaller model that drafts, with a state for as many requests as there may be."""
        check_same_tokens(self.tokenizer, Tokenizer.from_folder(folder))
        config = read_config(folder / "config.json")
        host = backend.load_host(config, backend.Source(folder), options, False, progress)
        return ModelDrafter(host.model, host.state, self.config.vocab_size, options.scratch, levels)

    def _start(self, prompt: Prompt, params: SamplingParams | None, what: str) -> list[_Running]:
        """The requests of a prompt, one a choice; nothing is reserved yet."""
        params = self.default_params if params is None else params
        tokens = self._check_ids(self._tokens(prompt, what), what)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(tokens) + params.max_tokens)
        seed = new_seed() if params.seed is None else params.seed
        end_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        )
        group = []
        for choice in range(params.n):
            stream = self.tokenizer.stream()
            text = TextOutput(stream, params.stop_strings)
            try:
                sampler = Sampler(params, seed, choice, tokens, end_ids, self._valid)
                self.engine.executor.check(sampler)
            except ValueError as error:
                raise RequestError(str(error)) from None
            group.append(_Running(Request(list(tokens), params, sampler, limit, end_ids, text.push), text, choice))
        return group

    def _submit(self, running: _Running) -> None:
        request = running.request
        if len(request.tokens) >= request.limit:
            request.finish_reason = "length"
        else:
            self.engine.add(request)

    def _stream(self, prompt: Prompt, running: _Running) -> Generator[StreamChunk, None, None]:
        request, sent = running.request, 0
        try:
            self._submit(running)
            while not request.finished:
                self.engine.step()
                if not request.finished and (piece := running.text.take()):
                    yield StreamChunk(piece, request.generated[sent:])
                    sent = len(request.generated)
            output = self._output(prompt, [running])
            yield StreamChunk(running.text.take(), request.generated[sent:], request.finish_reason, output)
        finally:
            self.engine.drop(request)

    def _output(self, prompt: Prompt, group: list[_Running]) -> RequestOutput:
        first = group[0].request
        return RequestOutput(
            prompt if isinstance(prompt, str) else None,
            first.tokens[: first.prompt_length],
            [running.completion() for running in group],
        )

    def _tokens(self, prompt: Prompt, what: str) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(f"{what} cannot be encoded: {error}") from None
        if isinstance(prompt, Sequence | np.ndarray) and all(map(_is_id, prompt)):
            return [int(i) for i in prompt]
        raise RequestError(f"{what} must be a string or a list of token ids, got {type(prompt).__name__}")

    def _check_ids(self, tokens: list[int], what: str) -> list[int]:
        if not tokens:
            raise RequestError(f"{what} is empty: at least one token is needed to continue from")
        bad = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if bad is not None:
            raise RequestError(f"{what} holds token id {bad}; ids run from 0 to {self.config.vocab_size - 1}")
        if len(tokens) > self.max_model_len:
            raise RequestError(
                f"{what} has {len(tokens)} tokens, more than the {self.max_model_len} allowed here; shorten it, or "
                f"load the model with a larger max_model_len (its own limit is {self.config.max_position_embeddings})"
            )
        return tokens


def _context(asked: int | None, own: int) -> int:
    if asked is None:
        return min(own, LONGEST_DEFAULT)
    if not 1 <= asked <= own:
        raise ConfigError(f"max_model_len={asked}: this model takes 1 to {own} tokens (max_position_embeddings)")
    return asked


def _at_least(bound: int, **options: int) -> None:
    for name, value in options.items():
        if value < bound:
            raise ConfigError(f"{name}={value}: at least {bound} is needed")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: use {' or '.join(map(repr, allowed))}")


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(f"prompts must be a string, a list of ids, or a list of those; got {type(prompts).__name__}")
    if len(prompts) and all(map(_is_id, prompts)):
        return [cast(Sequence[int], prompts)]
    if not len(prompts):
        raise RequestError("the list of prompts is empty: give at least one prompt")
    return list(cast(Sequence[Prompt], prompts))
