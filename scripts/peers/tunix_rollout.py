"""Tunix's Sampler: all rows as one batch, whose prompts are padded to one length."""

from __future__ import annotations

from bench_pipe import serve
from bench_work import Work
from tunix.generate.sampler import CacheConfig, Sampler
from tunix_model import Words, load


def prepare(raw: dict):
    """Load the model; the command that does the work once.

    Tunix ends a row at a stop token only, and the batch goes on until the last row ends. So where
    lengths vary it computes what it would if they came from stop tokens: all rows to the longest.
    """
    work = Work.read(raw)
    model = load(work.model, work.dtype)
    width, longest = max(len(prompt) for prompt in work.prompts), max(work.limits)
    config = model.config
    sampler = Sampler(
        model,
        Words(work.model, work),
        CacheConfig(
            cache_size=width + longest,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )
    texts = [text for text in work.texts for _ in range(work.samples)]
    runs = 0

    def run() -> dict:
        nonlocal runs
        runs += 1
        found = sampler(
            texts,
            max_generation_steps=longest,
            max_prompt_length=width,
            temperature=work.temperature,
            top_p=1.0,
            eos_tokens=[-1],
            seed=runs,
        )
        if {len(tokens) for tokens in found.tokens} != {longest}:
            raise RuntimeError(f"rows of other than {longest} tokens were drawn")
        return {"tokens": work.useful}

    return {"run": run}


if __name__ == "__main__":
    serve(prepare)
