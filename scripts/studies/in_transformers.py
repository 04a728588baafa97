"""The worker of `scripts.studies.beside_transformers`: an exported model in PyTorch,
under another interpreter.

It imports nothing of this project. Each line of standard input is a JSON object,
`{"prompts": [[ids]], "max_new_tokens": n}` or
`{"pairs": [[inputs, targets of the last of them]], "batch": n}`. It answers each with a
line that has the new ids of every prompt, or the log-likelihood of each pair's targets,
and the seconds that it took. `{"texts": [prompts], "max_new_tokens": n}` uses the
exported tokenizer: see `greedy_texts`.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy(
    model: Any, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Return the greedy continuation of each prompt."""
    continuations = []
    for prompt in prompts:
        out = generate(model, torch.tensor([prompt]), max_new_tokens)
        continuations.append(out[0, len(prompt) :].tolist())
    return continuations


def generate(
    model: Any, ids: torch.Tensor, max_new_tokens: int, **options: bool
) -> Any:
    """Return what `model.generate` makes of a prompt, greedily and in full length."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        do_sample=False,
        **options,
    )


def greedy_texts(
    model: Any, texts: list[str], max_new_tokens: int
) -> tuple[list[str], float, dict[str, str]]:
    """Return prompts with their greedy continuations, the least margin, and versions.

    The margin is that of a token's logit over the next likeliest one's.
    """
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    out, margins = [], []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        result = generate(
            model,
            ids,
            max_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        out.append(tokenizer.decode(result.sequences[0]))
        for logits in result.logits:
            first, second = logits[0].topk(2).values.tolist()
            margins.append(first - second)
    versions = {m.__name__: m.__version__ for m in (torch, transformers)}
    return out, min(margins), versions


def likelihoods(model: Any, pairs: list[list[list[int]]], batch: int) -> list[float]:
    """Return the pairs' log-likelihoods (nats).

    Batches have pairs of about one length, padded on the right, as in
    lm-evaluation-harness.
    """
    by_index: dict[int, float] = {}
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
            by_index[i] = float(scored.gather(1, after[:, None]).double().sum())
    return [by_index[i] for i in range(len(pairs))]


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
            answer: Any = greedy(model, request["prompts"], request["max_new_tokens"])
        elif "texts" in request:
            answer = greedy_texts(model, request["texts"], request["max_new_tokens"])
        else:
            answer = likelihoods(model, request["pairs"], request["batch"])
        print(
            json.dumps({"answer": answer, "seconds": time.perf_counter() - started}),
            flush=True,
        )


if __name__ == "__main__":
    main()
