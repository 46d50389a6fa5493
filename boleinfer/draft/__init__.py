"""Drafters: one file each, found by name. A drafter proposes trees; it can never change what is generated."""

from __future__ import annotations

from boleinfer.decoder import Decoder
from boleinfer.draft.auto import GraftedDrafter
from boleinfer.draft.base import Drafter
from boleinfer.draft.device import DeviceDrafter
from boleinfer.draft.mtp import MTPDrafter
from boleinfer.draft.ngram import NgramDrafter
from boleinfer.draft.none import NoDrafter
from boleinfer.state import State

NAMES = ("auto", "none", "ngram", "mtp")


def make_drafter(name: str, model: Decoder, state: State) -> Drafter:
    """The drafter of that name; "auto" is n-gram lookup, with the MTP layer's tree where the checkpoint has one.

    Raises ValueError for an unknown name, or for "mtp" where there is no MTP layer."""
    if name not in NAMES:
        raise ValueError(f"draft={name!r}: use one of {', '.join(NAMES)}")
    if name == "none":
        return NoDrafter()
    if name == "ngram" or (name == "auto" and not model.has_mtp):
        return NgramDrafter()
    if state.gpu and model.has_mtp:
        return DeviceDrafter(NgramDrafter() if name == "auto" else None)
    mtp = MTPDrafter(model, state)
    return mtp if name == "mtp" else GraftedDrafter(NgramDrafter(), mtp)
