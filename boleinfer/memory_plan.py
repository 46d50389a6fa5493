"""How much may run at once, and what that takes on the GPU, part by part, before anything is loaded. Asks no GPU.

needs = Needs(config, weights, act, drafting)
plan(needs, options).table()            what each part takes
fit(needs, options, free, total)        the options, or a ConfigError that says which would fit
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from boleinfer.config import ConfigError, ModelConfig
from boleinfer.cuda_executor import LARGEST_CAPTURED, ONE, SMALLEST, sampled_rows
from boleinfer.device_draft import LEVEL_ROWS, DraftPlan
from boleinfer.device_waiting import RING
from boleinfer.draft_head import bytes_of, rows_of
from boleinfer.ops.attention import SCRATCH, splits_of
from boleinfer.ops.linear import most_sums
from boleinfer.ops.moe import PIECE

FLOAT, INT = 4, 4  # bytes
RESERVE = 512 << 20  # CUDA's own: compiled kernels, graphs, a library's workspace
PAGE = 2 << 20  # what the driver hands out at a time
SHORTEST, FEWEST_ROWS = 512, 256  # to which defaults shrink so that a model fits
_SIDE_ROWS = 512  # rows whose splits tree_attention works on side by side, at most


@dataclass(frozen=True)
class Options:
    """How much may run at once, and how (the fields are explained at LLM)."""

    context: int
    max_batch: int = 8
    max_rows: int = 512
    page_size: int = 16
    ring: int = 32
    draft_nodes: int = 8
    draft_depth: int = 8
    poison: bool = False
    graphs: bool = True
    memory_fraction: float = 0.9

    @property
    def scratch(self) -> int:
        """Positions behind the committed ones that drafting and verification may write."""
        return 1 + max(self.draft_nodes, self.draft_depth)

    @property
    def pages(self) -> int:
        """KV pages of one request at most."""
        return -(-(self.context + self.scratch) // self.page_size)


@dataclass(frozen=True)
class Memory:
    """Bytes that serving takes beside the weights; the formulas are docs/algorithm.md's.

    state:    recurrent state of one request, all GDN layers: Hv K V each
    conv:     convolution windows of one request: W (2 Hk K + Hv V) each
    kv:       keys and values of one token, attention layers and the MTP layer: 2 Hkv Dh each
    ring:     one committed node's k, u and g in all GDN layers
    factors:  what one drafted node adds instead of a state: k, u, g and the convolution inputs
    """

    state: int
    conv: int
    kv: int
    ring: int
    factors: int

    @classmethod
    def of(cls, c: ModelConfig, mtp: bool, item: int = FLOAT, exact: int | None = None) -> Memory:
        """item: bytes of a number of windows, keys and values; exact: of the state, u and g (None: the same)."""
        exact = item if exact is None else exact
        keys, values = _widths(c)
        gdn = c.layer_types.count("linear_attention")
        attention = len(c.layer_types) - gdn + (1 if mtp else 0)
        channels = 2 * keys + values
        ring = gdn * (item * keys + exact * (values + c.linear_num_value_heads))
        return cls(
            state=exact * gdn * values * c.linear_key_head_dim,
            conv=item * gdn * c.linear_conv_kernel_dim * channels,
            kv=item * attention * 2 * c.num_key_value_heads * c.head_dim,
            ring=ring,
            factors=ring + item * gdn * channels,
        )


@dataclass(frozen=True)
class Needs:
    """What decides how much memory a model takes.

    weights:  bytes of each array on the GPU
    act:      bytes of an activation: 2 or 4
    drafting: the ways in which the MTP layer drafts there
    """

    config: ModelConfig
    weights: Mapping[str, int]
    act: int = 2
    drafting: tuple[DraftPlan, ...] = ()

    @property
    def mtp(self) -> bool:
        """Whether there is an MTP layer."""
        return "mtp.fc" in self.weights

    @property
    def memory(self) -> Memory:
        """Bytes of a request, a token and a node."""
        return Memory.of(self.config, self.mtp, self.act, FLOAT)


class Part(NamedTuple):
    """One part of a plan: its name, its bytes, and how they come about."""

    name: str
    nbytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """The parts, largest decisions first: weights, state, keys and values, workspace, CUDA's own."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(p.nbytes for p in self.parts)

    def __getitem__(self, name: str) -> int:
        return next(p.nbytes for p in self.parts if p.name == name)

    def table(self) -> str:
        """A line for each part."""
        width = max(len(p.name) for p in self.parts)
        return "\n".join(f"  {p.name:<{width}}  {size(p.nbytes):>9}  {p.how}" for p in self.parts)


def plan(needs: Needs, o: Options) -> MemoryPlan:
    """What a model takes with these options; workspace is an upper estimate, everything else exact to a few pages."""
    memory, slots, C = needs.memory, o.max_batch, o.ring
    state = memory.state + memory.conv + C * memory.ring + slot_tables(needs, o)
    page = o.page_size * memory.kv
    kv = slots * o.pages * page
    work = allocated(workspace(needs, o))
    return MemoryPlan(
        (
            Part("weights", sum(map(allocated, needs.weights.values())), f"{len(needs.weights)} arrays"),
            Part("state", slots * state, f"{slots} requests of {size(state)}"),
            Part("keys and values", kv, f"{slots} requests of {o.pages} pages of {size(page)}, {o.context} tokens"),
            Part("workspace", work, f"steps of up to {o.max_rows} rows"),
            Part("reserve", RESERVE, "CUDA's own: kernels, graphs, libraries"),
        )
    )


def allocated(nbytes: int) -> int:
    """What an allocation takes of the GPU's memory: large ones come in pages of 2 MiB, small ones share them."""
    unit = PAGE if nbytes > PAGE // 2 else 512
    return -(-nbytes // unit) * unit


def slot_tables(needs: Needs, o: Options) -> int:
    """Bytes that sampling and drafts keep of one request: bias float64 and counts int32 over the vocabulary, rows
    that wait for the MTP layer, and little else."""
    waiting = RING * needs.config.hidden_size * needs.act if needs.drafting else 0
    return 12 * needs.config.vocab_size + 336 + INT * (o.pages + 3 * max(1, o.draft_nodes) + 4) + waiting


# ---- workspace -------------------------------------------------------------------------------------------------------


def envelopes(max_rows: int) -> list[int]:
    """The sizes of steps, as CudaExecutor makes them."""
    found = [ONE] if max_rows == ONE else [ONE, min(SMALLEST, max_rows)]
    while found[-1] < max_rows:
        found.append(min(2 * found[-1], max_rows))
    return found


def workspace(needs: Needs, o: Options) -> int:
    """Bytes of all steps: their bookkeeping, and the pool of everything that passes through them."""
    bookkeeping = sum(_bookkeeping(needs, o, R) for R in envelopes(o.max_rows)) + needs.config.vocab_size
    c, short = needs.config, {d.ids for d in needs.drafting if d.ids is not None}
    level = max(LEVEL_ROWS, o.max_batch)
    heads = sum(bytes_of(ids, c.hidden_size, needs.act, level) for ids in short if rows_of(ids) < c.vocab_size)
    return pool_bytes(needs, o) + bookkeeping + heads


def pool_bytes(needs: Needs, o: Options) -> int:
    """Bytes of the pool that all steps share: each size's logits, and the other arrays of the largest."""
    sampled, ways = sampled_rows(o.max_batch, o.draft_nodes), 1 + len(needs.drafting)
    kept = sum(
        FLOAT * min(R, sampled) * needs.config.vocab_size * (ways if R <= LARGEST_CAPTURED else 1)
        for R in envelopes(o.max_rows)
    )
    passing = pass_bytes(needs, o.max_rows, min(o.max_rows, sampled), o.max_batch, o.pages * o.page_size)
    return kept + passing + passing // 16


def pass_bytes(needs: Needs, R: int, sampled: int, B: int, context: int) -> int:
    """Bytes that are alive at once in a step of R rows of B requests, beside what it keeps.

    What the GDN layers would add to the state lives until the commit; of the layers' other arrays those of one layer.
    sampled: rows with logits; context: positions of a request
    """
    c, act, memory = needs.config, needs.act, needs.memory
    keys, values = _widths(c)
    D, Hq, Hkv, Dh, Hv = (
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.linear_num_value_heads,
    )
    gdn_layers = c.layer_types.count("linear_attention")
    pending = memory.factors + act * gdn_layers * values  # z lies beside the convolution inputs
    stream = 5 * act * D + FLOAT * c.head_dim  # residual, norms, a layer's output; cos and sin
    gdn = act * (2 * keys + 3 * values) + FLOAT * 4 * Hv
    attention = act * (4 * Hq + 2 * Hkv) * Dh + FLOAT * (Hq * (Dh + 2) + 2)
    ffn = act * 3 * c.intermediate_size
    routed = 0
    if c.num_experts:
        A, F = c.num_experts_per_tok, c.moe_intermediate_size
        ffn = act * (3 * c.shared_expert_intermediate_size + 2 * D) + FLOAT
        routed = min(R, PIECE) * (FLOAT * (c.num_experts + 3 * A) + A * (act * F + FLOAT * D)) + 16 * c.num_experts
    joined = 2 * act * D if needs.mtp else 0
    splits = splits_of(context)
    one_split = FLOAT * splits * Hq * (Dh + 2)
    side = min(min(R, _SIDE_ROWS) * one_split, max(SCRATCH * (Dh + 2) // Dh, one_split))
    widest = max(2 * (keys + values), 2 * (Hq + Hkv) * Dh, 2 * c.intermediate_size, c.vocab_size, D)
    sums = most_sums(R, widest) if act == 2 else 0
    split = 2 * R * max(D, values, Hq * Dh, c.intermediate_size) if act == 2 else 0  # of x, for FP8 weights
    logits = 0
    if needs.drafting:
        level = max(n * d.for_requests(n).width for d in needs.drafting for n in (1, B))
        logits = 2 * FLOAT * level * c.vocab_size
    sampling = FLOAT * c.vocab_size + c.vocab_size // 8 + 16  # and two doubles for 128 logits
    logits = max(logits, sampled * sampling)  # those of the step before are still there
    return (
        R * (pending + stream + joined)
        + max(R * gdn, R * attention + side, R * ffn + routed)
        + FLOAT * sums
        + split
        + logits
    )


def _bookkeeping(needs: Needs, o: Options, R: int) -> int:
    """The arrays of cuda_executor's frame of R rows."""
    B, L, drafts, more = min(o.max_batch, R), max(1, o.draft_nodes), 0, 0
    for d, n in product(needs.drafting, (1, B)):
        width = d.for_requests(n).width
        nodes = width * (d.depth - 1)
        drafts += n * (10 * nodes + 3 * d.top_k * (1 + nodes) + 5 * width)
        more += 20 * 512
    return INT * (R * 26 + B * (16 + o.pages + 4 * L + 5) + drafts) + more + 40 * 512


def _widths(c: ModelConfig) -> tuple[int, int]:
    """Hk K and Hv V."""
    return c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim


# ---- what fits -------------------------------------------------------------------------------------------------------


def fit(
    needs: Needs, o: Options, free: int, total: int, free_context: bool = False, free_rows: bool = False
) -> Options:
    """The options, when they fit in a GPU's memory of `total` bytes, of which `free` are free.

    free_rows, free_context: the user named none, so rows shrink to FEWEST_ROWS and then the context to SHORTEST at most
    Raises ConfigError with what each part takes and the largest settings that would fit.
    """
    usable = free - round((1 - o.memory_fraction) * total)

    def fits(tried: Options) -> bool:
        return plan(needs, tried).total <= usable

    tried = o
    while free_rows and not fits(tried) and tried.max_rows // 2 >= max(FEWEST_ROWS, o.max_batch):
        tried = replace(tried, max_rows=tried.max_rows // 2)
    if fits(tried):
        return tried
    if free_context:
        context = _largest(SHORTEST, o.context, lambda n: fits(replace(tried, context=n)))
        if context:
            return replace(tried, context=context)
    raise ConfigError(_does_not_fit(needs, tried, free, total, usable, fits))


def _does_not_fit(needs: Needs, o: Options, free: int, total: int, usable: int, fits: Callable[[Options], bool]) -> str:
    p = plan(needs, o)
    return (
        f"this does not fit on the GPU: it takes {size(p.total)}, and {size(max(0, usable))} may be used "
        f"({size(free)} of {size(total)} are free; memory_fraction={o.memory_fraction:g})\n{p.table()}\n"
        f"{_remedy(p, o, free, total, usable, fits)}"
    )


def _remedy(p: MemoryPlan, o: Options, free: int, total: int, usable: int, fits: Callable[[Options], bool]) -> str:
    """The largest settings that work, each alone where one does, or that none does."""
    small = replace(o, max_rows=max(o.max_batch, min(o.max_rows, FEWEST_ROWS)))
    ways = [f"{name}={value}" for name, value in _largest_of(o, fits).items() if value]
    if fits(small):
        ways.append(f"max_rows={_largest(small.max_rows, o.max_rows, lambda n: fits(replace(o, max_rows=n)))}")
    elif not ways:
        found = _largest_of(small, fits).items()
        ways += [f"{name}={value} with max_rows={small.max_rows}" for name, value in found if value]
    least = replace(o, max_batch=1, max_rows=min(o.max_rows, FEWEST_ROWS))
    if not ways and (context := _largest(1, o.context, lambda n: fits(replace(least, context=n)))):
        ways.append(f"max_batch=1, max_model_len={context} and max_rows={least.max_rows} together")
    fraction = 1 - (free - p.total) / total
    if p.total <= free and fraction <= 1:
        ways.append(f"memory_fraction={math.ceil(100 * fraction) / 100:g}")
    if not ways:
        alone = p["weights"] + p["reserve"] > usable
        ways.append(f"{'the weights alone are too much; ' if alone else ''}a smaller model, or its FP8 release")
    return f"what would fit: {', or '.join(ways)}; or use the CPU (device='cpu')"


def _largest_of(o: Options, fits: Callable[[Options], bool]) -> dict[str, int]:
    """The largest settings of the options that fit alone, 0 for none."""
    return {
        "max_model_len": _largest(1, o.context - 1, lambda n: fits(replace(o, context=n))),
        "max_batch": _largest(1, o.max_batch - 1, lambda n: fits(replace(o, max_batch=n))),
    }


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest n of low .. high that fits, where every smaller one does too; 0 for none."""
    if low > high or not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def size(n: int) -> str:
    """Bytes for people: "1.5 GiB"."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >= 1 << shift:
            return f"{n / (1 << shift):.1f} {unit}"
    return f"{n} B"
