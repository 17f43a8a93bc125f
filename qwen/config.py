"""The shape of a model, read from the `config.json` beside its weights.

Field names are those of the published Qwen3.5 files. Nothing is assumed: a field that is
missing, or that is given twice with two values, is an error that names it.
"""
import json
from dataclasses import dataclass, fields
from pathlib import Path

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Config:
    """Sizes of a Qwen3.5 text model (counts and widths; no unit but "elements").

    `head_dim` is not `hidden_size / num_attention_heads`; `layer_types` names each layer
    `"linear_attention"` (Gated DeltaNet) or `"full_attention"`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    partial_rotary_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self):
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ValueError(f"config: {field.name} is {value!r}, expected a whole number of at least 1")
            if field.type is float and not (type(value) in (int, float) and 0 < value < float("inf")):
                raise ValueError(f"config: {field.name} is {value!r}, expected a positive number")
        for kind in self.layer_types:
            if kind not in (LINEAR, FULL):
                raise ValueError(f"config: layer_types holds {kind!r}, expected {LINEAR!r} or {FULL!r}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"config: layer_types names {len(self.layer_types)} layers, "
                             f"num_hidden_layers says {self.num_hidden_layers}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                             f"num_key_value_heads {self.num_key_value_heads}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(f"config: linear_num_value_heads {self.linear_num_value_heads} is not a multiple of "
                             f"linear_num_key_heads {self.linear_num_key_heads}")
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"config: partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} "
                             f"gives {self.rotary_dim} rotary dimensions, expected an even number up to head_dim")

    @property
    def rotary_dim(self) -> int:
        """How many of `head_dim` dimensions RoPE turns (the first ones)."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_dim(self) -> int:
        """Channels of DeltaNet's short convolution: query, key and value together."""
        return (2 * self.linear_num_key_heads * self.linear_key_head_dim
                + self.linear_num_value_heads * self.linear_value_head_dim)

    @classmethod
    def from_file(cls, folder) -> "Config":
        """Read `folder/config.json`: the published multimodal layout (`text_config` inside) or a flat one.

        Raises FileNotFoundError without the file, ValueError for another architecture,
        a missing field or fields that contradict each other.
        """
        file = Path(folder) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: a model folder needs config.json")
        try:
            outer = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON ({error})") from None
        if not isinstance(outer, dict):
            raise ValueError(f"{file} holds a JSON {type(outer).__name__}, expected an object of fields")
        try:
            return cls._from_dict(outer)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def _from_dict(cls, outer: dict) -> "Config":
        if outer.get("model_type") not in MODEL_TYPES:
            raise ValueError(f"model_type is {outer.get('model_type')!r}, this package reads {' or '.join(MODEL_TYPES)}")
        text = outer.get("text_config", outer)
        if not isinstance(text, dict):
            raise ValueError(f"text_config is {text!r}, expected an object of fields")
        rope, scaling = (text.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
        for name, part in (("rope_parameters", rope), ("rope_scaling", scaling)):
            if not isinstance(part, dict):
                raise ValueError(f"{name} is {part!r}, expected an object of fields")
        if text.get("model_type", MODEL_TYPES[1]) not in MODEL_TYPES:
            raise ValueError(f"text_config's model_type is {text['model_type']!r}, expected {MODEL_TYPES[1]!r}")
        for name, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True),
                              ("num_experts", None)):
            if text.get(name, allowed) != allowed:
                raise ValueError(f"{name} is {text[name]!r}, this architecture has {allowed!r}")
        for part in (rope, scaling):                                      # text has one position a token: mrope is plain
            kind = part.get("rope_type", part.get("type", "default"))
            if kind not in ("default", "mrope"):
                raise ValueError(f"rope_type is {kind!r}, only 'default' is built here")

        values = {name: text[name] for field in fields(cls) if (name := field.name) in text}
        for name in ("rope_theta", "partial_rotary_factor"):        # nested in new files, flat in old ones
            if name in rope:
                if name in text and text[name] != rope[name]:
                    raise ValueError(f"{name} is {text[name]} in one place and {rope[name]} in rope_parameters")
                values[name] = rope[name]
        # Two tie flags exist and may disagree; either one offers the embedding as head. A head
        # in the weight file wins over both (see weights.py).
        flags = [part.get("tie_word_embeddings", False) for part in (outer, text)]
        if not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"tie_word_embeddings is {flags[0]!r} and {flags[1]!r}, expected true or false")
        values["tie_word_embeddings"] = any(flags)
        values["layer_types"] = cls._layer_types(text)
        missing = [field.name for field in fields(cls) if values.get(field.name) is None]
        if missing:
            raise ValueError(f"missing {', '.join(missing)}")
        return cls(**values)

    @staticmethod
    def _layer_types(text: dict):
        """The list itself, or what `full_attention_interval` says (every n-th layer is full attention)."""
        listed, interval, layers = (text.get(n) for n in ("layer_types", "full_attention_interval", "num_hidden_layers"))
        if listed is not None and not (isinstance(listed, list) and all(isinstance(kind, str) for kind in listed)):
            raise ValueError(f"layer_types is {listed!r}, expected a list of names")
        if type(interval) is not int or interval < 1 or type(layers) is not int:
            return listed
        derived = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
        if listed is not None and list(listed) != derived:
            raise ValueError(f"layer_types contradicts full_attention_interval {interval}")
        return derived
