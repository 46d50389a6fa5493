"""The text of a small kernel for tests of what reads, compiles and reports kernels."""

from __future__ import annotations


def kernel(body: str, header: str = "") -> str:
    return f'{header}extern "C" __global__ void k(\n    float* x,  // [N]\n    int n)\n{{\n{body}\n}}\n'
