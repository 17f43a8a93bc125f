"""The whole model: embed, run the layers, norm, multiply by the head.

Rows share the weights and nothing else. The only places where one token meets another, attention and
DeltaNet, get their bookkeeping from one `Call`, made here once for all layers.
"""
from dataclasses import dataclass, replace

import torch
from torch import nn

from qwen import cache, deltanet, rope
from qwen.config import Config
from qwen.embedding import Embedding
from qwen.layer import Layer
from qwen.norm import RMSNorm
from qwen.packed import pack
from qwen.weights import load_tensors, tensor_index

FP32_ALWAYS = ("A_log", "dt_bias")                          # two numbers a head that decide the decay


@dataclass
class Call:
    """What every layer needs to know of one call's tokens, B rows of up to T."""

    mask: torch.Tensor                                      # (B, T) bool, True = real
    slots: torch.Tensor                                     # (B, T) cache slot of each token, -1 = pad
    span: int                                               # key slots that any row looks at
    before: torch.Tensor                                    # (B, T+1, K-1) inputs each token's convolution reads
    cos: torch.Tensor                                       # (B, 1, T, rotary_dim)
    sin: torch.Tensor
    rows: torch.Tensor | None = None                        # (B,) rows of the state they are; None: all, in order

    def mix(self, mixer, *inputs):
        """mixer(call, *inputs), inputs and result (B, T, …): what a layer does where a token meets others of its row."""
        return mixer(self, *inputs)

    def take(self, cache, layer: int):
        """These rows of cache[layer]."""
        return cache[layer] if self.rows is None else cache[layer][self.rows]

    def put(self, cache, layer: int, new):
        """Let these rows of cache[layer] be `new`."""
        if self.rows is None:
            cache[layer] = new
        else:
            cache[layer][self.rows] = new


@dataclass
class RaggedCall:
    """Rows laid end to end, x (1, N, …). Where tokens meet, rows that decode and rows that read a prompt are boxed apart.

    In one box the longest prompt would pad all the others.
    """

    parts: list[tuple[Call, torch.Tensor]]                  # a box, and where among the N its tokens lie

    def mix(self, mixer, *inputs):
        """As `Call.mix`, inputs and result (1, N, …)."""
        out = None
        for call, places in self.parts:
            boxes = [x.new_zeros(*call.mask.shape, *x.shape[2:]) for x in inputs]               # (B, T, …), 0 at pads
            for box, x in zip(boxes, inputs):
                box[call.mask] = x[0, places]
            mixed = mixer(call, *boxes)[call.mask]
            if out is None:
                out = mixed.new_empty(1, inputs[0].shape[1], *mixed.shape[1:])
            out[0, places] = mixed
        return out


class Model(nn.Module):
    """A Qwen3.5 text model. Parameters carry the names of the published files, less their prefix."""

    def __init__(self, config: Config):
        """Random weights (normal, 0.02) to train or to time; see `from_pretrained` for trained ones."""
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    @classmethod
    def from_pretrained(cls, path, device=None, dtype=None) -> "Model":
        """Load a model folder (see `weights.find_model`).

        device: default CUDA where there is one, else CPU (Apple's GPU only if asked for). dtype: float32 or
        bfloat16; default float32, on CUDA of compute capability 8 or more bfloat16. The parameters are
        frozen. Raises FileNotFoundError or ValueError naming the file or tensor, before any data is read.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if dtype is None:
            native = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
            dtype = torch.bfloat16 if native else torch.float32
        if dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"dtype is {dtype!r}, expected torch.float32 or torch.bfloat16")
        config, names = Config.from_file(path), tensor_index(path)
        if "lm_head.weight" not in names and not config.tie_word_embeddings:
            raise ValueError(f"{path}: tensor lm_head.weight is missing and config.json does not tie the head "
                             f"to the embedding (tie_word_embeddings)")
        config = replace(config, tie_word_embeddings="lm_head.weight" not in names)   # a head in the file wins
        with torch.device("meta"):
            model = cls(config)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        dtypes = {name: torch.float32 if name.endswith(FP32_ALWAYS) else dtype for name in shapes}
        for name, tensor in load_tensors(path, shapes, device, dtypes):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        pack(model)
        return model.eval()

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def forward(self, ids, state=None, mask=None, last_only: bool = False):
        """One step for every row: logits (B, T, vocab), or (B, 1, vocab) at each row's last real token.

        ids (B, T) integers. state: the rows' `cache.State`, extended by this call; None starts from nothing
        and keeps nothing. mask bool (B, T), True = real, for this call's tokens only; pads may stand left,
        right or between, and their logits are finite and mean nothing. Raises ValueError or TypeError, before
        any work, for ids, masks or states that do not fit.
        """
        ids, mask = self._check(ids, state, mask)
        state = self._empty_state(ids) if state is None else state
        x = self._layers(ids, self._call(mask, state), state)             # (B, T, hidden)
        if last_only:
            last = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1)
            x = x[torch.arange(len(x), device=x.device), last, None]     # (B, 1, hidden)
        return self._logits(x)

    def ragged(self, ids, cu_seqlens, state=None, last_only: bool = False):
        """The same step without a pad in any projection: rows of unequal length laid end to end.

        ids (N,) integers; cu_seqlens (B+1,): row r's new tokens are ids[cu_seqlens[r]:cu_seqlens[r+1]], and a row
        may bring none; state as in `forward` -> logits (N, vocab), or (B, vocab) at each row's last token. Only inside
        attention and DeltaNet, where a token meets others of its row, rows are put into boxes; all weights see the N
        real tokens alone. Raises ValueError or TypeError for offsets that do not fit the ids, and for a row without
        tokens where its last one is asked for.
        """
        offsets = torch.as_tensor(cu_seqlens).cpu()
        lengths = offsets.flatten().diff()
        if not isinstance(ids, torch.Tensor) or offsets.is_floating_point() or offsets.dtype == torch.bool:
            raise TypeError(f"ids are {type(ids).__name__} and cu_seqlens {offsets.dtype}, expected tensors of integers")
        if ids.dim() != 1 or offsets.dim() != 1 or len(lengths) == 0 or offsets[0] != 0 or (lengths < 0).any() or offsets[-1] != len(ids):
            raise ValueError(f"cu_seqlens {offsets.tolist()} does not cut {tuple(ids.shape)} ids into rows, "
                             f"expected offsets that rise from 0 to their number")
        if last_only and not lengths.all():
            raise ValueError(f"row {lengths.argmin().item()} brings no token and has no last one")
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]  # (B, T), real tokens first
        box = torch.zeros(mask.shape, dtype=ids.dtype)                    # _check refuses ids that are no integers
        box[mask] = ids.cpu()
        box, mask = self._check(box, state, mask)
        state = self._empty_state(box) if state is None else state
        if mask.all():                                                    # rows of one length are a box as they lie
            x = self._layers(box, self._call(mask, state), state).flatten(0, 1)         # (N, hidden)
        else:
            x = self._layers(box[mask][None], self._ragged_call(mask, state), state)[0]
        if last_only:
            x = x[offsets[1:].to(x.device) - 1]                           # (B, hidden)
        return self._logits(x)

    def _empty_state(self, ids):
        return cache.State(self, len(ids), max_len=min(ids.shape[1], self.config.max_position_embeddings))

    def _call(self, mask, state, rows=None):
        slots = cache.slot_mapping(mask, state.length if rows is None else state.length[rows])
        span = state.reserve(slots, rows)
        before = deltanet.window_index(mask, self.config.linear_conv_kernel_dim)
        cos, sin = rope.angles(rope.positions(slots), self.config.rotary_dim, self.config.rope_theta)
        return Call(mask, slots, span, before, cos, sin, rows)

    def _ragged_call(self, mask, state):
        """mask (B, T), real tokens first in each row."""
        lengths = mask.sum(1)
        place = mask.long().masked_scatter(mask, torch.arange(int(lengths.sum()), device=mask.device))    # among the N
        parts = []
        for some in (lengths <= 1, lengths > 1):
            rows = some.nonzero()[:, 0]
            if len(rows):
                part = mask[rows, :max(int(lengths[rows].max()), 1)]
                places = place[rows, :part.shape[1]][part]
                parts.append((self._call(part, state, rows if len(rows) < len(mask) else None), places))
        return RaggedCall(parts)

    def _layers(self, ids, call, state):
        x = self.embed_tokens(ids)                                        # (B, T, hidden), ragged (1, N, hidden)
        for layer in self.layers:
            x = layer(x, call, state)
        for part, _ in getattr(call, "parts", [(call, None)]):
            state.advance(part.slots, part.rows)
        return x

    def _logits(self, x):
        return (self.lm_head or self.embed_tokens.logits)(self.norm(x))

    def check_prompts(self, prompts, max_new_tokens: int = 0, names=None):
        """Refuse token lists this model cannot run: ValueError or TypeError naming the row, or calling it by names[row].

        The last new token is never fed back, so a prompt of n tokens and m new ones need n + m - 1 positions.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}, expected a whole number of at least 0")
        context = self.config.max_position_embeddings
        for row, prompt in enumerate(prompts):
            who = names[row] if names else f"row {row}"
            if not isinstance(prompt, (list, tuple)):
                raise TypeError(f"{who} is {prompt!r}, expected a list of token ids")
            if len(prompt) == 0:
                raise ValueError(f"{who} is empty, expected at least one token")
            for token in prompt:
                if type(token) is not int:
                    raise TypeError(f"{who} holds {token!r}, expected token ids (int)")
                if not 0 <= token < self.config.vocab_size:
                    raise ValueError(f"{who} holds token {token}, the vocabulary has 0 to {self.config.vocab_size - 1}")
            if len(prompt) + max(max_new_tokens - 1, 0) > context:
                raise ValueError(f"{who}: a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit "
                                 f"the context of {context}")

    def _check(self, ids, state, mask):
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"ids are {getattr(ids, 'dtype', type(ids).__name__)}, expected a tensor of integers")
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(f"ids have shape {tuple(ids.shape)}, expected (B, T) with at least one row and one token")
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
                raise TypeError(f"mask is {getattr(mask, 'dtype', type(mask).__name__)}, expected a bool tensor, True = real")
            if mask.shape != ids.shape:
                raise ValueError(f"mask has shape {tuple(mask.shape)}, expected that of ids, {tuple(ids.shape)}")
        if state is not None and state.batch != len(ids):
            raise ValueError(f"state holds {state.batch} rows, ids have {len(ids)}")
        if state is not None and state.config != self.config:
            raise ValueError("state was made for a model of another shape")
        ids = ids.to(self.device, torch.int64)
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(self.device)
        outside = (((ids < 0) | (ids >= self.config.vocab_size)) & mask).nonzero()
        if len(outside):
            row, column = outside[0].tolist()
            raise ValueError(f"row {row} holds token {ids[row, column].item()}, the vocabulary has 0 to "
                             f"{self.config.vocab_size - 1}")
        return ids.masked_fill(~mask, 0), mask                            # what a pad holds makes no difference
