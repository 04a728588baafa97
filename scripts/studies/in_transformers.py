"""Greedy texts of an exported model in PyTorch, for `scripts.studies.family_journeys`.

    ENVIRONMENT/bin/python in_transformers.py EXPORT NEW_TOKENS PROMPT...

It imports nothing of this project. It prints a JSON object: the prompts with their
continuations, the least margin of a token's logit over the next likeliest one's, and
the versions of PyTorch and transformers.
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main(exported: str, new_tokens: int, prompts: list[str]) -> None:
    """Print the texts, the margin and the versions."""
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    texts, margins = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        texts.append(tokenizer.decode(result.sequences[0]))
        for logits in result.logits:
            first, second = logits[0].topk(2).values.tolist()
            margins.append(first - second)
    versions = {m.__name__: m.__version__ for m in (torch, transformers)}
    print(json.dumps({"texts": texts, "margin": min(margins), "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
