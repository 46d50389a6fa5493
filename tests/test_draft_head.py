"""The head that drafts look at: which rows it has, and whose they are."""

from __future__ import annotations

import numpy as np

from boleinfer import device, draft_head
from boleinfer.draft_head import DraftHead


def rows(head: DraftHead) -> dict[int, int]:
    """By id, the number in its row."""
    ids, numbers = device.download(head.ids), device.download(head.rows)[:, 0]
    return {int(i): int(n) for i, n in zip(ids, numbers) if i >= 0}


def test_frequent_ids_and_those_in_use(gpu, monkeypatch):
    monkeypatch.setattr(draft_head, "MORE", 4)
    whole = np.repeat(np.arange(40, dtype=np.float32)[:, None], 8, axis=1)
    head = DraftHead(device.upload(whole), 10, 8)
    assert rows(head) == {i: i for i in range(10)} and not device.download(head.rows)[10:].any()
    head.add([3, 17, 30, 17])
    assert rows(head).keys() == {*range(10), 17, 30}
    head.add([20, 17, 21, 22])  # 17 is there; the oldest makes room
    assert rows(head).keys() == {*range(10), 30, 20, 21, 22}
    head.add(range(40))  # more than there is room for: the last ones
    assert rows(head).keys() == {*range(10), 36, 37, 38, 39}
    assert all(i == n for i, n in rows(head).items())
