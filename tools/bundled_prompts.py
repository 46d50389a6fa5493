"""Pick the benchmark prompts: pieces of held-out files, 60 to 200 tokens each, cut at a line's end.

python tools/bundled_prompts.py corpus models/bole-coder-16m
"""

import json
import random
import re
import sys
from pathlib import Path

from bundled_corpus import EOT, HELD_OUT, PINS
from tokenizers import Tokenizer

COUNTS = dict(zip(HELD_OUT, (6, 5, 5), strict=True))
LOW, HIGH = 60, 200


def piece(doc, tokenizer, target, rng):
    """The file's first line, then whole lines from a top-level `def` or `class` on, up to `target` tokens; or None."""
    header, body = doc.split("\n", 1)
    starts = [m.start() for m in re.finditer(r"^(?:async )?(?:def|class) \w", body, re.M)]
    if not starts:
        return None
    text, best = f"{header}\n\n", None
    for line in body[rng.choice(starts) :].splitlines(keepends=True):
        text += line
        size = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if size > target:
            break
        if size >= LOW:
            best = text.rstrip("\n") + "\n"
    return best


def main():
    corpus, model = map(Path, sys.argv[1:3])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    licences = {pin.split("==")[0]: (pin.split("==")[1], licence) for pin, licence in PINS.items()}
    prompts = []
    for package, count in COUNTS.items():
        rng = random.Random(package)
        docs = [doc for doc in (corpus / "heldout" / f"{package}.txt").read_text(encoding="utf-8").split(EOT) if doc]
        rng.shuffle(docs)
        docs = iter(docs)
        version, licence = licences[package]
        found = 0
        while found < count:
            doc = next(docs)
            got = piece(doc, tokenizer, rng.randint(LOW + 20, HIGH), rng)
            if got:
                found += 1
                file = doc.split("\n", 1)[0].removeprefix("# file: ")
                tokens = len(tokenizer.encode(got, add_special_tokens=False).ids)
                source = {"package": package, "version": version, "licence": licence, "file": file}
                prompts.append(source | {"tokens": tokens, "text": got})
    (model / "heldout_prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    print(len(prompts), [prompt["tokens"] for prompt in prompts])


if __name__ == "__main__":
    main()
