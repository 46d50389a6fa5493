"""The bundled model in plain torch for training: shapes, start values, forward pass, MTP steps, and its files.

Parameters live in one dict under their released names.  Weights are float32 masters; activations have the dtype
that `Model` is given.  On CUDA the delta rule is flash-linear-attention's chunked kernel (fla-core 0.6.0), elsewhere a
plain loop over tokens.
"""

import functools
import importlib
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 8189,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 320,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "output_gate_type": "swish",
    "pad_token_id": 8189,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 8192,
}
H, FFN, V = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
HQ, HKV, D = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
HK, HV, DK = CONFIG["linear_num_key_heads"], CONFIG["linear_num_value_heads"], CONFIG["linear_key_head_dim"]
KEYS, VALUES, TAPS = HK * DK, HV * CONFIG["linear_value_head_dim"], CONFIG["linear_conv_kernel_dim"]
ROT, EPS, THETA = int(D * CONFIG["partial_rotary_factor"]), 1e-6, CONFIG["rope_parameters"]["rope_theta"]
EMBED = "model.embed_tokens.weight"
F32_NAMES = ("A_log", "dt_bias", "linear_attn.norm.weight")  # float32 in the file, with bfloat16's values
SHARD_BYTES = 15 * 1024 * 1024

MLP = ("post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
FULL = (
    "input_layernorm.weight",
    *(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
)
FULL_OUT = ("self_attn.o_proj.weight", *MLP)
GDN = (
    "input_layernorm.weight",
    *(f"linear_attn.in_proj_{n}.weight" for n in ("qkv", "z", "b", "a")),
    "linear_attn.conv1d.weight",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
)
GDN_OUT = ("linear_attn.norm.weight", "linear_attn.out_proj.weight", *MLP)
MTP_IN = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight")

SHAPES_BY_NAME = {
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "mlp.gate_proj.weight": (FFN, H),
    "mlp.up_proj.weight": (FFN, H),
    "mlp.down_proj.weight": (H, FFN),
    "self_attn.q_proj.weight": (2 * HQ * D, H),
    "self_attn.k_proj.weight": (HKV * D, H),
    "self_attn.v_proj.weight": (HKV * D, H),
    "self_attn.o_proj.weight": (H, HQ * D),
    "self_attn.q_norm.weight": (D,),
    "self_attn.k_norm.weight": (D,),
    "linear_attn.in_proj_qkv.weight": (2 * KEYS + VALUES, H),
    "linear_attn.in_proj_z.weight": (VALUES, H),
    "linear_attn.in_proj_b.weight": (HV, H),
    "linear_attn.in_proj_a.weight": (HV, H),
    "linear_attn.conv1d.weight": (2 * KEYS + VALUES, 1, TAPS),
    "linear_attn.A_log": (HV,),
    "linear_attn.dt_bias": (HV,),
    "linear_attn.norm.weight": (VALUES // HV,),
    "linear_attn.out_proj.weight": (H, VALUES),
}


def shapes():
    """Every parameter's name and shape, in file order."""
    out = {EMBED: (V, H)}
    for layer, kind in enumerate(CONFIG["layer_types"]):
        for name in GDN + GDN_OUT if kind == "linear_attention" else FULL + FULL_OUT:
            out[f"model.layers.{layer}.{name}"] = SHAPES_BY_NAME[name]
    out["model.norm.weight"] = (H,)
    out |= dict.fromkeys(MTP_IN[:2], (H,)) | {"mtp.fc.weight": (H, 2 * H), "mtp.norm.weight": (H,)}
    return out | {f"mtp.layers.0.{name}": SHAPES_BY_NAME[name] for name in FULL + FULL_OUT}


def initial(seed=0):
    """Start values: projections back into the residual stream at zero, zero-centred norms at zero."""
    gen = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in shapes().items():
        if name == EMBED:
            value = torch.randn(shape, generator=gen) * 0.02
        elif name.endswith("A_log"):
            value = torch.rand(shape, generator=gen).mul(15).add(1).log()
        elif name.endswith("dt_bias"):
            dt = torch.exp(torch.rand(shape, generator=gen) * math.log(100) + math.log(1e-3))
            value = dt + torch.log(-torch.expm1(-dt))
        elif name.endswith("conv1d.weight"):
            value = torch.rand(shape, generator=gen) - 0.5
        elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            value = torch.zeros(shape)
        elif len(shape) == 2:
            value = torch.randn(shape, generator=gen) * (0.6 / math.sqrt(shape[1]))
        else:
            value = torch.ones(shape) if name.endswith("linear_attn.norm.weight") else torch.zeros(shape)
        params[name] = value
    return params


def norm(x, weight):
    """Zero-centred RMSNorm: float32 inside, rounded once."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * (1 + weight)).to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def mlp(x, ln, gate, up, down):
    n = norm(x, ln)
    return x + linear(F.silu(linear(n, gate)) * linear(n, up), down)


def rope_tables(length, device):
    freq = THETA ** (-torch.arange(0, ROT, 2, device=device, dtype=torch.float32) / ROT)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * freq
    return angle.cos()[:, None], angle.sin()[:, None]  # [T, 1, ROT / 2]


def rope(x, cos, sin):
    """Rotate the first ROT of D dims, pairs (j, j + ROT / 2); x is [B, T, heads, D]."""
    a, b = x[..., : ROT // 2].float(), x[..., ROT // 2 : ROT].float()
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., ROT:]], -1)


def attention_in(x, cos, sin, ln, wq, wk, wv, q_norm, k_norm):
    """Query, key, value [B, heads, T, D] and the output gate [B, T, HQ * D]."""
    b, t, _ = x.shape
    n = norm(x, ln)
    q, gate = linear(n, wq).view(b, t, HQ, 2 * D).chunk(2, -1)
    q = rope(norm(q, q_norm), cos, sin)
    k = rope(norm(linear(n, wk).view(b, t, HKV, D), k_norm), cos, sin)
    v = linear(n, wv).view(b, t, HKV, D)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.reshape(b, t, HQ * D)


def attention_out(x, o, gate, wo, *mlp_weights):
    o = o.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)
    return mlp(x + linear(o, wo), *mlp_weights)


def attention_layer(x, cos, sin, weights, out_weights):
    q, k, v, gate = attention_in(x, cos, sin, *weights)
    rep = HQ // HKV
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    return attention_out(x, F.scaled_dot_product_attention(q, k, v, is_causal=True), gate, *out_weights)


def gdn_in(x, ln, w_qkv, w_z, w_b, w_a, conv, a_log, dt_bias):
    """What the delta rule reads (q and k repeated to the value heads, not yet normed), and the gate z."""
    b, t, _ = x.shape
    n = norm(x, ln)
    m = F.pad(linear(n, w_qkv), (0, 0, TAPS - 1, 0))
    taps = conv.to(x.dtype)
    c = F.silu(sum(m[:, j : j + t] * taps[:, 0, j] for j in range(TAPS)))
    q, k, v = c.split([KEYS, KEYS, VALUES], -1)
    q = q.reshape(b, t, HK, DK).repeat_interleave(HV // HK, 2)
    k = k.reshape(b, t, HK, DK).repeat_interleave(HV // HK, 2)
    beta = torch.sigmoid(linear(n, w_b).float())
    g = -torch.exp(a_log) * F.softplus(linear(n, w_a).float() + dt_bias)
    return q, k, v.reshape(b, t, HV, VALUES // HV).contiguous(), g, beta, linear(n, w_z)


def gdn_out(x, o, z, weight, w_out, *mlp_weights):
    b, t, _ = x.shape
    o = o.float()
    o = weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS)
    o = (o * F.silu(z.view(b, t, HV, VALUES // HV).float())).to(x.dtype).reshape(b, t, VALUES)
    return mlp(x + linear(o, w_out), *mlp_weights)


def delta_rule_loop(q, k, v, g, beta):
    """The recurrence as written: decay, correct, read.  Any device, any grad, slow."""
    dtype = v.dtype
    q, k, v = q.float(), k.float(), v.float()
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * DK**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    state = q.new_zeros(q.shape[0], HV, DK, VALUES // HV)
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1).to(dtype)


def chunk_gradients(q, k, v, do, h, dh, w, g, dv, scale, chunk_size=64, **_):
    """The chunk-local gradients of the gated delta rule (dq, dk, dw, dg) as batched products.

    Stands in for the kernel that flash-linear-attention refuses to run on Hopper under Triton 3.4 to 3.7.0.  `h` and
    `dh` are the states [B, chunks, heads, K, V] that enter each chunk and their gradients; `g` is the cumulative log2
    decay inside the chunk.  T must be a multiple of the chunk size.
    """
    b, t, heads, _ = q.shape

    def split(x):
        return x.reshape(b, t // chunk_size, chunk_size, heads, -1).transpose(2, 3)

    q, k, v, do, dv = map(split, (q, k, v, do, dv))
    g = split(g)[..., 0].float()
    h, dh = h.to(q.dtype), dh.to(q.dtype)
    last = g[..., -1:]
    lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp2(torch.where(lower, g[..., :, None] - g[..., None, :], float("-inf")))
    ds = ((do @ v.mT).float() * decay * scale).to(q.dtype)
    dq = (do @ h.mT).float() * torch.exp2(g)[..., None] * scale
    dk = (v @ dh.mT).float() * torch.exp2(last - g)[..., None]
    dg_last = (h.float() * dh.float()).sum((-2, -1)) * torch.exp2(last[..., 0]) + (dk * k.float()).sum((-2, -1))
    dq = dq + (ds @ k).float()
    dk = dk + (ds.mT @ q).float()
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + dg_last[..., None]], -1)
    dw = -(dv.to(h.dtype) @ h.mT)

    def join(x, dtype):
        return x.transpose(2, 3).reshape(b, t, heads, -1).to(dtype)

    return join(dq, q.dtype), join(dk, k.dtype), join(dw, w.dtype), join(dg[..., None], torch.float32)[..., 0]


@functools.cache
def chunked_kernel():
    """flash-linear-attention's chunked gated delta rule with `chunk_gradients` in its backward pass."""
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    module.chunk_bwd_dqkwg = torch.compile(chunk_gradients)
    return module.chunk_gated_delta_rule


def delta_rule(q, k, v, g, beta):
    if not q.is_cuda:
        return delta_rule_loop(q, k, v, g, beta)
    return chunked_kernel()(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


class Chained(torch.autograd.Function):
    """Causal flash attention plus a few keys of one's own: softmax over (keys up to p, then own[0], own[1], ...) at p.

    The flash kernel gives its part's log-sum-exp; given the merged output and the merged log-sum-exp, its backward
    kernel gives the exact gradient of the merged softmax.
    """

    @staticmethod
    def forward(ctx, q, k, v, *own):
        flash = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        out, lse, rest = flash[0], flash[1], flash[2:8]
        scores = [(q.float() * kj.float()).sum(-1) * D**-0.5 for kj in own[::2]]
        total = torch.stack([lse, *scores]).logsumexp(0)
        out = out.float() * torch.exp(lse - total)[..., None]
        shares = [torch.exp(score - total)[..., None] for score in scores]
        out = sum((share * vj.float() for share, vj in zip(shares, own[1::2], strict=True)), out).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total, *own, *shares)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, total, *more = ctx.saved_tensors
        own, shares = more[: len(more) // 3 * 2], more[len(more) // 3 * 2 :]
        cq, ck, mq, mk, seed, offset = ctx.rest
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = back(grad, q, k, v, out, total, cq, ck, mq, mk, 0.0, True, seed, offset)
        dq, grads = dq.float(), []
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        for kj, vj, share in zip(own[::2], own[1::2], shares, strict=True):
            ds = share * ((grad.float() * vj.float()).sum(-1, keepdim=True) - mean) * D**-0.5
            dq = dq + ds * kj.float()
            grads += [(ds * q.float()).to(kj.dtype), (share * grad.float()).to(vj.dtype)]
        return dq.to(q.dtype), dk, dv, *grads


def chained_attention(q, k, v, own):
    """`Chained` on CUDA; the same by one explicit softmax elsewhere."""
    if q.is_cuda and q.dtype == torch.bfloat16:
        return Chained.apply(q, k, v, *(t for pair in own for t in pair))
    p = q.shape[2]
    scores = (q @ k.transpose(2, 3)).float() * D**-0.5
    scores = scores.masked_fill(~torch.ones(p, p, dtype=torch.bool, device=q.device).tril(), -1e30)
    scores = torch.cat([scores, *((q.float() * kj.float()).sum(-1, keepdim=True) * D**-0.5 for kj, _ in own)], -1)
    shares = torch.softmax(scores, -1)
    o = shares[..., :p] @ v.float()
    return sum((shares[..., p + j, None] * vj.float() for j, (_, vj) in enumerate(own)), o).to(q.dtype)


def mtp_in(embed, h, cos, sin, w_in, weights):
    """The MTP layer's input x, and its query, key, value (heads repeated) and gate."""
    x = linear(torch.cat([norm(embed, w_in[0]), norm(h, w_in[1])], -1), w_in[2])
    q, k, v, gate = attention_in(x, cos, sin, *weights)
    return x, q.contiguous(), k.repeat_interleave(HQ // HKV, 1), v.repeat_interleave(HQ // HKV, 1), gate


def mtp_out(x, o, gate, out_weights, last_norm):
    return norm(attention_out(x, o, gate, *out_weights), last_norm)


class Model:
    """The forward pass over a dict of parameters; `fast` compiles the pieces between the delta rules."""

    def __init__(self, params, dtype=torch.bfloat16, fast=False):
        self.params, self.dtype = params, dtype
        self.device = params[EMBED].device
        wrap = torch.compile if fast else lambda f: f
        self.gdn_in, self.gdn_out, self.attention, self.norm = map(wrap, (gdn_in, gdn_out, attention_layer, norm))
        self.mtp_in, self.mtp_out = wrap(mtp_in), wrap(mtp_out)
        self.tables = rope_tables(CONFIG["max_position_embeddings"] + 16, self.device)

    def pick(self, prefix, names):
        return tuple(self.params[prefix + name] for name in names)

    def embed(self, ids):
        return F.embedding(ids, self.params[EMBED]).to(self.dtype)

    def hidden(self, ids):
        """The hiddens after the last norm [B, T, H]: what the head and the MTP layer read."""
        x = self.embed(ids)
        cos, sin = (table[: ids.shape[1]] for table in self.tables)
        for layer, kind in enumerate(CONFIG["layer_types"]):
            prefix = f"model.layers.{layer}."
            if kind == "linear_attention":
                q, k, v, g, beta, z = self.gdn_in(x, *self.pick(prefix, GDN))
                x = self.gdn_out(x, delta_rule(q, k, v, g, beta), z, *self.pick(prefix, GDN_OUT))
            else:
                x = self.attention(x, cos, sin, self.pick(prefix, FULL), self.pick(prefix, FULL_OUT))
        return self.norm(x, self.params["model.norm.weight"])

    def logits(self, h):
        return linear(h, self.params[EMBED])

    def draft(self, h, ids, steps):
        """Recursive MTP steps as drafting runs them, for positions 0..P-1 of `h` [B, P, H] at once.

        Step s (from 0) at position p reads token p+s+1 and the last step's output.  Its query sees the first step's
        keys up to p (those are made from true hiddens) and this chain's own later keys.  `ids` holds at least
        P + steps tokens.
        """
        p = h.shape[1]
        own, outs = [], []
        for s in range(steps):
            cos, sin = (table[s : s + p] for table in self.tables)
            weights = self.pick("mtp.layers.0.", FULL)
            x, q, k, v, gate = self.mtp_in(
                self.embed(ids[:, s + 1 : s + 1 + p]), h, cos, sin, self.pick("", MTP_IN), weights
            )
            if s:
                own.append((k, v))
            else:
                first = k, v
            o = chained_attention(q, *first, own)
            h = self.mtp_out(x, o, gate, self.pick("mtp.layers.0.", FULL_OUT), self.params["mtp.norm.weight"])
            outs.append(h)
        return outs


def save(params, folder):
    """Write bfloat16 shards of at most 15 MiB with their index, and config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards, size = [{}], 0
    for name in shapes():
        value = params[name].detach().to("cpu", torch.bfloat16)
        value = value.float() if name.endswith(F32_NAMES) else value
        if size + value.nbytes > SHARD_BYTES - 65536:
            shards.append({})
            size = 0
        shards[-1][name] = value.contiguous()
        size += value.nbytes
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for shard in shards for value in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def load(folder, device="cpu"):
    """The parameters of a folder, as float32."""
    params = {}
    for file in sorted(Path(folder).glob("model-*.safetensors")):
        params |= load_file(file)
    assert {name: tuple(value.shape) for name, value in params.items()} == shapes()
    return {name: params[name].to(device, torch.float32) for name in shapes()}
