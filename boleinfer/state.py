"""What a model remembers of each request: KV pages, convolution windows, GDN checkpoints with their factor rings.

`forward` only reads it (its own rows lie in scratch places behind the committed ones); `commit` is the only writer.
A rejected draft therefore needs no rollback: there is nothing to undo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boleinfer import device
from boleinfer.config import ModelConfig
from boleinfer.device import NAN_BYTE, Array
from boleinfer.device_forest import DeviceForest, Paths
from boleinfer.forest import Forest
from boleinfer.memory import Allocator, OutOfPlaces, buffer
from boleinfer.ops import gdn_commit
from boleinfer.ops.attention import move_kv
from boleinfer.ring import Ring


@dataclass(frozen=True)
class Batch:
    """One step's rows and where each request keeps its memory; all of it on the GPU, or none.

    slot:       int32 [B], row of the GDN and convolution arrays
    page_table: int32 [B, M], the pages of each request in order of position (-1 past its own)
    """

    forest: Forest | DeviceForest
    slot: Array
    page_table: Array


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one attention layer, [pages, P, Hkv, Dh] each; keys after norm and rotation.

    Of all layers together [layers, ...], as in GDNLayer.
    """

    k: Array
    v: Array


@dataclass(frozen=True)
class GDNLayer:
    """One GDN layer: the last convolution inputs [slots, W, Cc], the checkpoint S [slots, Hv, K, V], the ring."""

    window: Array
    S: Array
    ring: Ring


@dataclass(frozen=True)
class Factors:
    """What the rows of one step would add to a GDN layer, where they do not lie there already.

    x [R, Cc], convolution inputs; k [R, Hk, K], u [R, Hv, V] and log decay g [R, Hv] of the recurrence
    """

    x: Array
    k: Array
    u: Array
    g: Array


@dataclass(frozen=True)
class Place:
    """Where one request lives: its slot and its pages, in order of position."""

    slot: int
    pages: np.ndarray


class State:
    """The memory of all requests of one model.

    config:    sizes and layer types
    slots:     requests that can live at once
    pages:     KV pages shared by all of them, page_size positions each
    ring:      C, committed factors a slot may hold before they are folded into its checkpoint
    mtp:       whether to keep the KV of the MTP layer too
    dtype:     of windows, keys and values; S and what the ring adds to it are float32 on the GPU whatever it is
    gpu:       whether the arrays lie on the current GPU
    poison:    fill everything with NaN, here and whenever a place is given back (tests)
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        pages: int,
        page_size: int = 16,
        ring: int = 32,
        mtp: bool = False,
        dtype: np.typing.DTypeLike = np.float32,
        gpu: bool = False,
        poison: bool = False,
    ):
        c = config
        Hk, K, Hv, V = (
            c.linear_num_key_heads,
            c.linear_key_head_dim,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
        )
        self.page_size, self.poison, self.dtype, self.gpu = page_size, poison, np.dtype(dtype), gpu
        self.slots = Allocator("state slots", slots)
        self.pages = Allocator("KV pages", pages)
        exact, make = (np.float32, device.buffer) if gpu else (dtype, buffer)

        def of_layers(n: int, *shape: int, dtype: np.typing.DTypeLike) -> Array:
            """One piece of memory for n layers (large pages of the system then serve small layers too)."""
            return make((n, *shape), dtype, poison)

        gdn_layers = c.layer_types.count("linear_attention")
        attention_layers = len(c.layer_types) - gdn_layers
        page_shape = (page_size, c.num_key_value_heads, c.head_dim)
        self._gdn = GDNLayer(
            of_layers(gdn_layers, slots, c.linear_conv_kernel_dim, 2 * Hk * K + Hv * V, dtype=dtype),
            of_layers(gdn_layers, slots, Hv, K, V, dtype=exact),
            Ring(
                of_layers(gdn_layers, slots, ring, Hk, K, dtype=dtype),
                of_layers(gdn_layers, slots, ring, Hv, V, dtype=exact),
                of_layers(gdn_layers, slots, ring, Hv, dtype=exact),
            ),
        )
        pages_of = [of_layers(attention_layers + mtp, pages, *page_shape, dtype=dtype) for _ in ("k", "v")]
        self._kv = KVLayer(*(array[:attention_layers] for array in pages_of))
        recurrent, paged = iter(range(gdn_layers)), iter(range(attention_layers + mtp))

        def kv_layer() -> KVLayer:
            i = next(paged)
            return KVLayer(*(array[i] for array in pages_of))

        def gdn_layer() -> GDNLayer:
            i, of = next(recurrent), self._gdn
            return GDNLayer(of.window[i], of.S[i], Ring(*(array[i] for array in of.ring)))

        self.layers = [gdn_layer() if kind == "linear_attention" else kv_layer() for kind in c.layer_types]
        self.mtp = kv_layer() if mtp else None

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.page_size)

    def take(self, positions: int) -> Place:
        """A fresh place for a request of at most so many positions, scratch rows included: nothing is remembered.

        Raises OutOfPlaces, holding nothing, when no slot or too few pages are free."""
        if not self.slots.free:
            raise OutOfPlaces(f"all {self.slots.size} state slots are taken")
        place = Place(pages=self.pages.take(self.pages_for(positions)), slot=int(self.slots.take(1)[0]))
        for layer in self.layers:
            if isinstance(layer, GDNLayer):
                device.fill(layer.S[place.slot], 0)
                device.fill(layer.window[place.slot], 0)
        return place

    def give_back(self, place: Place) -> None:
        """Frees the slot and the pages of a request."""
        self.slots.give_back(np.asarray([place.slot]))
        self.pages.give_back(place.pages)
        if self.poison:
            for layer in [*self.layers, self.mtp]:
                if isinstance(layer, GDNLayer):
                    for array in (layer.window, layer.S, *layer.ring):
                        device.fill(array[place.slot], NAN_BYTE)
                elif layer is not None:
                    for page in place.pages:
                        device.fill(layer.k[page], NAN_BYTE)
                        device.fill(layer.v[page], NAN_BYTE)

    def batch(self, forest: Forest, places: Sequence[Place]) -> Batch:
        """The forest together with where its requests live."""
        table = np.full((len(places), max(len(p.pages) for p in places)), -1, np.int32)
        for row, place in zip(table, places):
            row[: len(place.pages)] = place.pages
        return Batch(forest, np.asarray([p.slot for p in places], np.int32), table)

    def commit(self, batch: Batch, pending: Sequence[Factors | None], paths: Sequence[np.ndarray] | Paths) -> None:
        """Makes one path of each request's tree part of its past; what lies off the paths is forgotten.

        pending: per layer the factors that `forward` returned (None at attention layers, and where they are in place)
        paths:   per request the accepted flat rows from a root down; may be empty
        """
        found = [f for f in pending if f is not None]
        x, k, u, g = ([getattr(f, name) for f in found] for name in "xkug")
        memory = self._gdn
        gdn_commit.commit(memory.window, memory.S, memory.ring, x, k, u, g, batch.slot, batch.forest, paths)
        if not (isinstance(batch.forest, DeviceForest) and batch.forest.single):  # its row lies where it belongs
            move_kv(self._kv.k, self._kv.v, batch.page_table, batch.forest, paths)
