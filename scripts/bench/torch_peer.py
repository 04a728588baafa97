"""Hugging Face's GPT-2 in compiled PyTorch and bf16, as a worker of `scripts.bench`.

It runs in an interpreter with torch and transformers, imports nothing of this
repository, and talks to `scripts.bench.interleave.Worker`.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel


class HuggingFace(nn.Module):
    """`transformers`' GPT-2 with its loss, without dropout."""

    def __init__(
        self, vocab: int, context: int, n_layer: int, n_head: int, d_model: int
    ) -> None:
        super().__init__()
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        # transformers 5 only takes keywords.
        sizes = {
            "vocab_size": vocab,
            "n_positions": context,
            "n_embd": d_model,
            "n_layer": n_layer,
            "n_head": n_head,
        }
        config = GPT2Config(**sizes, attn_implementation="sdpa", use_cache=False, **off)
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean nats of `targets` after `tokens`, both `[B, T]`."""
        logits = self.model(tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_run(sizes: dict) -> Callable[[int], float]:
    """Return `run(steps)`, which takes training steps and returns the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(sizes["threads"])
    on_gpu = sizes["platform"] == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("platform=gpu, but torch sees no GPU")
    device = "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    names = ("vocab", "context", "n_layer", "n_head", "d_model")
    model = HuggingFace(*(sizes[name] for name in names)).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.1, fused=True
    )
    compiled = torch.compile(model)
    tokens = torch.randint(
        0, sizes["vocab"], (sizes["batch"], sizes["context"] + 1), device=device
    )

    def run(steps: int) -> float:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


class TorchWorker:
    """The answers to `{"prepare": sizes}`, `{"take": n}` and `{"memory": true}`."""

    def answer(self, message: dict) -> dict:
        """Return the answer to a message."""
        if "prepare" in message:
            start = time.perf_counter()
            self.run = make_run(message["prepare"])
            self.run(3)  # compiles
            on_gpu = message["prepare"]["platform"] == "gpu"
            device = torch.cuda.get_device_name() if on_gpu else "cpu"
            return {
                "compile_s": time.perf_counter() - start,
                "device": device,
                "torch": torch.__version__,
            }
        if "take" in message:
            start = time.perf_counter()
            self.run(message["take"])
            return {"seconds": time.perf_counter() - start}
        if not torch.cuda.is_available():
            return {}
        return {"allocator_peak_gib": torch.cuda.max_memory_reserved() / 2**30}


def main() -> None:
    """Answer each line of JSON on standard input; other output goes to stderr."""
    answers, worker = os.fdopen(os.dup(1), "w"), TorchWorker()
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = worker.answer(json.loads(line))
        except Exception as error:  # the other process reports it
            text = str(error).strip().partition("\n")[0][:500]
            result = {"error": f"{type(error).__name__}: {text}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
