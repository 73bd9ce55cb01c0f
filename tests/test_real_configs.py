"""The config files of real models, with what they say and leave out, and the size they give."""

import pytest

from xrpo_jax.model import params
from xrpo_jax.model.config import Llama3Scaling, ModelConfig

LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "mlp_bias": False}
LLAMA3 = {
    **LLAMA,
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
STRETCHED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA31_8B = {
    **LLAMA3,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "rope_scaling": {"factor": 8.0, **STRETCHED},
    "tie_word_embeddings": False,
}
SMOLLM2 = {
    **LLAMA,
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_05B = {
    **QWEN,
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
}
MATH = {
    **QWEN,
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 4096,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
QWEN3 = {
    **QWEN,
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "Llama-2-7b": {
        **LLAMA,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Llama-3.1-8B": LLAMA31_8B,
    "Llama-3.1-8B-Instruct": {**LLAMA31_8B, "eos_token_id": [128001, 128008, 128009]},
    "Llama-3.2-1B": {
        **LLAMA3,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {"factor": 32.0, **STRETCHED},
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M-Instruct": {
        **SMOLLM2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
    },
    "SmolLM2-1.7B": {
        **SMOLLM2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "rope_theta": 130000,
    },
    "Qwen2-0.5B": QWEN2_05B,
    "Qwen2.5-0.5B": {**QWEN2_05B, "max_position_embeddings": 32768, "sliding_window": 32768},
    "Qwen2.5-0.5B-Instruct": {
        **QWEN2_05B,
        "eos_token_id": 151645,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "sliding_window": 32768,
    },
    "Qwen2.5-Math-1.5B": {**MATH, "use_mrope": False},
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **MATH,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "use_mrope": False,
    },
    "DeepSeek-R1-Distill-Llama-8B": LLAMA31_8B,
    "Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "Qwen3-1.7B": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
}
PARAMETERS = {  # as their weights on the Hub count
    "Llama-2-7b": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-1.7B": 1_711_376_384,
    "Qwen2-0.5B": 494_032_768,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
}
READ = {  # head_dim, rope_theta, tied, biases of query, key and value, ends
    "Llama-2-7b": (128, 1e4, False, False, (2,)),
    "Llama-3.1-8B": (128, 5e5, False, False, (128001,)),
    "Llama-3.1-8B-Instruct": (128, 5e5, False, False, (128001, 128008, 128009)),
    "Llama-3.2-1B": (64, 5e5, True, False, (128001,)),
    "SmolLM2-135M-Instruct": (64, 1e5, True, False, (2,)),
    "SmolLM2-1.7B": (64, 1.3e5, True, False, (0,)),
    "Qwen2-0.5B": (64, 1e6, True, True, (151643,)),
    "Qwen2.5-0.5B": (64, 1e6, True, True, (151643,)),
    "Qwen2.5-0.5B-Instruct": (64, 1e6, True, True, (151645,)),
    "Qwen2.5-Math-1.5B": (128, 1e4, True, True, (151643,)),
    "DeepSeek-R1-Distill-Qwen-1.5B": (128, 1e4, False, True, (151643,)),
    "DeepSeek-R1-Distill-Llama-8B": (128, 5e5, False, False, (128001,)),
    "Qwen3-0.6B": (128, 1e6, True, False, (151645,)),
    "Qwen3-1.7B": (128, 1e6, True, False, (151645,)),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_real_config_is_read_as_the_model_is(name):
    raw = CONFIGS[name]
    config = ModelConfig.from_hf(raw)
    head_dim, theta, tied, bias, ends = READ[name]
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (
        head_dim,
        theta,
        tied,
    )
    assert (config.attention_bias, config.output_bias) == (bias, False)
    assert config.eos_token_ids == ends
    assert config.qk_norm == name.startswith("Qwen3")
    assert config.rms_norm_eps == raw["rms_norm_eps"]
    factor = {"Llama-3.2-1B": 32.0}.get(name, 8.0 if raw["vocab_size"] == 128256 else None)
    assert config.rope_scaling == (
        None
        if factor is None
        else Llama3Scaling(
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
    )
    assert params.count(params.declare(config)) == PARAMETERS[name]
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_transformers_5_writes_it_elsewhere_with_the_same_reading(name):
    raw = dict(CONFIGS[name])
    scaling = raw.pop("rope_scaling", None) or {"rope_type": "default"}
    raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta", 10000.0), **scaling}
    raw["dtype"] = "bfloat16"
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(CONFIGS[name])
