"""The architecture of a model, read from and written to a Hugging Face config.json.

The raw json is read, not transformers' config classes: they fill in defaults that differ from
version to version, and a wrong `rope_theta` gives a model that looks sane and answers badly.
"""

import dataclasses
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_TYPES = ("default", "linear", "llama3")
_DEFAULT_ROPE_THETA = 10000.0  # of all three families in transformers, when no field gives it
_QWEN3_HEAD_DIM = 128  # Qwen3's default does not follow from the width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the slow RoPE frequencies; names as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """RoPE positions divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one decoder; hashable, so that it can be static under jit."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: Llama3Scaling | LinearScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on query, key and value
    output_bias: bool = False  # on the projection after attention
    qk_norm: bool = False  # RMSNorm of each query and key head, before RoPE
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        _require(self.family in FAMILIES, "family", self.family, f"one of {FAMILIES}")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
            "rope_theta",
        ):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads = {self.num_heads}",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number, for RoPE")
        # What Hugging Face's code for the family can express, so that `to_hf` never lies.
        qwen2 = self.family == "qwen2"
        _require(self.attention_bias or not qwen2, "attention_bias", False, "True for qwen2")
        _require(
            self.output_bias == (self.attention_bias and not qwen2),
            "output_bias",
            self.output_bias,
            "False for qwen2, else the same as attention_bias",
        )
        _require(
            self.qk_norm == (self.family == "qwen3"),
            "qk_norm",
            self.qk_norm,
            "True for qwen3 and False for the others",
        )

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Reads the dict of a config.json; ValueError names a field that cannot be honoured."""
        family = _one_of(raw, "model_type", FAMILIES, None)
        _one_of(raw, "hidden_act", ("silu",), "silu")
        _one_of(raw, "mlp_bias", (False,), False)
        _one_of(raw, "quantization_config", (None,), None)
        _refuse_sliding_window(raw)
        heads = _needed(raw, "num_attention_heads")
        kv_heads = raw.get("num_key_value_heads")
        if kv_heads is None:
            kv_heads = heads if family == "llama" else _needed(raw, "num_key_value_heads")
        head_dim = raw.get("head_dim")
        if head_dim is None:
            head_dim = (
                _QWEN3_HEAD_DIM if family == "qwen3" else _needed(raw, "hidden_size") // heads
            )
        bias = bool(raw.get("attention_bias", False))
        theta, scaling = _rope(raw)
        eos = raw.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=_needed(raw, "vocab_size"),
            hidden_size=_needed(raw, "hidden_size"),
            intermediate_size=_needed(raw, "intermediate_size"),
            num_layers=_needed(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            # Qwen2's code always has these three biases and its config.json never says so.
            attention_bias=bias or family == "qwen2",
            output_bias=bias and family != "qwen2",
            qk_norm=family == "qwen3",
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            initializer_range=float(raw.get("initializer_range", 0.02)),
            eos_token_ids=_ids(eos),
            bos_token_id=raw.get("bos_token_id"),
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the dict of a config.json that transformers 4 and 5 and vLLM read."""
        raw = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            # The old places: transformers 5 moves them into rope_parameters by itself.
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "eos_token_id": None,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.rope_scaling is not None:
            kind = "llama3" if isinstance(self.rope_scaling, Llama3Scaling) else "linear"
            raw["rope_scaling"] = {"rope_type": kind, **dataclasses.asdict(self.rope_scaling)}
        if self.eos_token_ids:
            one = len(self.eos_token_ids) == 1
            raw["eos_token_id"] = self.eos_token_ids[0] if one else list(self.eos_token_ids)
        if self.family == "qwen2":
            raw["use_sliding_window"] = False
        else:
            raw["attention_bias"] = self.attention_bias
        return raw


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns a token id field of a json file (absent, one id or a list of ids) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} = {value!r} is not supported; allowed: {allowed}")


def _one_of(raw: dict[str, Any], name: str, allowed: tuple, default: Any) -> Any:
    value = raw.get(name, default)
    _require(value in allowed, name, value, f"one of {allowed}")
    return value


def _needed(raw: dict[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json has no {name}, which is needed")
    return raw[name]


def _refuse_sliding_window(raw: dict[str, Any]) -> None:
    """Qwen's files carry a window that is switched off; only one in effect is refused."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    if window is None:
        return
    if raw.get("layer_types") is not None:
        active = "sliding_attention" in raw["layer_types"]
    else:
        active = raw.get("max_window_layers", 28) < _needed(raw, "num_hidden_layers")
    _require(not active, "sliding_window", window, "None, or use_sliding_window = false")


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3Scaling | LinearScaling | None]:
    """Returns theta and the scaling from any of the three places that versions put them."""
    inner = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    found = [
        place["rope_theta"]
        for place in (raw, raw.get("rope_parameters") or {}, inner)
        if place.get("rope_theta") is not None
    ] or [_DEFAULT_ROPE_THETA]
    _require(len(set(found)) == 1, "rope_theta", found, "the same value wherever it is given")
    for place in (raw, inner):
        _one_of(place, "partial_rotary_factor", (None, 1, 1.0), None)
    kind = inner.get("rope_type", inner.get("type", "default"))
    _require(kind in _ROPE_TYPES, "rope_type", kind, f"one of {_ROPE_TYPES}")
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            **{
                field.name: _needed(inner, field.name)
                for field in dataclasses.fields(Llama3Scaling)
            }
        )
    elif kind == "linear":
        scaling = LinearScaling(factor=_needed(inner, "factor"))
    return float(found[0]), scaling
