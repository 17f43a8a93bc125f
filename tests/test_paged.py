"""Blocks are counted right, and rows whose keys and values lie in them give what the same rows give in one piece."""
import gc
from collections import Counter

import pytest
import torch
from helpers import far, random_model, solo, tokens
from hypothesis import given, settings, strategies as st

from qwen.batch import pad_left
from qwen.cache import State
from qwen.paged import BlockPool, OutOfBlocks, PagedCache, PagedRows, slot_mapping

MODELS = {"hybrid": random_model(0, tie_word_embeddings=False), "one KV head": random_model(2, num_key_value_heads=1)}
MODEL = MODELS["hybrid"]


def run(cache, rows, parts):
    """One ragged call of `rows`, which take the blocks they need -> logits of each row's last token (B, vocab)."""
    for row, part in zip(rows, parts):
        cache.grow(row, len(part))
    view = cache.rows(rows)
    logits = MODEL.ragged(torch.tensor(sum(parts, [])), torch.tensor([0, *map(len, parts)]).cumsum(0), view, last_only=True)
    view.commit()
    return logits


def sound(cache):
    """Free and used blocks make up the pool, each is one or the other, and holders are what the tables say."""
    holders = Counter(block for table in cache.tables for block in table)
    pool = cache.pool
    assert pool.num_free + pool.num_used == pool.num_blocks and pool.num_used == len(holders)
    assert [holders[block] for block in range(pool.num_blocks)] == pool.holders
    assert set(pool.queue).isdisjoint(holders)


def test_block_8_table_5_0_3():
    """Token 16 of a row of 17 sits at 24; a new block is taken when 8 and 16 are crossed, and no sooner."""
    slots = slot_mapping(torch.arange(17), torch.tensor([5, 0, 3]), 8)
    assert slots.tolist() == [*range(40, 48), *range(0, 8), 24]
    cache = PagedCache(MODEL, 1, 6, 8)
    cache.pool.allocate(6)
    cache.pool.free([5, 0, 3, 1, 2, 4])                                   # the order in which they will be taken
    taken = []
    for token in tokens(0, 17)[0]:
        run(cache, [0], [[token]])
        taken.append(len(cache.tables[0]))
    assert taken == [1] * 8 + [2] * 8 + [3] and cache.tables[0] == [5, 0, 3] and cache.length == [17]
    assert cache.k[1][24].any() and not cache.k[1][25].any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_no_history_of_a_pool_loses_or_doubles_a_block(data):
    pool, held = BlockPool(data.draw(st.integers(1, 9)), 4), []
    for _ in range(data.draw(st.integers(1, 30))):
        act = data.draw(st.sampled_from(("allocate", "share", "free")))
        if act == "allocate":
            count = data.draw(st.integers(0, 4))
            if count > pool.num_free:
                with pytest.raises(OutOfBlocks, match=f"{count} blocks are wanted, {pool.num_free} of {pool.num_blocks} are free"):
                    pool.allocate(count)
            else:
                taken = pool.allocate(count)
                assert not set(taken) & set(held) and len(set(taken)) == count
                held += taken
        elif held:
            block = data.draw(st.sampled_from(held))
            getattr(pool, act)([block])
            held.append(block) if act == "share" else held.remove(block)
        assert pool.num_free + pool.num_used == pool.num_blocks and pool.num_used == len(set(held))
        assert not set(pool.queue) & set(held)


def test_freeing_twice_is_refused_and_changes_nothing():
    pool = BlockPool(4, 16)
    a, b = pool.allocate(2)
    pool.share([a])
    for blocks in ([b, b], [a, a, a], [a, b, b]):
        with pytest.raises(ValueError, match=f"block {blocks[-1]} is freed {blocks.count(blocks[-1])} times and has"):
            pool.free(blocks)
    assert pool.holders == [2, 1, 0, 0] and pool.num_free == 2
    pool.free([a, a, b])
    with pytest.raises(ValueError, match=f"block {b} is freed 1 times and has 0 holders"):
        pool.free([b])
    assert pool.num_free == 4


@pytest.mark.parametrize("block", [4, -1, 1.0, None])
def test_a_block_that_does_not_exist(block):
    for act in (BlockPool(4, 16).free, BlockPool(4, 16).share):
        with pytest.raises(ValueError, match="does not exist, the pool has 0 to 3"):
            act([block])


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2.0, 4), (True, 4), (-1, 4)])
def test_a_pool_of_no_size(sizes):
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        BlockPool(*sizes)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 200)), min_size=1, max_size=4), size=st.sampled_from([1, 3, 8, 16]),
       seed=st.integers(0, 99))
@torch.no_grad()
def test_contiguous_ragged_and_paged_agree(name, lengths, size, seed):
    """One interface, three layouts; then three decode steps on each."""
    model, seqs, rows = MODELS[name], tokens(seed, *(n + 3 for n in lengths)), range(len(lengths))
    contiguous, ragged = State(model, len(seqs)), State(model, len(seqs))
    cache = PagedCache(model, len(seqs), 4 + sum(-(-(n + 3) // size) for n in lengths), size)
    for call in range(4):
        parts = [s[:n] if call == 0 else [s[n + call - 1]] for s, n in zip(seqs, lengths)]
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        for row, part in zip(rows, parts):
            cache.grow(row, len(part))
        box, mask = pad_left(parts)
        view = cache.rows(rows)
        found = (model(box, contiguous, mask, last_only=True)[:, -1],
                 model.ragged(torch.tensor(sum(parts, [])), offsets, ragged, last_only=True),
                 model.ragged(torch.tensor(sum(parts, [])), offsets, view, last_only=True))
        view.commit()
        for row in rows:
            truth = model(torch.tensor([seqs[row][:lengths[row] + call]]), last_only=True)[0, -1]
            assert all(far(logits[row], truth) <= 1 for logits in found)


@torch.no_grad()
def test_rows_leave_enter_and_change_order():
    """The middle of three rows leaves, another takes its place and blocks, an empty row stands by; all as alone."""
    seqs, cache = tokens(1, 40, 23, 31, 70), PagedCache(MODEL, 4, 14, 8)
    run(cache, [0, 1, 2], [s[:20] for s in seqs[:3]])
    old = list(cache.tables[1])
    cache.release(1)
    run(cache, [2, 1], [seqs[2][20:30], seqs[3][:33]])                    # other order, other user in row 1
    assert set(old) & set(cache.tables[1]) or cache.pool.num_free == 0
    assert cache.length == [20, 33, 30, 0] and cache.tables[3] == []
    for row, seq in ((0, seqs[0][:21]), (1, seqs[3][:34]), (2, seqs[2][:31])):
        assert far(run(cache, [row], [seq[-1:]])[0], solo(MODEL, seq)[0][-1]) <= 1
    sound(cache)


@torch.no_grad()
def test_nothing_of_a_blocks_last_owner_is_read():
    """Not even NaN in memory that nobody holds, nor behind a row's end."""
    seqs, cache = tokens(2, 9, 30), PagedCache(MODEL, 1, 5, 8)
    for tensor in (*cache.k.values(), *cache.v.values()):
        tensor[:-1] = float("nan")
    for seq in seqs:
        assert far(run(cache, [0], [seq])[0], solo(MODEL, seq)[0][-1]) <= 1
        cache.release(0)


@torch.no_grad()
def test_two_answers_from_one_prompt_copy_only_the_block_they_write():
    prompt, cache = tokens(3, 20)[0], PagedCache(MODEL, 2, 8, 8)
    run(cache, [0], [prompt])
    cache.fork(0, 1)
    assert cache.pool.num_used == 3 and cache.tables[0] == cache.tables[1]
    for row, token in ((0, 5), (1, 9)):
        assert cache.missing(row, 1) == (row == 0)                        # the first to write copies, the last owns it
        assert far(run(cache, [row], [[token]])[0], solo(MODEL, prompt + [token])[0][-1]) <= 1
    assert cache.tables[0][:2] == cache.tables[1][:2] and cache.tables[0][2] != cache.tables[1][2] and cache.pool.num_used == 4
    for row, tail in ((0, [5, 7]), (1, [9, 7])):                          # each goes on from its own copy
        assert far(run(cache, [row], [[7]])[0], solo(MODEL, prompt + tail)[0][-1]) <= 1
    sound(cache)
    with pytest.raises(ValueError, match="row 1 holds 22 tokens in 3 blocks, expected an empty row"):
        cache.fork(0, 1)
    for row in (0, 1):
        cache.release(row)
    assert cache.pool.num_free == 8


def test_a_shared_block_is_not_written_by_accident():
    cache = PagedCache(MODEL, 2, 8, 8)
    run(cache, [0], [tokens(3, 20)[0]])
    cache.fork(0, 1)
    with pytest.raises(ValueError, match="row 1 would write into a block that others hold: grow it first"):
        MODEL.ragged(torch.tensor([7]), torch.tensor([0, 1]), cache.rows([1]))
    assert cache.missing(1, 0) == 0
    cache.grow(0, 1)
    MODEL.ragged(torch.tensor([7]), torch.tensor([0, 1, 1]), cache.rows([0, 1]))     # row 1 writes nothing


def test_growing_without_room_changes_nothing():
    cache = PagedCache(MODEL, 2, 4, 8)
    run(cache, [0], [tokens(4, 12)[0]])
    cache.fork(0, 1)
    before = [list(t) for t in cache.tables], list(cache.pool.holders)
    with pytest.raises(OutOfBlocks, match="3 blocks are wanted, 2 of 4 are free"):
        cache.grow(1, 17)                                                 # two new ones and a copy of the shared one
    assert before == (cache.tables, cache.pool.holders)
    sound(cache)


@torch.no_grad()
def test_a_prefix_is_reused_only_with_its_snapshot():
    """Blocks alone are half of it: without window and matrix nothing may be taken over, and seven of ten never."""
    shared, (a, b) = tokens(5, 16)[0], tokens(6, 5, 9)
    cache, keys = PagedCache(MODEL, 2, 12, 8, num_snapshots=2), []
    cache.extend(keys, shared + a)
    assert len(keys) == 2
    run(cache, [0], [shared])
    cache.remember(0, keys)
    assert cache.match(keys) == (2, 0)                                    # the blocks are there, and of no use
    with pytest.raises(ValueError, match="row 1: no snapshot was kept after these 2 blocks"):
        cache.reuse(1, keys)
    cache.remember(0, keys, snapshot=True)
    run(cache, [0], [a])
    assert cache.match(keys) == (2, 2)
    with pytest.raises(ValueError, match="no snapshot was kept after these 1 blocks"):
        cache.reuse(1, keys[:1])                                          # it cannot be cut back
    with pytest.raises(ValueError, match="row 0 holds 21 tokens, expected the 2 full blocks of its keys"):
        cache.remember(0, keys, snapshot=True)
    with pytest.raises(ValueError, match="row 0 holds 21 tokens in 3 blocks, expected an empty row"):
        cache.reuse(0, keys)
    used = cache.pool.num_used
    cache.reuse(1, keys)
    assert cache.pool.num_used == used and cache.length[1] == 16
    assert far(run(cache, [1], [b])[0], solo(MODEL, shared + b)[0][-1]) <= 1
    assert far(run(cache, [0], [b[:1]])[0], solo(MODEL, shared + a + b[:1])[0][-1]) <= 1
    sound(cache)


@torch.no_grad()
def test_a_freed_prefix_stays_until_its_blocks_are_wanted():
    prompt, cache, keys = tokens(7, 24)[0], PagedCache(MODEL, 2, 4, 8, num_snapshots=4), []
    cache.extend(keys, prompt)
    for n in (1, 2, 3):
        run(cache, [0], [prompt[8 * n - 8:8 * n]])
        cache.remember(0, keys[:n], snapshot=True)
    cache.release(0)
    assert cache.pool.num_free == 4 and cache.match(keys) == (3, 3)
    run(cache, [1], [tokens(8, 16)[0]])                                   # the unused block, then the prefix's last
    assert cache.match(keys) == (2, 2) and len(cache.snapshots) == 2
    cache.reuse(0, keys[:2])
    with pytest.raises(OutOfBlocks):
        cache.grow(0, 1)
    cache.release(1)
    assert far(run(cache, [0], [prompt[16:17]])[0], solo(MODEL, prompt[:17])[0][-1]) <= 1
    sound(cache)


def test_snapshots_have_a_budget_of_their_own():
    cache, keys = PagedCache(MODEL, 1, 8, 4, num_snapshots=2), []
    prompt = tokens(9, 32)[0]
    cache.extend(keys, prompt)
    for n in range(1, 6):
        run(cache, [0], [prompt[4 * n - 4:4 * n]])
        cache.remember(0, keys[:n], snapshot=True)
    assert list(cache.snapshots) == keys[3:5] and cache.match(keys) == (5, 5) and cache.match(keys[:3]) == (3, 0)


def test_a_call_that_breaks_off_has_changed_nothing():
    cache, (prompt,) = PagedCache(MODEL, 1, 8, 4), tokens(10, 12)
    run(cache, [0], [prompt])
    before = {(name, layer): t.clone() for name in ("conv", "recurrent") for layer, t in getattr(cache.fixed, name).items()}
    cache.grow(0, 3)
    MODEL.ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 3]), cache.rows([0]))             # no commit
    assert cache.length == [12] and all(torch.equal(t, getattr(cache.fixed, name)[layer]) for (name, layer), t in before.items())
    assert far(run(cache, [0], [[4]])[0], solo(MODEL, prompt + [4])[0][-1]) <= 1


def test_a_row_without_blocks_is_named():
    cache = PagedCache(MODEL, 3, 8, 4)
    cache.grow(2, 5)
    with pytest.raises(ValueError, match="row 2 would hold 9 tokens, its 2 blocks of 4 have no room for them"):
        MODEL.ragged(torch.arange(9), torch.tensor([0, 9]), cache.rows([2]))


def test_no_copy_in_one_piece_survives_a_call():
    cache = PagedCache(MODEL, 2, 8, 4)
    run(cache, [0, 1], tokens(11, 7, 3))
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is PagedRows and thing.cache is cache]
