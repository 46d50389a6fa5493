"""Check, on a GPU, that the training kernels' outputs and gradients equal the plain float32 forms.

python tools/check_training_kernels.py          # prints relative errors; exit code 1 where one is over 3 %
"""

import sys

import bundled_model as bm
import torch


def compare(name, plain, fast, inputs, floats):
    """Relative errors of `fast` on bfloat16 inputs (those from `floats` on stay float32) against `plain` on float32."""
    weight = torch.randn_like(inputs[0])
    results = []
    for function, dtype in ((plain, torch.float32), (fast, torch.bfloat16)):
        xs = [
            t.detach().clone().to(dtype if i < floats else torch.float32).requires_grad_() for i, t in enumerate(inputs)
        ]
        out = function(*xs)
        (out.float() * weight).sum().backward()
        results.append([out.detach().float(), *(x.grad.float() for x in xs)])
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]
    print(name, [round(error, 5) for error in errors])
    return max(errors)


def main():
    torch.manual_seed(0)
    heads = [torch.randn(2, 256, bm.HV, bm.DK, device="cuda") for _ in range(3)]
    gates = [-torch.rand(2, 256, bm.HV, device="cuda") / 2, torch.rand(2, 256, bm.HV, device="cuda")]
    worst = compare("delta rule: o, q, k, v, g, beta", bm.delta_rule_loop, bm.delta_rule, heads + gates, 3)

    def chained(q, k, v, *own):
        return bm.chained_attention(q, k, v, list(zip(own[::2], own[1::2], strict=True)))

    inputs = [torch.randn(2, bm.HQ, 200, bm.D, device="cuda") for _ in range(7)]
    worst = max(worst, compare("chained attention: o, q, k, v, own", chained, chained, inputs, 7))
    sys.exit(not worst < 0.03)


if __name__ == "__main__":
    main()
