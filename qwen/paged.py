"""Keys and values in blocks: rows that grow as they need, share what they have in common, and give back at once.

A row's keys and values lie in blocks of `block_size` tokens anywhere in the memory; its block table says where.
(PagedAttention: Kwon et al. 2023, arXiv 2309.06180.) A linear layer has nothing to page: its window and matrix
have one size at any length, so every running row has one fixed place for them. A block shared with another row
is therefore only half of a prefix; the other half is a snapshot of window and matrix taken at its end.
"""
import hashlib
from collections import Counter, OrderedDict

import torch

from qwen.cache import State
from qwen.config import FULL
from qwen.roofline import count


class OutOfBlocks(RuntimeError):
    """No free block is left; nothing was taken."""


class BlockPool:
    """Which of `num_blocks` blocks are free, and how many hold each of the others. Plain counting, no tensors.

    A freed block goes to the end of the queue and keeps its contents until it is allocated again, so the longest
    unused goes first; `forget` is called with each block whose contents are about to go.
    """

    def __init__(self, num_blocks: int, block_size: int, forget=lambda block: None):
        count(1, num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.block_size, self.forget = num_blocks, block_size, forget
        self.clear()

    def clear(self):
        """All blocks are free, whoever held them."""
        self.queue = OrderedDict.fromkeys(range(self.num_blocks))         # the free ones, the next to go first
        self.holders = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self.queue)

    @property
    def num_used(self) -> int:
        """Different blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens take, the last perhaps in part."""
        return -(-tokens // self.block_size)

    def allocate(self, number: int = 1) -> list[int]:
        """Take so many free blocks, each with one holder. Raises OutOfBlocks, before any is taken."""
        if number > self.num_free:
            raise OutOfBlocks(f"{number} blocks are wanted, {self.num_free} of {self.num_blocks} are free")
        taken = [self.queue.popitem(last=False)[0] for _ in range(number)]
        for block in taken:
            self.forget(block)
            self.holders[block] = 1
        return taken

    def share(self, blocks):
        """One more holder for each block, also for a free one whose contents are still wanted."""
        for block in self._known(blocks):
            self.queue.pop(block, None)
            self.holders[block] += 1

    def free(self, blocks):
        """One holder less for each block; the last to leave makes it free. Raises ValueError if one has none left."""
        blocks = self._known(blocks)
        for block, times in Counter(blocks).items():
            if times > self.holders[block]:
                raise ValueError(f"block {block} is freed {times} times and has {self.holders[block]} holders")
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.queue[block] = None

    def _known(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block!r} does not exist, the pool has 0 to {self.num_blocks - 1}")
        return blocks


def slot_mapping(positions, block_table, block_size: int):
    """Where in the memory a row's tokens lie: the block that the table names, and the place in it.

    positions (..., T) int64, block_table (..., N) int64, leading dimensions alike -> slots (..., T) int64.
    """
    return block_table.gather(-1, positions // block_size) * block_size + positions % block_size


class PagedCache:
    """The memory of `num_rows` running rows: blocks for keys and values, one fixed place a row for the rest.

    k, v: per full-attention layer (num_blocks · block_size + 1, Hkv, D), the last slot a spare that pads fall into;
    `tables[r]` and `length[r]` are row r's. `fixed` is a `cache.State` without keys and values: windows and matrices.
    """

    def __init__(self, model, num_rows: int, num_blocks: int, block_size: int = 16, num_snapshots: int = 0):
        count(0, num_snapshots=num_snapshots)
        config, self.pool = model.config, BlockPool(num_blocks, block_size, self._forget)
        self.fixed, self.tables, self.length = State(model, num_rows), [[] for _ in range(num_rows)], [0] * num_rows
        shape = num_blocks * block_size + 1, config.num_key_value_heads, config.head_dim
        self.k, self.v = ({layer: torch.zeros(shape, dtype=model.dtype, device=model.device)
                           for layer, kind in enumerate(config.layer_types) if kind == FULL} for _ in "kv")
        self.known, self.key_of = {}, {}                                  # prefix -> its last block, and back
        self.num_snapshots, self.snapshots = num_snapshots, OrderedDict() # prefix -> window and matrix at its end

    def clear(self):
        """As new: no row holds anything and no prefix is known."""
        self.pool.clear()
        self.tables, self.length = [[] for _ in self.tables], [0] * len(self.length)
        self.fixed.reset()
        for prefixes in (self.known, self.key_of, self.snapshots):
            prefixes.clear()

    def missing(self, row: int, tokens: int) -> int:
        """Blocks that row must take before it holds `tokens` more, copies of shared ones that it would write counted."""
        total = self.pool.blocks(self.length[row] + tokens)
        return max(0, total - len(self.tables[row])) + len(self._shared(row, tokens))

    def grow(self, row: int, tokens: int):
        """Make room in row for `tokens` more. Raises OutOfBlocks, before anything changes.

        A block that others hold too is copied before the row writes into it, and theirs stays as it is.
        """
        shared = self._shared(row, tokens)
        fresh = self.pool.allocate(self.missing(row, tokens))
        size, table = self.pool.block_size, self.tables[row]
        for index, copy in zip(shared, fresh):
            for cache in (*self.k.values(), *self.v.values()):
                cache[copy * size:(copy + 1) * size] = cache[table[index] * size:(table[index] + 1) * size]
            self.pool.free([table[index]])
            table[index] = copy
        table.extend(fresh[len(shared):])

    def _shared(self, row, tokens):
        """Places in row's table that the next tokens would write into and others hold too."""
        if tokens < 1:
            return []
        first, last = self.length[row] // self.pool.block_size, self.pool.blocks(self.length[row] + tokens)
        return [i for i in range(first, min(last, len(self.tables[row]))) if self.pool.holders[self.tables[row][i]] > 1]

    def release(self, row: int):
        """Row's blocks go back, the last first: a prefix is useful only from its start, so its end is reused first."""
        self.pool.free(self.tables[row][::-1])
        self.tables[row], self.length[row] = [], 0
        self.fixed.reset(row)

    def fork(self, row: int, into: int):
        """Make the empty row `into` a second holder of all that row holds: one prompt, two answers."""
        self._check_empty(into)
        self.pool.share(self.tables[row])
        self.tables[into], self.length[into] = list(self.tables[row]), self.length[row]
        self.fixed.restore([into], self.fixed.snapshot([row]))

    def _check_empty(self, row):
        if self.tables[row]:
            raise ValueError(f"row {row} holds {self.length[row]} tokens in {len(self.tables[row])} blocks, expected an empty row")

    def rows(self, rows) -> "PagedRows":
        """What one call of the model works on: these rows, in this order."""
        return PagedRows(self, list(rows))

    # Prefixes --------------------------------------------------------------------------------------------------

    def extend(self, keys, tokens):
        """Add to keys what full blocks of tokens it lacks: a digest of everything from the start to each block's end."""
        size = self.pool.block_size
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            block = ",".join(map(str, tokens[start:start + size]))
            keys.append(hashlib.sha256((keys[-1] if keys else b"") + block.encode()).digest())

    def match(self, keys) -> tuple[int, int]:
        """(blocks of this prefix that are still there, how many of them end in a snapshot and can be reused)."""
        there = next((i for i, key in enumerate(keys) if key not in self.known), len(keys))
        return there, next((i for i in range(there, 0, -1) if keys[i - 1] in self.snapshots), 0)

    def reuse(self, row: int, keys):
        """Start the empty row after the prefix that ends with keys[-1]: shared blocks, and its snapshot put back.

        Raises ValueError when a block or the snapshot is gone: a recurrent matrix cannot be cut back to a prefix.
        """
        if not keys or keys[-1] not in self.snapshots or any(key not in self.known for key in keys):
            raise ValueError(f"row {row}: no snapshot was kept after these {len(keys)} blocks, nothing can be reused")
        self._check_empty(row)
        blocks = [self.known[key] for key in keys]
        self.pool.share(blocks)
        self.tables[row], self.length[row] = blocks, len(blocks) * self.pool.block_size
        self.snapshots.move_to_end(keys[-1])
        self.fixed.restore([row], self.snapshots[keys[-1]])

    def remember(self, row: int, keys, snapshot: bool = False):
        """Let others find row's first len(keys) blocks; with `snapshot`, also what its linear layers hold now.

        The oldest snapshot goes when there are more than `num_snapshots`. Raises ValueError unless a row of which a
        snapshot is taken ends exactly with keys[-1].
        """
        if snapshot and (self.length[row] != len(keys) * self.pool.block_size or not keys):
            raise ValueError(f"row {row} holds {self.length[row]} tokens, expected the {len(keys)} full blocks of its keys")
        for key, block in zip(keys, self.tables[row]):
            if key not in self.known:
                self.known[key], self.key_of[block] = block, key
        if snapshot:
            self.snapshots[keys[-1]] = self.fixed.snapshot([row])
            self.snapshots.move_to_end(keys[-1])
            while len(self.snapshots) > self.num_snapshots:
                self.snapshots.popitem(last=False)

    def _forget(self, block):
        key = self.key_of.pop(block, None)
        self.known.pop(key, None)
        self.snapshots.pop(key, None)


class PagedRows:
    """Some rows of a PagedCache, as the model's `state` for one call; the same interface as `cache.State`.

    New keys and values go straight into blocks that only their row reads, behind its length. Windows and matrices
    are copies: until `commit` the cache is as before, so a call that breaks off has changed nothing.
    """

    def __init__(self, cache: PagedCache, rows: list[int]):
        copies = cache.fixed.select(rows)
        self.cache, self.index, self.config = cache, rows, copies.config
        self.conv, self.recurrent = copies.conv, copies.recurrent
        self.length = torch.tensor([cache.length[row] for row in rows], dtype=torch.int64, device=copies.length.device)

    batch, advance = State.batch, State.advance

    def reserve(self, slots, rows=None) -> int:
        """Find the memory of a call's slots (B, T); returns how many slots its rows look at. rows as in `State`.

        Raises ValueError naming a row whose blocks do not reach so far or are others' too.
        """
        rows = torch.arange(self.batch, device=slots.device) if rows is None else rows
        need = torch.maximum(self.length[rows], slots.amax(1) + 1).tolist()
        size, tables = self.cache.pool.block_size, [self.cache.tables[row] for row in self.index]
        for row, tokens in zip(rows.tolist(), need):
            if tokens > len(tables[row]) * size:
                raise ValueError(f"row {self.index[row]} would hold {tokens} tokens, its {len(tables[row])} blocks of {size} "
                                 f"have no room for them")
            if self.cache._shared(self.index[row], tokens - self.cache.length[self.index[row]]):
                raise ValueError(f"row {self.index[row]} would write into a block that others hold: grow it first")
        self.places = {}
        width = max(1, *map(len, tables))
        self.table = torch.tensor([t + [0] * (width - len(t)) for t in tables], device=slots.device)    # (rows, N)
        return max(need)

    def append(self, layer: int, k, v, call):
        """Store the k, v (B, Hkv, T, D) of a `model.Call`; return its rows' (B, Hkv, S, D), gathered from their blocks."""
        write, read = self.places.get(id(call)) or self._places(call)     # the same in every layer
        found = []
        for cache, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
            cache[write] = new.transpose(1, 2)                            # (B, T, Hkv, D)
            found.append(cache[read].transpose(1, 2))
        return found

    def _places(self, call):
        """Where a call's new tokens go (B, T), and where all that its rows look at lies (B, S)."""
        size, spare = self.cache.pool.block_size, self.cache.pool.num_blocks * self.cache.pool.block_size
        table = self.table if call.rows is None else self.table[call.rows]                              # (B, N)
        write = slot_mapping(call.slots.clamp(min=0), table, size).masked_fill(call.slots < 0, spare)   # (B, T)
        position = torch.arange(call.span, device=table.device).expand(len(table), -1)                  # (B, S)
        # Behind a row's last token its block may hold what an earlier owner left: the spare is read instead
        behind = position > call.slots.amax(1, keepdim=True)
        self.places[id(call)] = write, slot_mapping(position, table, size).masked_fill(behind, spare)
        return self.places[id(call)]

    def commit(self, rows=None):
        """Make the call's result the cache's: lengths, windows and matrices of all its rows, or of these (indices)."""
        rows = list(range(self.batch) if rows is None else rows)
        index = [self.index[i] for i in rows]
        for own, kept in ((self.conv, self.cache.fixed.conv), (self.recurrent, self.cache.fixed.recurrent)):
            for layer, tensor in own.items():
                kept[layer][index] = tensor[rows]
        for row, length in zip(index, self.length[rows].tolist()):
            self.cache.length[row] = length
