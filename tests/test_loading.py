"""Finding and reading a model folder: every layout loads alike, every broken one says which file or tensor."""
import json
import os
import pickle
import shutil
import subprocess
import sys
from fnmatch import fnmatch

import checkpoints
import pytest
import torch
from checkpoints import reference_model
from helpers import SMALL, random_model
from safetensors.torch import load_file, save_file

from qwen import weights
from qwen.model import Model
from qwen.weights import find_model, tensor_index

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
FLAT = {**json.loads(json.dumps(SMALL)), "model_type": "qwen3_5_text"}


def load(folder) -> Model:
    return Model.from_pretrained(folder, device="cpu", dtype=torch.float32)


def write(folder, tensors=None, **changes):
    """A folder with config.json, tokenizer.json and one file of weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FLAT | changes))
    (folder / "tokenizer.json").write_text("{}")
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def shards(folder, tensors, number=3):
    """The same in several files with an index."""
    write(folder)
    names = sorted(tensors)
    weight_map = {}
    for i in range(number):
        file = f"model-{i + 1:05}-of-{number:05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names[i::number]}, folder / file)
        weight_map |= dict.fromkeys(names[i::number], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def tied():
    return random_model(0)


@pytest.fixture
def tensors(tied):
    return {name: tensor.clone() for name, tensor in tied.state_dict().items()}


@pytest.fixture
def nothing_read(monkeypatch):
    """Fails when the data of any tensor is read; headers may be."""
    class Headers:
        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def __getattr__(self, name):
            assert name in ("keys", "get_slice", "metadata"), f"{name} was called before the checks were done"
            return getattr(self.file, name)

    real = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", Headers)


LAYOUTS = [
    "bare", "model.", "model.language_model.", "extras", "sharded", "sharded and prefixed", "bfloat16", "float16",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_load_alike(tied, tensors, tmp_path, layout):
    """Case 23: every tensor is where it belongs, frozen, and the logits are the same, bit for bit."""
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(layout)
    if half:
        tensors = {name: tensor.to(half) for name, tensor in tensors.items()}
        tied = random_model(0)
        tied.load_state_dict(tensors)
    wanted = tied(PROMPT)
    prefix = {"bare": "", "model.": "model."}.get(layout, "model.language_model." if layout != "sharded" else "model.")
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if layout == "extras":
        tensors |= {"model.visual.patch_embed.proj.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(3),
                    "mtp.layers.0.self_attn.q_proj.weight": torch.ones(3), "visual.merger.weight": torch.ones(1),
                    "mtp.count": torch.ones(1, dtype=torch.int8)}
    found = load((shards if "sharded" in layout else write)(tmp_path / "m", tensors))
    assert torch.equal(found(PROMPT), wanted)
    assert torch.equal(load(str(tmp_path / "m"))(PROMPT), wanted)
    assert not found.training and not any(p.requires_grad for p in found.parameters())
    assert {p.dtype for p in found.parameters()} == {torch.float32}


@pytest.mark.parametrize("form", ["prefixed", "plain", "bare", "sharded"])
@pytest.mark.parametrize("tie", [True, False])
def test_what_transformers_writes(tmp_path, form, tie):
    """Case 23, from the other side: the same random text model in four layouts."""
    reference = reference_model(1, multimodal=form == "prefixed", tie_word_embeddings=tie)
    found = load(getattr(checkpoints, f"save_{form}")(reference, tmp_path))
    with torch.no_grad():
        assert torch.allclose(found(PROMPT), reference(input_ids=PROMPT).logits, rtol=1e-4, atol=1e-4)
    assert (found.lm_head is None) == tie


@pytest.mark.parametrize("outer, inner", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("head", [True, False])
def test_tie_flags_and_heads(tied, tensors, tmp_path, outer, inner, head):
    """A head in the file wins over any flag; without one, either flag ties; with neither, the head is missing."""
    if head:
        tensors["lm_head.weight"] = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    folder = write(tmp_path / "m", tensors)
    text = FLAT | {"tie_word_embeddings": inner}
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "qwen3_5", "tie_word_embeddings": outer, "text_config": text}))
    if not (head or outer or inner):
        with pytest.raises(ValueError, match="lm_head.weight is missing.*tie_word_embeddings"):
            load(folder)
        return
    found = load(folder)
    assert found.config.tie_word_embeddings is not head
    hidden = []
    found.norm.register_forward_hook(lambda *call: hidden.append(call[2]))
    matrix = tensors["lm_head.weight" if head else "embed_tokens.weight"]
    assert torch.allclose(found(PROMPT), hidden[0] @ matrix.T, atol=1e-5)


@pytest.mark.parametrize("name", [
    "embed_tokens.weight", "norm.weight", "layers.0.linear_attn.A_log", "layers.0.linear_attn.dt_bias",
    "layers.2.linear_attn.conv1d.weight", "layers.3.self_attn.q_norm.weight", "layers.1.mlp.down_proj.weight",
])  # fmt: skip
def test_missing_or_misshapen_tensor(tensors, tmp_path, nothing_read, name):
    """Case 23: by name, with what was expected, before a byte of data is read."""
    shape = tuple(tensors[name].shape)
    tensor = tensors.pop(name)
    with pytest.raises(ValueError, match=f"tensor {name} is missing.*{shape}".replace("(", r"\(").replace(")", r"\)")):
        load(write(tmp_path / "m", tensors))
    for wrong in (tensor[None], tensor[:-1], tensor.flatten()[:1]):
        tensors["model." + name] = wrong
        with pytest.raises(ValueError, match=rf"m.model.safetensors: tensor model.{name} has shape .*expects"):
            load(write(tmp_path / "m", tensors))
        del tensors["model." + name]


def test_transposed_tensor(tensors, tmp_path, nothing_read):
    name = "layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T
    with pytest.raises(ValueError, match=rf"{name} has shape \(32, 48\), config.json expects \(48, 32\)"):
        load(write(tmp_path / "m", tensors))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_tensor_of_another_kind(tensors, tmp_path, nothing_read, dtype):
    """Quantised weights are refused, not read as numbers."""
    name = "layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(ValueError, match=f"model.safetensors: tensor {name} holds .*expected one of F32, F16, BF16"):
        load(write(tmp_path / "m", tensors))


@pytest.mark.parametrize("extra", [
    "layers.4.norm.weight", "layers.0.mlp.up_proj.bias", "layers.0.self_attn.k_proj.weight",
])  # fmt: skip
def test_tensor_without_a_place(tensors, tmp_path, nothing_read, extra):
    tensors["model." + extra] = torch.ones(2)
    with pytest.raises(ValueError, match=f"tensor model.{extra} has no place"):
        load(write(tmp_path / "m", tensors))


def test_tensor_that_stands_twice(tensors, tmp_path, nothing_read):
    tensors["model.norm.weight"] = tensors["norm.weight"].clone()
    with pytest.raises(ValueError, match="tensor norm.weight stands twice"):
        load(write(tmp_path / "m", tensors))


CUTS = {
    "empty": lambda whole: b"", "within the length": lambda whole: whole[:5],
    "within the header": lambda whole: whole[:200],
    "in the middle": lambda whole: whole[:len(whole) // 2], "by one byte": lambda whole: whole[:-1],
    "one byte too long": lambda whole: whole + b"\0", "a web page": lambda whole: b"<html>not found</html>" * 20,
    "a pointer": lambda whole: b"version https://git-lfs\noid sha256:0\nsize 1\n",
    "hole in the middle": lambda whole: whole[:1000] + whole[2000:],
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("layout", ["one file", "sharded"])
def test_truncated_or_foreign_file(tensors, tmp_path, nothing_read, layout, cut):
    """Case 23: the file is named, before anything is read from it or its neighbours."""
    folder = (write if layout == "one file" else shards)(tmp_path / "m", tensors)
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(CUTS[cut](file.read_bytes()))
    with pytest.raises(ValueError, match=f"{file.name} is not a whole safetensors file"):
        load(folder)


def test_missing_shard(tensors, tmp_path, nothing_read):
    folder = shards(tmp_path / "m", tensors)
    (folder / "model-00002-of-00003.safetensors").unlink()
    for step in (find_model, load):
        with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors is missing.*index.json names it"):
            step(folder)


def test_shard_that_lacks_a_tensor(tensors, tmp_path, nothing_read):
    """What the index promises and the file does not hold."""
    folder = shards(tmp_path / "m", tensors)
    file = folder / "model-00001-of-00003.safetensors"
    kept = load_file(file)
    name = sorted(kept)[0]
    save_file({key: tensor for key, tensor in kept.items() if key != name}, file)
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load(folder)


INDEXES = [
    "", "{", "[]", "null", "{}", '{"weight_map": [1]}', '{"weight_map": "x"}', '{"weight_map": {"a": 5}}',
    '{"weight_map": {"a": null}}', '{"weight_map": {"a": {"b": 1}}}', '{"weight_map": {"a": "x.safetensors", "b": 1}}',
]  # fmt: skip


@pytest.mark.parametrize("text", INDEXES, ids=repr)
def test_index_that_is_none(tensors, tmp_path, text):
    folder = shards(tmp_path / "m", tensors)
    (folder / "model.safetensors.index.json").write_text(text)
    for step in (find_model, load):
        with pytest.raises(ValueError, match="model.safetensors.index.json is not an index"):
            step(folder)


@pytest.mark.parametrize("shard", ["../m.safetensors", "sub/m.safetensors", "{tmp}/m.safetensors", "./m.safetensors"])
def test_index_that_leads_out_of_the_folder(tensors, tmp_path, shard):
    """Refused although the file is there and whole."""
    folder = write(tmp_path / "m", tensors)
    (folder / "sub").mkdir()
    for place in (tmp_path, folder / "sub", folder):
        shutil.copy(folder / "model.safetensors", place / "m.safetensors")
    (folder / "model.safetensors").unlink()
    names = dict.fromkeys(tensors, shard.format(tmp=tmp_path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match="index.json names the shard .*in its own folder"):
        load(folder)


def test_pickles_are_not_read(tensors, tmp_path):
    folder = write(tmp_path / "m")
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps({}))
    for step in (find_model, load):
        with pytest.raises(FileNotFoundError, match="only safetensors weights are read"):
            step(folder)


def test_config_and_weights_of_two_models(tensors, tmp_path, nothing_read):
    with pytest.raises(ValueError, match="embed_tokens.weight has shape .*64, 32.*expects .*80, 32"):
        load(write(tmp_path / "m", tensors, vocab_size=80))
    with pytest.raises(ValueError, match="no place"):
        load(write(tmp_path / "m", tensors, num_hidden_layers=3, layer_types=FLAT["layer_types"][:3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, "float32"], ids=str)
def test_dtype(tensors, tmp_path, nothing_read, dtype):
    with pytest.raises(TypeError, match="expected torch.float32 or torch.bfloat16"):
        Model.from_pretrained(write(tmp_path / "m", tensors), device="cpu", dtype=dtype)


def test_default_on_a_cpu_is_float32(tied, tensors, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = Model.from_pretrained(write(tmp_path / "m", {n: t.bfloat16() for n, t in tensors.items()}))
    assert found.device.type == "cpu" and found.dtype == torch.float32


@pytest.mark.parametrize("capability, dtype", [
    ((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16),
])  # fmt: skip
def test_default_on_cuda_asks_for_the_capability(tensors, tmp_path, monkeypatch, capability, dtype):
    """The meaning of the default, without a GPU: what would be asked of the loader."""
    asked = {}

    def loader(folder, shapes, device, dtypes):
        asked.update(device=device.type, dtypes=dtypes)
        raise InterruptedError
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr("qwen.model.load_tensors", loader)
    with pytest.raises(InterruptedError):
        Model.from_pretrained(write(tmp_path / "m", tensors))
    assert asked["device"] == "cuda"
    assert asked["dtypes"].pop("layers.0.linear_attn.A_log") == torch.float32
    assert asked["dtypes"]["layers.0.mlp.up_proj.weight"] == dtype


def test_index_of_tensors(tensors, tmp_path):
    tensors = {"model.language_model." + name: t for name, t in tensors.items()} | {"mtp.x": torch.ones(1)}
    index = tensor_index(write(tmp_path / "m", tensors))
    file, key, shape, kind = index["layers.0.linear_attn.conv1d.weight"]
    assert (file.name, key, shape, kind) == (
        "model.safetensors", "model.language_model.layers.0.linear_attn.conv1d.weight", (80, 1, 4), "F32")
    assert "x" not in index and "mtp.x" not in index


# find_model

def test_argument_then_environment_then_shipped(tensors, tmp_path, monkeypatch):
    one, two, three = (write(tmp_path / name, tensors) for name in ("one", "two", "three"))
    monkeypatch.setattr(weights, "SHIPPED", three)
    assert find_model() == three
    monkeypatch.setenv("QWEN_MODEL", str(two))
    assert find_model() == two
    assert find_model(one) == find_model(str(one)) == one
    monkeypatch.setenv("QWEN_MODEL", "")
    assert find_model() == three


def test_home_directory(tensors, tmp_path, monkeypatch):
    write(tmp_path / "m", tensors)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/m") == tmp_path / "m"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_without_a_file(tensors, tmp_path, file):
    folder = write(tmp_path / "m", tensors)
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"{file} is missing"):
        find_model(folder)


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "./a/b", "a/b/c", "Qwen/", "a b/c", "a..b/c", "a/b--c",
                                  "a/b.git", "a/" + "b" * 200])
def test_what_is_neither_folder_nor_id(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("QWEN_MODEL", name)
    with pytest.raises(FileNotFoundError):
        find_model()


def test_a_file_is_no_folder(tensors, tmp_path):
    folder = write(tmp_path / "m", tensors)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        find_model(folder / "model.safetensors")


def test_hub_id_asks_for_the_needed_files_only(tensors, tmp_path, monkeypatch):
    folder, asked = write(tmp_path / "m", tensors), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda *args, **kwargs: asked.append((args, kwargs)) or str(folder))
    assert find_model("Qwen/Qwen3.5-0.8B") == folder
    assert find_model("Qwen/Qwen3.5-0.8B", revision="abc") == folder
    for (args, kwargs), revision in zip(asked, [None, "abc"], strict=True):
        assert args == ("Qwen/Qwen3.5-0.8B",) and kwargs["revision"] == revision
        patterns = kwargs["allow_patterns"]
        wanted = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json",
                  "model-00001-of-00002.safetensors"]
        other = ["pytorch_model.bin", "model.pt", "README.md", "vocab.json", "merges.txt", "modeling.py", "model.gguf"]
        assert all(any(fnmatch(file, p) for p in patterns) for file in wanted)
        assert not any(fnmatch(file, p) for p in patterns for file in other)


def test_a_folder_of_that_name_wins_over_the_hub(tensors, tmp_path, monkeypatch):
    (tmp_path / "Qwen").mkdir()
    write(tmp_path / "Qwen" / "small", tensors)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: 1 / 0)
    assert find_model("Qwen/small").resolve() == (tmp_path / "Qwen" / "small").resolve()


def failure(name):
    from huggingface_hub import errors
    httpx = pytest.importorskip("httpx")                     # what today's client library speaks through
    request = httpx.Request("GET", "http://127.0.0.1:9")
    missing, broken = (httpx.Response(code, request=request) for code in (404, 500))
    return {
        "nothing cached": errors.LocalEntryNotFoundError("x"), "offline": errors.OfflineModeIsEnabled("x"),
        "no such repository": errors.RepositoryNotFoundError("x", response=missing),
        "no such revision": errors.RevisionNotFoundError("x", response=missing),
        "gated": errors.GatedRepoError("x", response=missing), "server": errors.HfHubHTTPError("x", response=broken),
        "no name server": OSError("x"), "line cut": httpx.ReadError("x", request=request),
        "slow": httpx.ConnectTimeout("x", request=request),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name, says", [
    ("no such repository", "no model Qwen/x"), ("no such revision", "no model Qwen/x"), ("gated", "no model Qwen/x"),
    ("nothing cached", "set QWEN_MODEL"), ("offline", "set QWEN_MODEL"), ("server", "set QWEN_MODEL"),
    ("no name server", "set QWEN_MODEL"), ("line cut", "set QWEN_MODEL"), ("slow", "set QWEN_MODEL"),
])  # fmt: skip
def test_every_way_the_hub_can_fail(name, says, monkeypatch, tmp_path):
    error = failure(name)

    def fail(*args, **kwargs):
        raise error
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=says):
        find_model("Qwen/x")


@pytest.mark.parametrize("setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_without_a_network(setting, tmp_path):
    """For real, in a process of its own: the last line says what to set."""
    code = "from qwen.weights import find_model; find_model('Qwen/Qwen3.5-0.8B')"
    env = os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": str(weights.SHIPPED.parents[1])} | setting
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("FileNotFoundError: Qwen/Qwen3.5-0.8B") and "set QWEN_MODEL" in last
