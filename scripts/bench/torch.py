"""The other side of `scripts.bench`: the same GPT-2 training step in compiled PyTorch, in an interpreter with torch.

Imports nothing of this repository. Reads one JSON line of sizes, answers "ready"; then for each line, a number of
steps, takes them and answers the seconds they took. With `gpu` among the sizes it is on the GPU, in bf16, and Hugging
Face's GPT-2 where `transformers` is installed.
"""

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-LN attention and MLP."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.ln_1 = nn.LayerNorm(d_model)
        self.c_attn = nn.Linear(d_model, 3 * d_model)
        self.attn_proj = nn.Linear(d_model, d_model)
        self.ln_2 = nn.LayerNorm(d_model)
        self.c_fc = nn.Linear(d_model, 4 * d_model)
        self.mlp_proj = nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to the same."""
        B, T, D = x.shape
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Learned positions, tied head; the loss in one number."""

    def __init__(self, vocab: int, context: int, n_layer: int, n_head: int, d_model: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, d_model)
        self.wpe = nn.Embedding(context, d_model)
        self.h = nn.ModuleList([Block(d_model, n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(d_model)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if "proj" in name else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean nats of `targets` after `tokens`, both `[B, T]`."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HuggingFace(nn.Module):
    """`transformers`' GPT-2 with the loss of `GPT2`, and without dropout."""

    def __init__(self, vocab: int, context: int, n_layer: int, n_head: int, d_model: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(
            vocab, context, d_model, n_layer, n_head, attn_implementation="sdpa", use_cache=False, **off
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean nats of `targets` after `tokens`, both `[B, T]`."""
        logits = self.model(tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_run(sizes: dict) -> Callable[[int], float]:
    """`run(steps)`: take training steps (forward, backward, clip, AdamW); the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(sizes["threads"])
    on_gpu = bool(sizes.get("gpu"))
    device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    make = HuggingFace if on_gpu and importlib.util.find_spec("transformers") else GPT2
    model = make(*(sizes[k] for k in ("vocab", "context", "n_layer", "n_head", "d_model"))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(0, sizes["vocab"], (sizes["batch"], sizes["context"] + 1), device=device)

    def run(steps: int) -> float:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
                loss = compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def main() -> None:
    """Serve the protocol of the module's docstring on stdin and stdout."""
    run = make_run(json.loads(sys.stdin.readline()))
    run(3)  # compiles
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
