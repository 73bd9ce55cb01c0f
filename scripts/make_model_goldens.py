"""Writes tests/golden/<name>: tiny random models and the logits transformers gives for them.

    python scripts/make_model_goldens.py        # needs torch; 10 s on a CPU; 600 kB in all

The weights are stored in bfloat16 and the logits computed in float32 from exactly those weights.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that pairs are kept, blended and slowed down
}


def theta(value: float) -> dict:
    return {"rope_type": "default", "rope_theta": value}


CASES = {  # family, what differs from SIZES, and how the directory is written
    "llama": ("llama", {"rope_parameters": theta(10000.0)}, {}),
    "llama3_tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, {}),
    "qwen2_tied": ("qwen2", {"rope_parameters": theta(1e6), "tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {"rope_parameters": theta(2000.0), "head_dim": 16}, {}),
    "llama2_old_places": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}, {}),
    "smollm2": (
        "llama",
        {
            "rope_parameters": theta(1e5),
            "tie_word_embeddings": True,
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
        {},
    ),
    "qwen2_shards": ("qwen2", {"rope_parameters": theta(10000.0)}, {"max_shard_size": "20KB"}),
    "qwen3_tied": ("qwen3", {"rope_parameters": theta(1e6), "tie_word_embeddings": True}, {}),
}


def to_old_places(file: Path) -> None:
    """Writes RoPE's settings as transformers 4 did."""
    raw = json.loads(file.read_text())
    scaling = raw.pop("rope_parameters")
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    del raw["head_dim"]
    file.write_text(json.dumps(raw, indent=2) + "\n")


def randomize(model: torch.nn.Module) -> None:
    """Gives every tensor, norms and biases too, values large enough to show in the logits."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = 0.2 * torch.randn_like(tensor)
            tensor.copy_(1 + noise if "norm" in name else noise)
            tensor.copy_(tensor.bfloat16())


def main() -> None:
    for number, (name, (family, changes, written)) in enumerate(CASES.items()):
        torch.manual_seed(number)
        config = transformers.AutoConfig.for_model(family, **(SIZES | changes))
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        randomize(model)
        tokens = torch.randint(0, SIZES["vocab_size"], (2, 20))
        with torch.no_grad():
            logits = model(tokens).logits.numpy()
        folder = GOLDEN / name
        folder.mkdir(parents=True, exist_ok=True)
        model.bfloat16().save_pretrained(folder, **written)
        if name.endswith("old_places"):
            to_old_places(folder / "config.json")
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits
        )
        print(f"{name}: largest logit {np.abs(logits).max():.2f}")


if __name__ == "__main__":
    main()
