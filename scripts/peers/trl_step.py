"""TRL's GRPOTrainer: one whole optimizer step a run, sampling with transformers `generate`.

`bfloat16` is what `bf16=True` gives: autocast over float32 parameters and moments. With the option
`weights=bfloat16` the parameters and moments are bfloat16 themselves.
"""

from __future__ import annotations

import queue
import tempfile
import threading

import torch
from bench_pipe import serve
from bench_work import Work, right
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Gate(TrainerCallback):
    """Lets the trainer make a step when told to, and says when it is done."""

    def __init__(self):
        self.go, self.done = queue.Queue(), queue.Queue()

    def on_step_begin(self, args, state, control, **_):
        self.go.get()

    def on_step_end(self, args, state, control, **_):
        self.done.put(None)


def prepare(raw: dict):
    """Load the model and start the trainer; the command that makes its next step."""
    work, options = Work.read(raw), raw["options"]
    weights = options.get("weights", "float32")
    model = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=getattr(torch, weights), attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    for text, tokens in zip(work.texts, work.prompts, strict=True):
        if tuple(tokenizer(text)["input_ids"]) != tokens:
            raise RuntimeError(f"the tokenizers differ on {text!r}")
    new_tokens = max(work.limits)
    micro_batch = int(options.get("micro_batch", 16))
    drawn = []

    def reward(completions, completion_ids, **_):
        drawn.append(sum(len(tokens) for tokens in completion_ids))
        return [float(right(text)) for text in completions]

    gate = Gate()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": list(work.texts)}),
        callbacks=[gate],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=work.dtype == "bfloat16" and weights == "float32",
            max_steps=1000,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=work.rows // micro_batch,
            num_generations=work.samples,
            num_iterations=1,
            beta=0.0,
            max_completion_length=new_tokens,
            # Rows of the same length, as the others have: no token stops one.
            generation_kwargs={"min_new_tokens": new_tokens},
            temperature=work.temperature,
            cache_implementation=options.get("cache"),
            gradient_checkpointing=options.get("checkpointing", "no") == "yes",
            optim="adamw_torch",
            learning_rate=1e-6,
            use_vllm=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
        ),
    )

    def train() -> None:
        try:
            trainer.train()
            gate.done.put(RuntimeError("the trainer ended"))
        except BaseException as error:
            gate.done.put(error)

    threading.Thread(target=train, daemon=True).start()

    def run() -> dict:
        gate.go.put(None)
        error = gate.done.get()
        if error is not None:
            raise error
        if drawn[-1] != work.useful:
            raise RuntimeError(f"{drawn[-1]} tokens were drawn; asked for {work.useful}")
        return {"tokens": work.useful}

    return {"run": run}


if __name__ == "__main__":
    serve(prepare)
