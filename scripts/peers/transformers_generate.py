"""transformers `generate`: the rows as one left-padded batch.

The cache is static (`cache=dynamic` is the library's default): a tenth faster on our machine.
"""

from __future__ import annotations

import torch
from bench_pipe import serve
from bench_work import Work
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria


class Limits(StoppingCriteria):
    """Ends each row at its own number of tokens; the batch goes on until the last one ends."""

    def __init__(self, begin: int, limits: torch.Tensor):
        self.begin, self.limits = begin, limits

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] - self.begin >= self.limits


def prepare(raw: dict):
    """Load the model; the command that does the work once."""
    work, options = Work.read(raw), raw["options"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=getattr(torch, work.dtype), attn_implementation="sdpa"
    ).eval()
    width, pad = max(len(prompt) for prompt in work.prompts), 0
    rows = [prompt for prompt in work.prompts for _ in range(work.samples)]
    tokens = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    model.generation_config = GenerationConfig(pad_token_id=pad)

    @torch.inference_mode()
    def generate(limits: tuple[int, ...]) -> dict:
        found = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=work.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(limits),
                eos_token_id=None,
                pad_token_id=pad,
                use_cache=True,
                cache_implementation=options.get("cache", "static"),
            ),
            stopping_criteria=[Limits(width, torch.tensor(limits))],
        )
        if found.shape[1] - width != max(limits):
            raise RuntimeError(f"{found.shape[1] - width} tokens; asked for {max(limits)}")
        return {"tokens": sum(limits)}

    return {
        "warm": lambda: generate((4,) * work.rows),
        "run": lambda: generate(work.limits),
    }


if __name__ == "__main__":
    serve(prepare)
