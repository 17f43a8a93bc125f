"""config.json: both layouts, nothing assumed, contradictions named."""
import json

import pytest
from helpers import SMALL, small_config

from qwen.config import Config

FLAT = {**json.loads(json.dumps(SMALL)), "model_type": "qwen3_5_text"}


def read(folder, fields) -> Config:
    (folder / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return Config.from_file(folder)


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def nested(**changes):
    """The published layout: text fields inside, rope fields further inside, other models' fields beside."""
    text = without(FLAT, "rope_theta", "partial_rotary_factor") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": FLAT["rope_theta"], "mrope_section": [1, 1, 0],
                            "partial_rotary_factor": FLAT["partial_rotary_factor"]}}
    return {"model_type": "qwen3_5", "vision_config": {"hidden_size": 7, "model_type": "other"},
            "tie_word_embeddings": True, "text_config": text | changes}


def test_both_layouts_give_the_same(tmp_path):
    assert read(tmp_path, FLAT) == read(tmp_path, nested()) == small_config()


ROPE = {"rope_theta": FLAT["rope_theta"], "partial_rotary_factor": FLAT["partial_rotary_factor"]}


@pytest.mark.parametrize("place", ["nested", "flat", "both"])
def test_rope_fields_in_either_place(tmp_path, place):
    """Case 24: nested, flat, or both and equal."""
    fields = without(FLAT, *ROPE) | (ROPE if place != "nested" else {})
    fields |= {"rope_parameters": ROPE} if place != "flat" else {}
    assert read(tmp_path, fields) == small_config()


@pytest.mark.parametrize("name", ROPE)
def test_rope_fields_are_never_assumed(tmp_path, name):
    """Case 24: in neither place is an error, so is a null, so are two values."""
    with pytest.raises(ValueError, match=f"missing {name}"):
        read(tmp_path, without(FLAT, name))
    with pytest.raises(ValueError, match=f"missing {name}"):
        read(tmp_path, FLAT | {name: None})
    with pytest.raises(ValueError, match=f"{name} is {FLAT[name]} in one place and 0.25 in rope_parameters"):
        read(tmp_path, FLAT | {"rope_parameters": {name: 0.25}})


@pytest.mark.parametrize("name", [name for name in SMALL if name not in (*ROPE, "tie_word_embeddings")])
def test_every_field_is_needed(tmp_path, name):
    with pytest.raises(ValueError, match=f"config.json: .*{name}"):
        read(tmp_path, without(FLAT, name))


def test_all_missing_fields_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match="missing vocab_size, head_dim"):
        read(tmp_path, without(FLAT, "vocab_size", "head_dim"))


@pytest.mark.parametrize("outer, inner, tied", [
    (True, True, True), (True, False, True), (False, True, True), (False, False, False),
    (None, True, True), (True, None, True), (None, None, False),
])  # fmt: skip
def test_two_tie_flags(tmp_path, outer, inner, tied):
    """Either one offers the embedding as head."""
    fields = nested()
    for part, flag in ((fields, outer), (fields["text_config"], inner)):
        part.pop("tie_word_embeddings")
        if flag is not None:
            part["tie_word_embeddings"] = flag
    assert read(tmp_path, fields).tie_word_embeddings is tied


def test_layers_from_the_interval(tmp_path):
    fields = without(FLAT, "layer_types") | {"full_attention_interval": 3, "num_hidden_layers": 7}
    linear, full = "linear_attention", "full_attention"
    wanted = (linear, linear, full, linear, linear, full, linear)
    assert read(tmp_path, fields).layer_types == wanted
    assert read(tmp_path, fields | {"layer_types": list(wanted)}).layer_types == wanted


REFUSED = {
    "another architecture": ({"model_type": "llama"}, "model_type is 'llama'.*qwen3_5"),
    "its predecessor": ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next'"),
    "no architecture": ({"model_type": None}, "model_type is None"),
    "a list as architecture": ({"model_type": ["qwen3_5"]}, "model_type is"),
    "another architecture inside": ({"text_config": FLAT | {"model_type": "llama"}}, "model_type is 'llama'"),
    "text fields that are none": ({"text_config": None}, "text_config is None"),
    "text fields in a list": ({"text_config": [1]}, "text_config is"),
    "rope in a list": ({"rope_parameters": [1]}, "rope_parameters is"),
    "rope as text": ({"rope_parameters": "default"}, "rope_parameters is"),
    "scaled rope": ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
    "scaled rope, older name": ({"rope_parameters": {"type": "yarn"}}, "'yarn'"),
    "scaled rope, older place": ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn'"),
    "scaled rope as text": ({"rope_scaling": "yarn"}, "rope_scaling"),
    "experts": ({"num_experts": 8}, "num_experts is 8"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*'silu'"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "no output gate": ({"attn_output_gate": False}, "attn_output_gate is False"),
    "interval against list": ({"full_attention_interval": 4}, "layer_types contradicts full_attention_interval 4"),
    "layers against list": ({"num_hidden_layers": 5}, "layer_types names 4 layers, num_hidden_layers says 5"),
    "a layer of another kind": ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "'sliding_attention'"),
    "layers as one word": ({"layer_types": "full_attention"}, "layer_types is"),
    "layers that are no names": ({"layer_types": [1, 2, 3, 4]}, "layer_types is"),
    "query heads": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "value heads": ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not.*linear_num_key_heads 2"),
    "no rotary dimension": ({"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1"),
    "odd rotary dimensions": ({"partial_rotary_factor": 0.19}, "3 rotary dimensions"),
    "more rotary dimensions than there are": ({"partial_rotary_factor": 1.5}, "24 rotary dimensions"),
    "a size of zero": ({"head_dim": 0}, "head_dim is 0"),
    "a negative size": ({"hidden_size": -32}, "hidden_size is -32"),
    "a size as text": ({"hidden_size": "32"}, "hidden_size is '32'"),
    "a fraction": ({"intermediate_size": 48.5}, "intermediate_size is 48.5"),
    "true as a size": ({"vocab_size": True}, "vocab_size is True"),
    "theta as text": ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    "theta of zero": ({"rope_theta": 0}, "rope_theta is 0"),
    "eps not a number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "a flag as text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    """A ValueError that names the file and the field."""
    changes, says = REFUSED[name]
    with pytest.raises(ValueError, match=f"config.json: .*{says}"):
        read(tmp_path, FLAT | changes)


@pytest.mark.parametrize("scaling", [{"type": "mrope", "mrope_section": [1, 1, 0]}, {"rope_type": "default"}, None])
def test_plain_rope_under_its_older_name(tmp_path, scaling):
    assert read(tmp_path, FLAT | {"rope_scaling": scaling}) == small_config()


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "\x00\x01", '{"model_type": "qwen3_5",}'], ids=repr)
def test_not_json(tmp_path, text):
    with pytest.raises(ValueError, match="config.json"):
        read(tmp_path, text)


def test_not_even_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        Config.from_file(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        Config.from_file(tmp_path)
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        Config.from_file(tmp_path / "nowhere")


def test_derived_sizes():
    config = small_config(head_dim=256, partial_rotary_factor=0.25)
    assert config.rotary_dim == 64
    assert config.conv_dim == 2 * 2 * 8 + 4 * 12
    with pytest.raises(AttributeError):
        config.head_dim = 1
