"""Widen the compact training dims to the DeepSeek-V2-Lite attention shape, exactly, and write
the HF checkpoint.

Training uses kv_lora_rank 128 / qk_nope 32 / v 32 (4x cheaper on two CPU cores).  The released
model has kv_lora_rank 512 / qk_nope 128 / v 128.  The map is function-preserving:
  latent   c' = 2 Q c            (Q: 512x128, orthonormal columns; the RMS, hence eps, is unchanged)
  norm     its weight w is folded into kv_b_proj (kv_b' = 1/2 kv_b diag(w) Q^T), the new one is 1
  k_nope' = U_h k_nope, q' = sqrt(192/96) [U_h q_nope ; q_pe]     (softmax scale 192^-1/2 vs 96^-1/2)
  v'      = V_h v,  o_proj'_h = o_proj_h V_h^T
Q, U_h, V_h are random, so every latent channel is in use; k_pe is unchanged.
"""

import argparse
import os

import torch


def orth(g, n, m):
    q, r = torch.linalg.qr(torch.randn(n, m, generator=g, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r))


def widen(sd, cfg, r=512, dn=128, dv=128, seed=1):
    g = torch.Generator().manual_seed(seed)
    H, r0, n0, v0, dr = (
        cfg["num_attention_heads"],
        cfg["kv_lora_rank"],
        cfg["qk_nope_head_dim"],
        cfg["v_head_dim"],
        cfg["qk_rope_head_dim"],
    )
    if (r0, n0, v0) == (r, dn, dv):
        return sd, cfg
    out = {k: v.clone() for k, v in sd.items()}
    s = ((dn + dr) / (n0 + dr)) ** 0.5
    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}.self_attn."
        Q = orth(g, r, r0)
        gain = (r / r0) ** 0.5
        ka = sd[p + "kv_a_proj_with_mqa.weight"].double()
        out[p + "kv_a_proj_with_mqa.weight"] = torch.cat((gain * Q @ ka[:r0], ka[r0:])).float()
        w = sd[p + "kv_a_layernorm.weight"].double()
        out[p + "kv_a_layernorm.weight"] = torch.ones(r)
        kb = (sd[p + "kv_b_proj.weight"].double() * w) @ Q.T / gain
        kb = kb.view(H, n0 + v0, r)
        q = sd[p + "q_proj.weight"].double().view(H, n0 + dr, -1)
        o = sd[p + "o_proj.weight"].double().view(-1, H, v0)
        kbn, qn, on = [], [], []
        for h in range(H):
            U, V = orth(g, dn, n0), orth(g, dv, v0)
            kbn.append(torch.cat((U @ kb[h, :n0], V @ kb[h, n0:])))
            qn.append(torch.cat((U @ q[h, :n0], q[h, n0:])) * s)
            on.append(o[:, h] @ V.T)
        out[p + "kv_b_proj.weight"] = torch.cat(kbn).float()
        out[p + "q_proj.weight"] = torch.cat(qn).float()
        out[p + "o_proj.weight"] = torch.cat(on, 1).float()
    return out, dict(cfg, kv_lora_rank=r, qk_nope_head_dim=dn, v_head_dim=dv)


def hf_config(cfg):
    from transformers import DeepseekV2Config

    L = cfg["num_hidden_layers"]
    return DeepseekV2Config(
        vocab_size=cfg["vocab_size"],
        hidden_size=cfg["hidden_size"],
        intermediate_size=cfg["intermediate_size"],
        num_hidden_layers=L,
        num_attention_heads=cfg["num_attention_heads"],
        num_key_value_heads=cfg["num_attention_heads"],
        q_lora_rank=None,
        kv_lora_rank=cfg["kv_lora_rank"],
        qk_rope_head_dim=64,
        qk_nope_head_dim=cfg["qk_nope_head_dim"],
        v_head_dim=cfg["v_head_dim"],
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        # plain RoPE, declared as yarn that stretches by 1: the only form SGLang's CPU engine takes for MLA
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        # dense everywhere: no layer index reaches first_k_dense_replace.  n_routed_experts stays an
        # int (None breaks SGLang's weight loader and transformers' strict config); it is never used.
        first_k_dense_replace=L,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        moe_layer_freq=1,
        norm_topk_prob=False,
        scoring_func="softmax",
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("ckpt")
    ap.add_argument("out")
    ap.add_argument("--dtype", default="bfloat16")
    a = ap.parse_args()
    import tok
    from transformers import DeepseekV2ForCausalLM, GenerationConfig

    ck = torch.load(a.ckpt)
    sd, cfg = widen(ck["model"], ck["cfg"])
    m = DeepseekV2ForCausalLM(hf_config(cfg))
    m.load_state_dict(sd, strict=True)
    m = m.to(getattr(torch, a.dtype))
    m.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False, max_new_tokens=8
    )
    m.save_pretrained(a.out)
    tok.build(a.out)
    print(
        sum(p.numel() for p in m.parameters()) / 1e6,
        "M parameters;",
        {f: os.path.getsize(os.path.join(a.out, f)) for f in sorted(os.listdir(a.out))},
    )


if __name__ == "__main__":
    main()
