"""boleinfer: tree speculative decoding for hybrid-attention models. `from boleinfer import LLM, SamplingParams`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_root = Path(__file__).resolve().parent.parent
if (_root / "models" / "qwen3_5.py").exists():  # a checkout: boleinfer.models lies beside this folder
    __path__.append(str(_root))

if TYPE_CHECKING:
    from boleinfer.llm import LLM, CompletionOutput, RequestOutput
    from boleinfer.sampling import SamplingParams


def __getattr__(name: str):
    if name in __all__:  # imported on first use, so that `import boleinfer` stays quick
        from importlib import import_module

        module = "boleinfer.sampling" if name == "SamplingParams" else "boleinfer.llm"
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'boleinfer' has no attribute {name!r}")
