"""What a row carries from one call to the next.

Full-attention layers keep each past token's key and value, by slot; linear layers keep a window of K-1
inputs and one matrix a head. Every tensor has the row as its first dimension and no row reads another's,
so a row can be reset, moved, copied or put back alone.
"""
import torch

from qwen.config import FULL

GROW = 64                                                   # slots a growing cache takes at least


def slot_mapping(mask, length):
    """The slot each of a call's tokens gets: real tokens take the row's next ones, a pad takes none (-1).

    mask bool (B, T), length (B,) slots in use -> int64 (B, T). (vLLM's name for the same thing.)
    """
    slots = length[:, None] + mask.cumsum(1) - 1
    return slots.masked_fill(~mask, -1)


class State:
    """The memory of `batch` rows of one model.

    `length` (B,) counts the tokens each row has processed: its next position. `max_len` fixes how many a
    row may reach (default: the model's context; the buffers then grow as needed).
    k, v: per full-attention layer (B, Hkv, S + 1, D); conv, recurrent: per linear layer (B, K-1, C) in the
    model's dtype and (B, Hv, Dk, Dv) in fp32. Slot S is a spare into which pads fall; it is never read.
    A call that is broken off midway leaves its rows half updated: reset them, or restore them from a snapshot.
    """

    def __init__(self, model, batch: int = 1, max_len: int | None = None):
        config, device = model.config, model.device
        context = config.max_position_embeddings
        if type(batch) is not int or batch < 0:
            raise ValueError(f"batch is {batch!r}, expected a number of rows")
        if max_len is not None and not 1 <= max_len <= context:
            raise ValueError(f"max_len is {max_len}, expected 1 to the model's context {context}")
        self.config, self.max_len = config, max_len or context
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.k, self.v, self.conv, self.recurrent = {}, {}, {}, {}
        for layer, kind in enumerate(config.layer_types):
            if kind == FULL:
                for cache in (self.k, self.v):
                    cache[layer] = torch.zeros(batch, config.num_key_value_heads, (max_len or 0) + 1, config.head_dim,
                                               dtype=model.dtype, device=device)
            else:
                self.conv[layer] = torch.zeros(batch, config.linear_conv_kernel_dim - 1, config.conv_dim,
                                               dtype=model.dtype, device=device)
                self.recurrent[layer] = torch.zeros(batch, config.linear_num_value_heads, config.linear_key_head_dim,
                                                    config.linear_value_head_dim, device=device)

    @property
    def batch(self) -> int:
        """How many rows this state holds."""
        return len(self.length)

    def reserve(self, slots, rows=None) -> int:
        """Make room for a call's slots (B, T); returns how many slots its rows look at.

        rows (B,): which of the state's they are, None: all. Raises ValueError naming the first that would pass `max_len`.
        """
        rows = torch.arange(self.batch, device=slots.device) if rows is None else rows
        need = torch.maximum(self.length[rows], slots.amax(1) + 1)        # (B,)
        over = (need > self.max_len).nonzero()
        if len(over):
            row = over[0].item()
            raise ValueError(f"row {rows[row].item()} would hold {need[row].item()} tokens, the limit is {self.max_len}")
        span = max(need.tolist(), default=0)
        for cache in (self.k, self.v):
            for layer, old in cache.items():
                capacity = old.shape[2] - 1
                if span > capacity:
                    size = min(self.max_len, max(span, 2 * capacity, GROW))
                    cache[layer] = old.new_zeros(*old.shape[:2], size + 1, old.shape[3])
                    cache[layer][:, :, :capacity] = old[:, :, :capacity]
        return span

    def append(self, layer: int, k, v, call):
        """Store the k, v (B, Hkv, T, D) of a `model.Call`; return all its rows' keys and values (B, Hkv, S, D)."""
        rows = torch.arange(self.batch, device=k.device) if call.rows is None else call.rows
        for cache, new in ((self.k, k), (self.v, v)):
            cache[layer][rows[:, None], :, call.slots] = new.transpose(1, 2)     # slot -1, a pad's, is the spare at the end
        seen = (cache[layer][:, :, :call.span] for cache in (self.k, self.v))
        return [s if call.rows is None else s[rows] for s in seen]

    def advance(self, slots, rows=None):
        """Count a call's tokens (B, T), of these rows or of all, as processed."""
        length, rows = self.length.clone(), slice(None) if rows is None else rows
        length[rows] = torch.maximum(length[rows], slots.amax(1) + 1)
        self.length = length

    def reset(self, rows=None):
        """Make rows (an index, several, or None for all) as new; nothing of their last user is left."""
        rows = self._index(rows)
        for tensor in (self.length, *self._tensors()):
            tensor[rows] = 0

    def select(self, rows) -> "State":
        """A new State that holds copies of these rows, in this order (an index may come twice)."""
        rows = self._index(rows)
        other = object.__new__(State)
        other.config, other.max_len, other.length = self.config, self.max_len, self.length[rows]
        kept = max(other.length.tolist(), default=0)
        other.k, other.v = ({layer: _with_spare(t[rows, :, :kept]) for layer, t in cache.items()}
                            for cache in (self.k, self.v))
        other.conv, other.recurrent = ({layer: t[rows] for layer, t in cache.items()}
                                       for cache in (self.conv, self.recurrent))
        return other

    def snapshot(self, rows=None) -> "State":
        """Copies of rows to return to: a recurrent matrix cannot be cut back to fewer tokens, only put back."""
        return self.select(self._index(rows))

    def restore(self, rows, snapshot: "State"):
        """Overwrite rows with the snapshot's, one for one; they may be other rows, of another State of this model.

        Raises ValueError when the number of rows or the models' shapes differ, or the copy does not fit.
        """
        rows = self._index(rows)
        if len(rows) != snapshot.batch or len(set(rows.tolist())) != len(rows):
            raise ValueError(f"restore got rows {rows.tolist()} for a snapshot of {snapshot.batch} rows, "
                             f"expected as many different ones")
        if snapshot.config != self.config:
            raise ValueError("the snapshot was taken from a model of another shape")
        slots = self.length[:, None] - 1
        slots[rows, 0] = snapshot.length - 1
        self.reserve(slots)
        self.reset(rows)
        kept = max(snapshot.length.tolist(), default=0)
        for own, other in zip((self.k, self.v), (snapshot.k, snapshot.v)):
            for layer, cache in own.items():
                cache[rows, :, :kept] = other[layer][:, :, :kept]
        for own, other in zip((self.conv, self.recurrent), (snapshot.conv, snapshot.recurrent)):
            for layer, cache in own.items():
                cache[rows] = other[layer]
        self.length[rows] = snapshot.length

    def _tensors(self):
        return [t for cache in (self.k, self.v, self.conv, self.recurrent) for t in cache.values()]

    def _index(self, rows):
        """rows as an int64 tensor of valid row numbers."""
        if rows is None:
            rows = range(self.batch)
        rows = torch.as_tensor(rows if isinstance(rows, (int, torch.Tensor)) else list(rows)).flatten()
        if len(rows) and (rows.dtype == torch.bool or rows.is_floating_point()):
            raise TypeError(f"rows are {rows.dtype}, expected row numbers")
        for row in rows.tolist():
            if not 0 <= row < self.batch:
                raise IndexError(f"row {row} does not exist, the state has {self.batch} rows")
        return rows.to(self.length.device, torch.int64)


def _with_spare(cache):
    """A copy of cache (B, Hkv, S, D) with the spare slot behind it."""
    return torch.nn.functional.pad(cache, (0, 0, 0, 1))
