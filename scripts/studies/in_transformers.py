"""The other side of `scripts.studies.beside_transformers`: an exported model in
PyTorch, under another interpreter.

It imports nothing of this project. Each line of standard input is a JSON object,
`{"prompts": [[ids]], "max_new_tokens": n}` or
`{"pairs": [[inputs, targets of the last of them]], "batch": n}`; it answers each with a
line: new ids of every prompt, or the log-likelihood of all targets of a pair, and the
seconds that it took.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def written(
    model: Any, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """The likeliest tokens after each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def likelihoods(model: Any, pairs: list[list[list[int]]], batch: int) -> list[float]:
    """Log-likelihoods (nats) in batches of about one length, padded to the right, as
    lm-evaluation-harness does it.
    """
    found: dict[int, float] = {}
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        inputs = [pairs[i][0] for i in rows]
        width = max(map(len, inputs))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in inputs])
        logprobs = torch.log_softmax(model(ids).logits.float(), dim=-1)
        for place, i in enumerate(rows):
            after = torch.tensor(pairs[i][1])
            end = len(inputs[place])
            scored = logprobs[place, end - len(after) : end]
            found[i] = float(scored.gather(1, after[:, None]).double().sum())
    return [found[i] for i in range(len(pairs))]


@torch.no_grad()
def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32
    ).eval()
    print(json.dumps({"ready": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        if "prompts" in request:
            answer: list[Any] = written(
                model, request["prompts"], request["max_new_tokens"]
            )
        else:
            answer = likelihoods(model, request["pairs"], request["batch"])
        print(
            json.dumps({"answer": answer, "seconds": time.perf_counter() - started}),
            flush=True,
        )


if __name__ == "__main__":
    main()
