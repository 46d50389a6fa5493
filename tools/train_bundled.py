"""Train the bundled model with its MTP layer on encoded tokens, by the clock.

    python tools/train_bundled.py encoded out --minutes 20          # one H200, with flash-linear-attention importable

Muon moves the 2-D hidden matrices, AdamW the rest.  The learning rate warms up, stays, and falls linearly to zero by
the end of the given minutes.  The MTP layer learns three recursive steps by matching the trunk's own next-token
distribution (detached), on a part of each batch.  Weights go to `out` in the released layout every two minutes and at
the end.
"""

import argparse
import json
import math
import time
from pathlib import Path

import bundled_model as bm
import numpy as np
import torch
import torch.nn.functional as F

MTP_WEIGHTS = (0.12, 0.10, 0.08)
MTP_MARGIN = 8  # positions at a window's end that the MTP loss leaves out


class Windows:
    """Windows of length + 1 tokens: each epoch starts at a new offset and takes its windows in a new order."""

    def __init__(self, tokens, length, batch, device, seed=0):
        self.tokens, self.length, self.batch, self.device = tokens, length, batch, device
        self.gen = torch.Generator().manual_seed(seed)
        self.starts, self.at, self.epochs = torch.empty(0, dtype=torch.long), 0, 0

    def __call__(self):
        if self.at + self.batch > len(self.starts):
            offset = int(torch.randint(self.length, (1,), generator=self.gen))
            count = (len(self.tokens) - offset - 1) // self.length
            order = torch.randperm(count, generator=self.gen)
            self.starts = (order * self.length + offset).to(self.device)
            self.at, self.epochs = 0, self.epochs + 1
        starts = self.starts[self.at : self.at + self.batch]
        self.at += self.batch
        return self.tokens[starts[:, None] + torch.arange(self.length + 1, device=self.device)].long()


def orthogonal(g):
    """Newton-Schulz on a stack of matrices: singular values towards 1 (Muon's quintic)."""
    x = g.bfloat16()
    if x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if g.shape[1] > g.shape[2] else x


class Muon:
    """Orthogonalised Nesterov momentum over groups of same-shaped matrices."""

    def __init__(self, params, momentum=0.95, decay=0.05):
        self.groups, self.momentum, self.decay = {}, momentum, decay
        for p in params:
            self.groups.setdefault(p.shape, []).append(p)
        self.buffers = {shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr):
        for shape, ps in self.groups.items():
            g, buffer = torch.stack([p.grad for p in ps]), self.buffers[shape]
            buffer.lerp_(g, 1 - self.momentum)
            update = orthogonal(g.lerp_(buffer, self.momentum)).float()
            scale = max(1, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_add_(ps, list(update.unbind()), alpha=-lr * scale)


def head_loss(h, embed, targets):
    """Mean cross entropy of the tied head, and its logits."""
    logits = bm.linear(h, embed)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), logits


def distil_loss(h, embed, teacher):
    """Mean cross entropy of the tied head against the teacher's distribution."""
    logs = F.log_softmax(bm.linear(h, embed).float(), -1)
    return -(F.softmax(teacher.float(), -1) * logs).sum(-1).mean()


def learning_rate(done, step, warmup=150, flat=0.4):
    """Share of the peak rate, `done` of the whole time gone."""
    return min(1.0, (step + 1) / warmup, max(0.0, 1 - done) / (1 - flat))


class Trainer:
    def __init__(self, params, device, muon_lr, adam_lr, fast):
        self.params = {name: value.to(device).requires_grad_() for name, value in params.items()}
        self.model = bm.Model(self.params, torch.bfloat16 if device == "cuda" else torch.float32, fast)
        wrap = torch.compile if fast else lambda f: f
        self.head_loss, self.distil_loss = wrap(head_loss), wrap(distil_loss)
        hidden = [p for name, p in self.params.items() if p.ndim == 2 and min(p.shape) > 100 and name != bm.EMBED]
        ids = {id(p) for p in hidden}
        rest = [p for p in self.params.values() if id(p) not in ids]
        self.muon, self.muon_lr, self.adam_lr = Muon(hidden), muon_lr, adam_lr
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda")

    def losses(self, ids, mtp_rows):
        """Main loss, and one loss for each MTP step over the batch's first rows."""
        h = self.model.hidden(ids[:, :-1])
        embed = self.params[bm.EMBED]
        main, logits = self.head_loss(h, embed, ids[:, 1:].contiguous())
        if not mtp_rows:
            return main, []
        p = h.shape[1] - MTP_MARGIN
        teacher = logits[:mtp_rows].detach()
        outs = self.model.draft(h[:mtp_rows, :p], ids[:mtp_rows], len(MTP_WEIGHTS))
        return main, [self.distil_loss(y, embed, teacher[:, s : s + p]) for s, y in enumerate(outs, 1)]

    def step(self, ids, mtp_rows, rate):
        main, extra = self.losses(ids, mtp_rows)
        (main + sum(w * loss for w, loss in zip(MTP_WEIGHTS, extra, strict=False))).backward()
        self.muon.step(self.muon_lr * rate)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * rate
        self.adam.step()
        for p in self.params.values():
            p.grad = None
        return torch.stack([main, *extra]).detach()


def read_tokens(path, device):
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int16)).to(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoded", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20, help="from the first step after compilation to the end")
    parser.add_argument("--deadline", type=float, help="end by this Unix time instead (overrides --minutes)")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--mtp-rows", type=int, default=32, help="rows of each batch that the MTP loss sees")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--init", type=Path, help="start from this folder's weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps between log lines")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    started = time.time()
    tokens = read_tokens(args.encoded / "train.bin", device)
    held = {path.stem: read_tokens(path, device) for path in sorted(args.encoded.glob("*.bin")) if path.stem != "train"}
    rows = max(1, args.batch // max(1, len(held)))
    check = []
    for values in held.values():
        starts = torch.linspace(0, len(values) - args.length - 2, rows).long().to(device)
        check.append(values[starts[:, None] + torch.arange(args.length + 1, device=device)].long())
    check = torch.cat(check)[: args.batch]
    while len(check) < args.batch:  # same shape as a batch: nothing is compiled twice
        check = torch.cat([check, check])[: args.batch]

    trainer = Trainer(
        bm.load(args.init) if args.init else bm.initial(args.seed),
        device,
        args.muon_lr,
        args.adam_lr,
        fast=device == "cuda",
    )
    draw = Windows(tokens, args.length, args.batch, device, args.seed)
    log = []

    def report(step, seen, done, values):
        with torch.enable_grad():
            main, extra = trainer.losses(check, args.mtp_rows)
        row = {
            "step": step,
            "seconds": round(time.time() - started, 1),
            "tokens": seen,
            "done": round(done, 4),
            "epoch": draw.epochs,
            "train": [round(v, 4) for v in values.tolist()],
            "held": round(main.item(), 4),
            "held_mtp": [round(v.item(), 4) for v in extra],
        }
        log.append(row)
        print(json.dumps(row), flush=True)

    values = trainer.step(draw(), args.mtp_rows, 1 / 150)
    report(0, 0, 0.0, values)
    print(f"compiled after {time.time() - started:.1f} s", flush=True)
    begin = time.time()
    end = args.deadline or begin + args.minutes * 60
    step, seen, last, next_save = 1, args.batch * args.length, None, begin + 120
    while (now := time.time()) < end:
        done = (now - begin) / (end - begin)
        values = trainer.step(draw(), args.mtp_rows, learning_rate(done, step))
        step, seen = step + 1, seen + args.batch * args.length
        if device == "cuda":
            event = torch.cuda.Event()
            event.record()
            if last is not None:
                last.synchronize()
            last = event
        if step % args.every == 0:
            report(step, seen, done, values)
            if not math.isfinite(log[-1]["held"]):
                raise SystemExit("the loss is not finite")
        if now > next_save:
            bm.save(trainer.params, args.out)
            next_save = now + 120
    report(step, seen, 1.0, values)
    bm.save(trainer.params, args.out)
    seconds = time.time() - begin
    summary = {
        "steps": step,
        "tokens": seen,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(seen / seconds),
        "train_tokens": len(tokens),
        "args": {k: str(v) for k, v in vars(args).items()},
        "log": log,
    }
    (args.out / "training.json").write_text(json.dumps(summary))
    print(f"{step} steps, {seen} tokens, {seen / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
