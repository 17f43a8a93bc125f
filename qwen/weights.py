"""Where a model lies and how its tensors are read: safetensors only, every name and shape checked first.

Layout of a model folder: `config.json`, `tokenizer.json`, and either `model.safetensors` or
`model.safetensors.index.json` with the shards it names. Format: huggingface.co/docs/safetensors.
"""
import json
import os
import re
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

SHIPPED = Path(__file__).parent / "tiny"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIXES = ("model.language_model.", "model.")
NOT_TEXT = ("model.visual.", "visual.", "mtp.")             # the vision tower and the draft head
FLOATS = ("F32", "F16", "BF16")
SHOW_FROM = 50_000_000                                      # weights: from here on, loading takes long enough for a bar


def find_model(name=None, revision=None) -> Path:
    """The folder of a model: `name`, else the environment's `QWEN_MODEL`, else the shipped tiny model.

    `name` is a folder or a hub id such as "Qwen/Qwen3.5-0.8B"; a hub id is downloaded once
    (`revision`: branch, tag or commit), only the files this package reads.
    Raises FileNotFoundError when the folder lacks a file or the hub cannot be reached.
    """
    name = name or os.environ.get("QWEN_MODEL") or SHIPPED
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not HUB_ID.fullmatch(str(name)) or folder.exists():
            raise FileNotFoundError(f"{name} is no folder and no hub id: set QWEN_MODEL to a model folder, to an id "
                                    f"like Qwen/Qwen3.5-0.8B, or leave it unset for the shipped model")
        folder = _download(str(name), revision)
    for file in ("config.json", "tokenizer.json"):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} is missing: a model folder needs it")
    _weight_files(folder)
    return folder


def _download(repo_id: str, revision) -> Path:
    from huggingface_hub import snapshot_download           # needed by nobody who stays offline
    from huggingface_hub import errors
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=HUB_FILES))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise FileNotFoundError(f"the hub has no model {repo_id}"
                                f"{'' if revision is None else f' at revision {revision}'}") from error
    except Exception as error:                              # whatever its network library raises means the same here
        raise FileNotFoundError(f"{repo_id} is not on this machine and the hub cannot be reached: set QWEN_MODEL to a "
                                f"folder that holds it, or unset QWEN_MODEL to use the shipped model") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, each of which exists."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder / SINGLE} is missing, and so is {INDEX}: only safetensors weights are read")
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        named = [Path(shard).name for shard in shards]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is not an index of shards ({error!r})") from None
    for shard, name in zip(shards, named):
        if name != shard:
            raise ValueError(f"{folder / INDEX} names the shard {shard!r}, expected a file name in its own folder")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder / shard} is missing: {INDEX} names it")
    return [folder / shard for shard in shards]


def tensor_index(folder) -> dict[str, tuple[Path, str, tuple[int, ...], str]]:
    """Read the headers only: text tensor name (prefix stripped) -> (file, name in it, shape, dtype).

    Raises ValueError for a truncated or foreign file and for a name that stands twice.
    """
    index = {}
    for file in _weight_files(Path(folder)):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    if key.startswith(NOT_TEXT):
                        continue
                    name = next((key[len(p):] for p in PREFIXES if key.startswith(p)), key)
                    if name in index:
                        raise ValueError(f"{file}: tensor {name} stands twice (as {index[name][1]} and {key})")
                    part = tensors.get_slice(key)
                    index[name] = file, key, tuple(part.get_shape()), part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}): fetch or copy it again") from None
    return index


def load_tensors(folder, shapes: dict[str, tuple[int, ...]], device, dtypes: dict[str, torch.dtype]):
    """Yield (name, tensor) for every name in `shapes`, one tensor in memory at a time beside the results.

    All names, shapes and kinds are checked before the first byte of data is read.
    Raises ValueError that names the file and the tensor.
    """
    index = tensor_index(folder)
    for name, shape in shapes.items():
        if name not in index:
            raise ValueError(f"{folder}: tensor {name} is missing, config.json expects it with shape {tuple(shape)}")
        file, key, found, kind = index[name]
        if found != tuple(shape):
            raise ValueError(f"{file}: tensor {key} has shape {found}, config.json expects {tuple(shape)}")
        if kind not in FLOATS:
            raise ValueError(f"{file}: tensor {key} holds {kind}, expected one of {', '.join(FLOATS)}")
    for name, (file, key, *_) in index.items():
        if name.startswith("layers.") and name not in shapes:
            raise ValueError(f"{file}: tensor {key} has no place in the model that config.json describes")
    small = sum(map(prod, shapes.values())) < SHOW_FROM
    for name in tqdm(shapes, desc="loading", unit="tensor", leave=False, disable=small):
        file, key, *_ = index[name]
        with safe_open(file, framework="pt") as tensors:   # opened anew: an open file keeps in memory what was read of it
            yield name, tensors.get_tensor(key).to(device, dtypes[name], copy=True)
