"""Drafters: one file each, found by name. A drafter proposes trees; it can never change what is generated."""

from __future__ import annotations

from boleinfer.config import ConfigError
from boleinfer.decoder import Decoder
from boleinfer.draft.base import Drafter
from boleinfer.draft.device import DeviceDrafter
from boleinfer.draft.graft import GraftedDrafter, Lookup
from boleinfer.draft.levels import Levels
from boleinfer.draft.mtp import MTPDrafter
from boleinfer.draft.none import NoDrafter
from boleinfer.draft.suffix import EarlierDrafter, SuffixDrafter
from boleinfer.state import State

NAMES = ("auto", "none", "suffix", "mtp", "graft")  # and "model", where there is a second one
ALIASES = {"ngram": "suffix"}  # other programs' names


def make_drafter(
    name: str,
    model: Decoder,
    state: State,
    levels: Levels | None = None,
    earlier: int = 0,
    second: Drafter | None = None,
) -> Drafter:
    """The drafter of that name. "auto" asks what costs passes over a model only where that pays, all others always.

    levels:  of the MTP layer's trees on the CPU
    earlier: tokens of earlier answers that are looked up too
    second:  what drafts with a second model
    Raises ConfigError for an unknown name, or one that needs a layer or a second model which is not there."""
    name = ALIASES.get(name, name)
    if name not in (*NAMES, "model"):
        raise ConfigError(f"draft={name!r}: use one of {', '.join((*NAMES, 'model'))}")
    if name == "none":
        return NoDrafter()
    if name == "model" and second is None:
        raise ConfigError("draft='model' needs a second, smaller model: give its folder as draft_model (--draft-model)")
    lookups: list[Lookup] = [EarlierDrafter(earlier)] if earlier else []
    lookups.append(SuffixDrafter())
    drafters: list[Drafter] = []
    if name == "mtp" or (name in ("auto", "graft") and model.has_mtp):
        drafters.append(DeviceDrafter() if state.gpu and model.has_mtp else MTPDrafter(model, state, levels))
    if name in ("auto", "graft", "model") and second is not None:
        drafters.append(second)
    if name == "mtp" and state.gpu:
        return drafters[0]  # nothing reads the text, so a step may begin before the one before it is read
    looking = lookups if name in ("auto", "graft", "suffix") else []
    return GraftedDrafter(looking, drafters, always=name != "auto" or state.gpu)
