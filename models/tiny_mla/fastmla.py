"""A lean DeepseekV2 (MLA, dense) forward for training: same parameter names and maths as
transformers' DeepseekV2ForCausalLM, with per-sample position ids and an arbitrary mask."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rope(x, cos, sin):
    """interleaved (GPT-J) pairing: (x0,x1),(x2,x3),...   x [..., T, D], cos/sin [..., T, D/2]"""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.H, self.dn, self.dr, self.dv, self.r = (
            c.num_attention_heads,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
            c.kv_lora_rank,
        )
        h = c.hidden_size
        self.q_proj = nn.Linear(h, self.H * (self.dn + self.dr), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(h, self.r + self.dr, bias=False)
        self.kv_a_layernorm = RMSNorm(self.r)
        self.kv_b_proj = nn.Linear(self.r, self.H * (self.dn + self.dv), bias=False)
        self.o_proj = nn.Linear(self.H * self.dv, h, bias=False)

    def forward(self, x, cos, sin, mask, sup=None):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.H, -1).transpose(1, 2)
        qn, qp = q.split([self.dn, self.dr], -1)
        ckv, kp = self.kv_a_proj_with_mqa(x).split([self.r, self.dr], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(ckv)).view(B, T, self.H, -1).transpose(1, 2)
        kn, v = kv.split([self.dn, self.dv], -1)
        qp = rope(qp, cos[:, None], sin[:, None])
        kp = rope(kp, cos, sin)
        q = torch.cat((qn.float(), qp), -1)
        k = torch.cat((kn.float(), kp[:, None].expand(-1, self.H, -1, -1)), -1)
        with torch.autocast("cpu", enabled=False):
            v = v.float()
            if T > 400:  # equal head dims take torch's flash path on CPU
                v = F.pad(v, (0, self.dn + self.dr - self.dv))
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=(self.dn + self.dr) ** -0.5)[
                ..., : self.dv
            ]
            loss = 0.0
            if sup is not None and len(sup):  # where head 0 is asked to look
                b, i, j = sup.unbind(1)
                lg = (k[b, 0] @ q[b, 0, i][..., None])[..., 0] * (self.dn + self.dr) ** -0.5
                loss = F.cross_entropy(lg.masked_fill(~mask[b, 0, i], -1e9), j)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1)), loss


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, i = c.hidden_size, c.intermediate_size
        self.gate_proj = nn.Linear(h, i, bias=False)
        self.up_proj = nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attn(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size)

    def forward(self, x, cos, sin, mask, sup=None):
        d, loss = self.self_attn(self.input_layernorm(x), cos, sin, mask, sup)
        x = x + d
        return x + self.mlp(self.post_attention_layernorm(x)), loss


class Inner(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size)


class FastMLA(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.model = Inner(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.register_buffer(
            "inv",
            1.0 / (10000.0 ** (torch.arange(0, c.qk_rope_head_dim, 2).float() / c.qk_rope_head_dim)),
            persistent=False,
        )
        for n, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.5 if "embed" in n else 0.02 if "lm_head" in n else p.shape[1] ** -0.5
                if "o_proj" in n or "down_proj" in n:
                    std *= 0.1
                nn.init.normal_(p, 0.0, std)

        self.mimetic_init()
        self.local_init()

    @torch.no_grad()
    def mimetic_init(self, alpha=0.7, beta0=1.0, beta=0.5):
        """ "Mimetic" initialisation (Trockman & Kolter 2023): attention starts out looking for
        tokens similar to the query and copying what it finds (W_q'W_k ~ I, W_o W_v ~ I)."""
        c = self.c
        H, dn, dv, r = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank

        def orth(n, m):
            q = torch.linalg.qr(torch.randn(max(n, m), min(n, m)))[0]
            return (q if n >= m else q.T).contiguous()

        for li, layer in enumerate(self.model.layers):
            a = layer.self_attn
            S = orth(r, c.hidden_size)
            g = (c.hidden_size / r) ** -0.5 if r > c.hidden_size else 1.0  # keep the latent's RMS near 1
            a.kv_a_proj_with_mqa.weight[:r] = S * g
            kb = a.kv_b_proj.weight.view(H, dn + dv, r)
            qw = a.q_proj.weight.view(H, dn + c.qk_rope_head_dim, -1)
            ow = a.o_proj.weight.view(-1, H, dv)
            C = orth(dv, r)
            for h in range(H):
                A = orth(dn, r)
                kb[h, :dn] = A
                qw[h, :dn] = alpha * A @ S * g
                if li > 0:
                    C = orth(dv, r)
                kb[h, dn:] = C
                ow[:, h] = (beta0 if li == 0 else beta) * (C @ S).T * g + 0.01 * torch.randn(
                    c.hidden_size, dv
                )

    @torch.no_grad()
    def number_init(self, ids, freqs=(1, 3, 7, 11, 17, 23, 31, 37, 43, 49)):
        """the numbers 0..99 start on circles, so that "+ 1" is a rotation"""
        e, n = self.model.embed_tokens.weight, torch.arange(100)
        h = e.shape[1]
        B = torch.linalg.qr(torch.randn(h, 2 * len(freqs)))[0]
        ang = 2 * torch.pi * n[:, None] * torch.tensor(freqs) / 100
        f = torch.cat((ang.cos(), ang.sin()), 1) @ B.T
        f = f / f.norm(dim=1, keepdim=True)
        x = e[ids]
        u = x.mean(0, keepdim=True)  # what all embeddings share
        y = x - u
        nrm = y.norm(dim=1, keepdim=True)
        y = nrm * (0.7 * y / nrm + 0.7 * f)
        e[ids] = u + y
        self.lm_head.weight[ids] = 0.1 * y

    @torch.no_grad()
    def local_init(self, offsets=(1, 2, 3, 4, 5, 6, 7, 8), kappa=3.5, nf=12):
        """Layer 0 starts with each head looking `offset` tokens back: a component shared by all
        embeddings (direction u) drives the rotary part of q and k.  Only an initialisation
        (training is free to undo it); it spares the model the long search for local heads."""
        c, a = self.c, self.model.layers[0].self_attn
        u = torch.ones(c.hidden_size) / c.hidden_size**0.5
        e = self.model.embed_tokens.weight
        e -= torch.outer(e @ u, u)
        self.lm_head.weight.copy_(e * 0.1)  # copying a token = raising its logit
        e += 0.5 * c.hidden_size**0.5 * 0.5 * u  # a fifth of the variance is shared
        D = c.qk_rope_head_dim
        p = torch.zeros(D // 2, 2)
        p[:nf, 0] = 1.0
        amp = kappa / (c.hidden_size**0.5 * 0.5 / 1.25**0.5)  # u-component of a normed embedding
        kw = a.kv_a_proj_with_mqa.weight
        kw[c.kv_lora_rank :] = kw[c.kv_lora_rank :] * 0.2 + amp * torch.outer(p.flatten(), u)
        qw = a.q_proj.weight.view(c.num_attention_heads, -1, c.hidden_size)
        for h in range(c.num_attention_heads):
            th = -offsets[h % len(offsets)] * self.inv
            rp = torch.stack(
                (p[:, 0] * th.cos() - p[:, 1] * th.sin(), p[:, 0] * th.sin() + p[:, 1] * th.cos()), -1
            )
            qw[h, c.qk_nope_head_dim :] = qw[h, c.qk_nope_head_dim :] * 0.2 + amp * torch.outer(
                rp.flatten(), u
            )
            qw[h, : c.qk_nope_head_dim] *= 0.2

    def forward(self, ids, pos, mask, tap=None, sup=None):
        """tap: also return the hidden state entering layer `tap`;
        sup: {layer: [[batch, query, key]]} attention targets of head 0 (an auxiliary loss)"""
        ang = pos.float()[..., None] * self.inv
        cos, sin = ang.cos(), ang.sin()
        x = self.model.embed_tokens(ids)
        t, loss = None, 0.0
        for i, layer in enumerate(self.model.layers):
            if i == tap:
                t = x
            x, s = layer(x, cos, sin, mask, None if sup is None else sup.get(i))
            loss = loss + s
        return self.model.norm(x), t, loss
