"""Whoever comes, goes, shares, waits or is thrown out: every request gets what it gets alone, and no block is lost."""
import sys
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from helpers import NEAR_TIE, random_model, solo, tokens
from hypothesis import given, settings, strategies as st

from qwen import engine as module, paged
from qwen.cache import State
from qwen.engine import AGING, PATIENCE, POLICIES, Engine, Request, StaticBatcher
from qwen.model import Model
from qwen.paged import BlockPool, PagedCache, PagedRows
from qwen.sample import generate
from qwen.weights import SHIPPED

MODEL = random_model(0, tie_word_embeddings=False)
TWO_LAYERS = random_model(3, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
SHIPPED_MODEL = Model.from_pretrained(SHIPPED, device="cpu", dtype=torch.float32)


def alone(request, model=MODEL) -> list[int]:
    return generate(model, torch.tensor([request.prompt]), request.max_new_tokens, request.stop, request.seed, **request.sampling)


def greedy_alone(request, found, model=MODEL) -> bool:
    """Whether `found` is what the request gets alone, up to a first near-tie; one solo call instead of one a token."""
    if not found:
        return request.max_new_tokens == 0
    logits = solo(model, request.prompt + found[:-1])[0][len(request.prompt) - 1:]
    for scores, token in zip(logits, found):
        best = scores.max() - scores[token]
        if best > 0:
            return best.item() < NEAR_TIE
    ends = [i for i, token in enumerate(found) if token in module.stop_set(request.stop)]
    return ends in ([], [len(found) - 1]) and (bool(ends) or len(found) == request.max_new_tokens)


def sound(engine):
    """Free and distinct used blocks make up the pool, and holders are what the running rows' tables say."""
    pool, cache = engine.pool, engine.cache
    holders = Counter(block for table in cache.tables for block in table)
    assert pool.num_free + pool.num_used == pool.num_blocks and pool.num_used == len(holders)
    assert [holders[block] for block in range(pool.num_blocks)] == pool.holders and set(pool.queue).isdisjoint(holders)
    rows = [s.row for s in engine.running]
    assert len(set(rows)) == len(rows) <= engine.max_num_seqs
    for s in engine.running:
        assert cache.length[s.row] == s.computed <= len(cache.tables[s.row]) * pool.block_size
        assert len(cache.tables[s.row]) <= pool.blocks(len(s.request.prompt) + s.request.max_new_tokens)
    assert all(not cache.tables[row] for row in range(engine.max_num_seqs) if row not in rows)
    assert len(cache.snapshots) <= cache.num_snapshots and len(cache.known) == len(cache.key_of)


def empty(engine):
    sound(engine)
    assert not engine.running and not engine.waiting and engine.pool.num_used == 0


@st.composite
def workloads(draw):
    """Requests, an engine down to the bare minimum of blocks, and who is cancelled after which step."""
    base = draw(st.lists(st.integers(0, 63), min_size=24, max_size=24))
    length = st.one_of(st.integers(1, 10), st.integers(1, 300))
    requests = []
    for number in range(draw(st.integers(1, 7))):
        prompt = tokens(draw(st.integers(0, 30)), draw(length))[0]
        if draw(st.booleans()):
            prompt = base[:draw(st.integers(1, 24))] + prompt[:276]
        arrival = draw(st.integers(0, 15))
        requests.append(Request(prompt, draw(st.integers(0, 12)), stop=draw(st.sampled_from([(), 7, [7, 21, 40]])), id=f"r{number}",
                                arrival=arrival, priority=draw(st.integers(-1, 3)),
                                deadline=draw(st.one_of(st.none(), st.integers(arrival, arrival + 400)))))
    size = draw(st.sampled_from([1, 2, 5, 8, 16]))
    least = max(-(-(len(r.prompt) + max(r.max_new_tokens - 1, 0)) // size) for r in requests)
    settings = dict(
        max_num_seqs=draw(st.integers(1, 5)), max_num_batched_tokens=draw(st.one_of(st.integers(1, 12), st.integers(1, 300))),
        block_size=size, num_blocks=least + draw(st.one_of(st.just(0), st.integers(0, 40))), policy=draw(st.sampled_from(POLICIES)),
        enable_chunked_prefill=draw(st.booleans()), enable_prefix_caching=draw(st.booleans()), num_snapshots=draw(st.integers(0, 4)))
    cancelled = draw(st.dictionaries(st.integers(0, 25), st.sampled_from([r.id for r in requests]), max_size=2))
    return requests, settings, cancelled


@settings(max_examples=200, deadline=None, derandomize=True)
@given(workloads())
def test_200_random_workloads(workload):
    """Every request ends within the stated bound, with its solo tokens; blocks add up after every step; none is left."""
    requests, settings, cancelled = workload
    engine = Engine(TWO_LAYERS, **settings)
    for request in requests:
        engine.add(request)
    M = max(len(r.prompt) + r.max_new_tokens for r in requests)
    last = 2 * M * (len(requests) + 1) + max(r.arrival for r in requests)
    while engine.waiting or engine.running:
        record = engine.step()
        sound(engine)
        assert record.blocks_used <= engine.pool.num_blocks and record.batch_size <= engine.max_num_seqs
        if settings["enable_chunked_prefill"]:
            assert record.computed <= engine.max_num_batched_tokens
        if record.step in cancelled:
            engine.cancel(cancelled[record.step])
            sound(engine)
        assert engine.now <= last
    empty(engine)
    sequences = engine.sequences
    for request in requests:
        s = sequences[request.id]
        if s.reason == "cancelled":
            assert s.new == [] or greedy_alone(Request(request.prompt, len(s.new)), s.new, TWO_LAYERS)
            continue
        assert greedy_alone(request, s.new, TWO_LAYERS)
        ahead = [o for o in sequences.values() if o.rank < s.rank]
        latest = max([s.arrival, *(o.arrival for o in ahead)])
        assert s.finished <= latest + 2 * M * (len(ahead) + 1)
        levels = request.priority - min(r.priority for r in requests)
        assert latest - s.arrival <= {"fcfs": 0, "priority": AGING * levels, "deadline": PATIENCE}[engine.policy]
    assert sum(r.useful for r in engine.records) <= sum(r.computed for r in engine.records)


# Counts ----------------------------------------------------------------------------------------------------------


def test_64_requests_on_8_places_need_no_more_steps_than_stated():
    lengths = torch.randint(1, 65, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [Request(prompt, n) for prompt, n in zip(tokens(1, *[1 + n % 7 for n in range(64)]), lengths)]
    engine, static = Engine(MODEL, 8, 10_000, num_blocks=400), StaticBatcher(MODEL, 8, num_blocks=400)
    assert engine.generate(requests) == static.generate(requests)
    bound = -(-sum(lengths) // 8) + max(lengths)
    assert engine.now <= bound < static.now
    assert static.now == sum(max(lengths[i:i + 8]) for i in range(0, 64, 8))
    empty(engine), empty(static)


def test_one_forward_a_step_over_the_real_tokens_alone():
    """Prompt chunks and decoding rows go through each matrix together, once a step; the head sees one token a row."""
    engine = Engine(MODEL, 4, 16, 8, 40)
    for request in [Request(p, 6) for p in tokens(2, 3, 40, 9)]:
        engine.add(request)
    seen = Counter()
    hooks = [m.register_forward_hook(lambda m, args, out, name=name: seen.update({(name, args[0].shape[:-1].numel()): 1}))
             for name, m in MODEL.named_modules() if isinstance(m, torch.nn.Linear)]
    mixed = 0
    try:
        while engine.waiting or engine.running:
            seen.clear()
            record = engine.step()
            assert all(count == 1 for count in seen.values())
            assert {rows for name, rows in seen if name != "lm_head"} == {record.computed}
            assert {rows for name, rows in seen if name == "lm_head"} == {record.batch_size}
            mixed += len(set(record.rows.values()) - {1}) > 0 and 1 in record.rows.values()
    finally:
        for hook in hooks:
            hook.remove()
    assert mixed >= 2


def test_finished_early_computed_but_not_useful():
    """Outputs of 3 and 50: each token after the first takes a row of a step; static runs 49 steps of two rows after the prompts."""
    requests = [Request(p, n, id=n) for p, n in zip(tokens(3, 5, 6), (3, 50))]
    engine, static = Engine(MODEL, 2), StaticBatcher(MODEL, 2)
    engine.generate(requests), static.generate(requests)
    prompts = 5 + 6
    for batcher, computed in ((engine, 2 + 49), (static, 2 * 49)):
        assert sum(r.computed for r in batcher.records) == prompts + computed
        assert sum(r.useful for r in batcher.records) == prompts + 2 + 49
    assert engine.sequences[3].latency == static.sequences[3].latency == 3
    assert engine.sequences[50].time_per_token == 1.0


def test_figures_of_a_request_and_a_step():
    engine = Engine(MODEL, 2, 4, 4, 20)
    a, b = tokens(4, 6, 3)
    engine.generate([Request(a, 3, id="a"), Request(b, 2, id="b", arrival=1)])
    s = engine.sequences
    assert [r.rows for r in engine.records] == [{"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert [r.seats for r in engine.records] == [("a", None)] + [("a", "b")] * 3
    assert [r.finished for r in engine.records] == [{}, {}, {}, {"a": "length", "b": "length"}]
    assert [r.admitted for r in engine.records] == [("a",), ("b",), (), ()]
    assert [r.blocks_used for r in engine.records] == [1, 3, 3, 3] and engine.pool.num_used == 0
    assert (s["a"].time_to_first_token, s["a"].latency, s["a"].time_per_token) == (2, 4, 1.0)
    assert (s["b"].time_to_first_token, s["b"].latency, s["b"].admitted) == (2, 3, 1)
    assert [r.queue_depth for r in engine.records] == [0] * 4 and s["a"].reason == "length"


def test_steps_before_anyone_arrives_pass_empty():
    engine = Engine(MODEL)
    assert engine.generate([Request([1, 2], 1, arrival=3)]) == [alone(Request([1, 2], 1))]
    assert [r.computed for r in engine.records] == [0, 0, 0, 2]


# The same outputs, again and again -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Engine(SHIPPED_MODEL, 3, 32, 4, 40, enable_prefix_caching=True),
                                  lambda: StaticBatcher(SHIPPED_MODEL, 3, 4, 90)], ids=["continuous", "static"])
def test_a_then_b_then_a(make):
    batcher = make()
    A = [Request(p, 9, seed=i, temperature=0.8 * (i % 2)) for i, p in enumerate(tokens(5, 3, 60, 17, vocab=640))]
    B = [Request(p, 20, priority=i) for i, p in enumerate(tokens(6, 40, 1, 33, 5, vocab=640))]
    first, other, last = batcher.generate(A), batcher.generate(B), batcher.generate(A)
    assert first == last == [alone(r, SHIPPED_MODEL) for r in A] and other == [alone(r, SHIPPED_MODEL) for r in B]
    empty(batcher)


BREAKS = {"model": (MODEL, "ragged"), "draw": (module, "sample"), "snapshot": (State, "select"), "put back": (State, "restore"),
          "commit": (PagedRows, "commit"), "free": (BlockPool, "free"), "forget": (PagedCache, "_forget")}


@pytest.mark.parametrize("where", BREAKS)
@pytest.mark.parametrize("nth", [0, 2, 5])
def test_an_exception_inside_a_step_loses_nothing(where, nth):
    """Step again and the answers are the same, sampled ones too."""
    shared, tails = tokens(7, 13)[0], tokens(8, 17, 4, 11, 25)
    requests = [Request(shared * (i > 0) + p, 8, id=i, seed=i, temperature=1.0 * (i % 2)) for i, p in enumerate(tails)]
    engine = Engine(MODEL, 3, 16, 4, 14, enable_prefix_caching=True)
    owner, name = BREAKS[where]
    right, calls = getattr(owner, name), []

    def breaks(*args, **kwargs):
        calls.append(0)
        if len(calls) == nth + 1:
            raise MemoryError("broken off")
        return right(*args, **kwargs)

    for request in requests:
        engine.add(request)
    broken = 0
    with patch.object(owner, name, breaks):
        while engine.waiting or engine.running:
            before = {i: list(s.tokens) for i, s in engine.sequences.items()}
            try:
                engine.step()
            except MemoryError:
                broken += 1
                assert before == {i: s.tokens for i, s in engine.sequences.items()} or where in ("snapshot", "free", "forget")
            sound(engine)
    assert broken == (len(calls) > nth) and [engine.sequences[i].new for i in range(4)] == [alone(r) for r in requests]
    empty(engine)
    assert engine.generate(requests) == [alone(r) for r in requests]


@pytest.mark.parametrize("make", [lambda: Engine(TWO_LAYERS, 2, 6, 4, 9, enable_prefix_caching=True), lambda: StaticBatcher(TWO_LAYERS, 2, 4, 9)],
                         ids=["continuous", "static"])
def test_interrupted_at_any_line(make):
    """Ctrl-C between any two lines of engine and cache, then the same cell again: the same answers, no block lost."""
    requests = [Request(p, 4, id=i, seed=i, temperature=0.9 * (i % 2)) for i, p in enumerate(tokens(9, 9, 3, 6))]
    right, files, lines, target = [alone(r, TWO_LAYERS) for r in requests], (module.__file__, paged.__file__), 0, None

    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename not in files or frame.f_code.co_name in ("add", "generate", "_restart"):
            return trace if frame.f_code.co_filename in files else None
        if event == "line":
            lines += 1
            if lines == target:
                raise KeyboardInterrupt
        return trace

    def run(batcher):
        try:
            sys.settrace(trace)
            return batcher.generate(requests)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)

    assert run(make()) == right
    total = lines
    for target in range(1, total, max(1, total // 60)):
        batcher, lines = make(), 0
        assert run(batcher) is None
        sound(batcher)
        assert batcher.generate(requests) == right
        empty(batcher)


@pytest.mark.parametrize("owner, name", [(Engine, "_leave"), (PagedCache, "release"), (BlockPool, "free")])
def test_cancelling_that_breaks_off(owner, name):
    engine, (a, b) = Engine(MODEL), (Request([1, 2], 5, id="a"), Request([3], 4, id="b"))
    engine.add(a), engine.add(b)
    engine.step()
    with patch.object(owner, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.cancel("a")
    sound(engine)
    while engine.waiting or engine.running:
        engine.step()
    assert engine.sequences["a"].reason == "cancelled" and engine.sequences["b"].new == alone(b)
    assert engine.records[1].finished == {"a": "cancelled"}
    empty(engine)


def test_an_ending_before_a_step_breaks_off_is_in_the_next_record():
    engine = Engine(MODEL)
    engine.add(Request([1], 0, id="none")), engine.add(Request([1, 2], 2, id="a"))
    with patch.object(MODEL, "ragged", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.step()
    engine.step(), engine.step()
    assert [(r.step, r.finished) for r in engine.records] == [(0, {"none": "length"}), (1, {"a": "length"})]


def test_what_a_caller_does_with_a_request_later_changes_nothing():
    prompt = tokens(5, 6)[0]
    request = Request(prompt, 6, id="a", seed=3, temperature=2.0)
    right, engine = alone(request), Engine(MODEL)
    engine.add(request)
    engine.step()
    prompt.append(9)
    request.max_new_tokens, request.sampling["temperature"] = 2, 0.1
    while engine.running:
        engine.step()
    assert engine.sequences["a"].new == right


def test_a_row_whose_logits_are_no_numbers_is_named_and_can_be_cancelled():
    engine, (good, bad) = Engine(MODEL), (Request([1, 2], 3, id="good"), Request([4], 3, id="bad"))
    engine.add(good), engine.add(bad)
    right = MODEL.ragged

    def poisoned(ids, cu_seqlens, state, last_only):
        logits = right(ids, cu_seqlens, state, last_only)
        logits[[i for i, row in enumerate(state.index) if row == engine.sequences["bad"].row]] = float("nan")
        return logits

    with patch.object(MODEL, "ragged", poisoned):
        for _ in range(2):
            with pytest.raises(ValueError, match="request 'bad': logits hold NaN"):
                engine.step()
        engine.cancel("bad")
        while engine.waiting or engine.running:
            engine.step()
    assert engine.sequences["good"].new == alone(good)
    empty(engine)


def test_generate_that_breaks_off_takes_its_requests_out_again():
    engine = Engine(MODEL, 2)
    other = engine.add(Request([9, 8, 7], 3, arrival=2))
    with patch.object(MODEL, "ragged", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.generate([Request([1, 2], 3), Request([4], 3)])
    assert [s.id for s in engine.waiting] == [other] and engine.pool.num_used == 0
    assert engine.generate([Request([1, 2], 3)]) == [alone(Request([1, 2], 3))]
    sound(engine)


# Policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("decoders_first", [True, False])
def test_budget_8_two_decoders_and_a_stream_of_prompts_of_40(policy, decoders_first):
    """Each running row gets a token in every step, so a prompt of 40 takes at most 40 steps and a decoder never waits."""
    decoders = [Request(p, 40, id=f"d{i}", arrival=0 if decoders_first else 9) for i, p in enumerate(tokens(8, 2, 3))]
    stream = [Request(p, 2, id=f"p{i}", arrival=4 * i if decoders_first else i) for i, p in enumerate(tokens(9, *[40] * 6))]
    engine = Engine(MODEL, 4, 8, 8, 40, policy=policy)
    for request in decoders + stream if decoders_first else stream + decoders:
        engine.add(request)
    while engine.waiting or engine.running:
        running = {s.id for s in engine.running}
        record = engine.step()
        assert running <= set(record.rows) and record.computed <= 8
    for request in decoders + stream:
        s = engine.sequences[request.id]
        assert s.new == alone(request) and s.finished - s.admitted <= 40 + request.max_new_tokens
    assert all(engine.sequences[d.id].time_per_token == 1.0 for d in decoders)


def order_of_entry(engine, requests):
    engine.generate(requests)
    return [name for record in engine.records for name in record.admitted]


def test_who_enters_first():
    requests = [Request([1, 2], 2, id="late", priority=0, arrival=1, deadline=90), Request([3], 2, id="idle", priority=5, deadline=200),
                Request([4], 2, id="urgent", priority=1, deadline=10), Request([5], 2, id="same", priority=1, deadline=10)]
    assert order_of_entry(Engine(MODEL, 1), requests) == ["idle", "urgent", "same", "late"]
    assert order_of_entry(Engine(MODEL, 1, policy="priority"), requests) == ["urgent", "late", "same", "idle"]
    assert order_of_entry(Engine(MODEL, 1, policy="deadline"), requests) == ["urgent", "same", "late", "idle"]


@pytest.mark.parametrize("policy", ["priority", "deadline"])
def test_nobody_starves(policy):
    """One unimportant request against a stream of urgent ones that fills the engine: it enters when its sum is reached."""
    wait = 3 * AGING if policy == "priority" else PATIENCE
    stream = [Request([i % 64], 1, arrival=i, deadline=i + 1) for i in range(wait + 60)]
    engine = Engine(MODEL, 1, policy=policy)
    engine.generate([Request([1, 2, 3], 2, id="patient", priority=3), *stream])
    assert wait - 1 <= engine.sequences["patient"].admitted <= wait + 1


def test_the_worst_ranked_is_thrown_out_then_the_youngest():
    a, b, c = tokens(10, 8, 8, 8)
    for policy, priorities, out in (("fcfs", (0, 0, 0), "c"), ("priority", (2, 0, 1), "a"), ("priority", (0, 1, 1), "c")):
        engine = Engine(MODEL, 3, 100, 4, 7, policy=policy)
        requests = [Request(p, 12, id=name, priority=n) for p, name, n in zip((a, b, c), "abc", priorities)]
        assert engine.generate(requests) == [alone(r) for r in requests]
        thrown = [name for record in engine.records for name in record.preempted]
        assert thrown[0] == out and engine.sequences[out].preemptions > 0
        best = min(engine.sequences.values(), key=lambda s: s.rank)
        assert best.preemptions == 0
        assert sum(r.useful for r in engine.records) == 3 * (8 + 11) < sum(r.computed for r in engine.records)


def test_without_chunks_a_prompt_runs_whole():
    requests = [Request(p, 10, id=i) for i, p in enumerate(tokens(11, 3, 50, 45))]
    for chunked, most in ((False, 51), (True, 16)):
        engine = Engine(MODEL, 3, 16, enable_chunked_prefill=chunked)
        assert engine.generate(requests) == [alone(r) for r in requests]
        assert max(r.computed for r in engine.records) == most


def test_without_chunks_but_with_snapshots_one_prompt_at_a_time_is_over_the_budget():
    """A prompt is still cut where a snapshot is taken, and nobody else's begins before its rest has run."""
    engine, base = Engine(MODEL, 4, 16, 4, 100, enable_chunked_prefill=False, enable_prefix_caching=True), tokens(1, 24)[0]
    engine.generate([Request(base, 1)])
    requests = [Request(base[:4] + tokens(2, 40)[0], 2, id="x"), Request(tokens(3, 12)[0], 2, id="y")]
    assert engine.generate(requests) == [alone(r) for r in requests]
    prompts = [[name for name, count in r.rows.items() if count > 1] for r in engine.records]
    assert all(len(names) == 1 for names, r in zip(prompts, engine.records) if r.computed > 16 + r.batch_size)
    engine = Engine(MODEL, 4, 16, 4, 100, enable_prefix_caching=True, num_snapshots=0)
    engine.generate([Request(base[:16], 1)])
    assert [r.computed for r in engine.records] == [16]                   # no snapshot, no cut


# Prefixes --------------------------------------------------------------------------------------------------------


def test_a_common_prefix_is_computed_twice_and_then_never():
    """The first leaves blocks and a snapshot after its own prompt; the second meets its blocks, and leaves a snapshot where
    they part; from the third on the common part is reused. The same prompt again is reused at once."""
    shared, tails = tokens(12, 33)[0], tokens(13, 9, 9, 9, 9)
    engine = Engine(MODEL, 2, block_size=8, num_blocks=60, enable_prefix_caching=True)
    requests = [Request(shared + tail, 4, id=i) for i, tail in enumerate(tails)]
    for request, reused in zip(requests + requests, [0, 0, 32, 32, 40, 40, 40, 40]):
        assert engine.generate([request]) == [alone(request)]
        assert engine.sequences[request.id].reused == reused
        empty(engine)


def test_two_rows_hold_a_shared_block_at_a_time():
    shared = tokens(14, 16)[0]
    engine = Engine(MODEL, 3, block_size=8, num_blocks=20, enable_prefix_caching=True)
    first, *others = [Request(shared + tail, 9) for tail in tokens(15, 1, 2, 3)]
    assert engine.generate([first]) == [alone(first)]
    ids = [engine.add(r) for r in others]
    record = engine.step()
    assert record.blocks_used == 2 + 2 and max(engine.pool.holders) == 2
    while engine.running:
        engine.step()
        sound(engine)
    assert [engine.sequences[i].new for i in ids] == [alone(r) for r in others]


def test_no_budget_for_snapshots_no_reuse():
    engine = Engine(MODEL, 2, block_size=8, enable_prefix_caching=True, num_snapshots=0)
    request = Request(tokens(16, 40)[0], 4)
    assert engine.generate([request]) == engine.generate([request]) == [alone(request)]
    assert not any(s.reused for s in engine.sequences.values())


# What is refused -------------------------------------------------------------------------------------------------


def test_a_pool_of_4_blocks_of_4():
    """What can never fit is refused when it is added; a small one behind it runs."""
    engine = Engine(MODEL, 2, block_size=4, num_blocks=4)
    for prompt, new in ((17, 1), (10, 20)):
        with pytest.raises(ValueError, match=f"request 'big': it needs {-(-(prompt + new - 1) // 4)} blocks of 4 tokens, the pool has 4"):
            engine.add(Request(tokens(17, prompt)[0], new, id="big"))
        small = Request(tokens(18, 3)[0], 5)
        assert engine.generate([small]) == [alone(small)]
    edge = Request(tokens(19, 10)[0], 7)                                  # 16 slots: the last token needs none
    assert engine.generate([edge, small]) == [alone(edge), alone(small)]
    empty(engine)


@pytest.mark.parametrize("request_, says", [
    (Request([], 3, id="x"), "its prompt is empty"), (Request([1], -1, id="x"), "max_new_tokens is -1"),
    (Request([1, 64], 3, id="x"), "its prompt holds token 64"), (Request([1, 2.0], 3, id="x"), "its prompt holds 2.0"),
    (Request("hello", 3, id="x"), "its prompt is 'hello'"), (Request([1], 600, id="x"), "do not fit the context"),
    (Request([1], 3, id="x", arrival=-1), "arrival is -1"), (Request([1], 3, id="x", priority="high"), "priority is 'high'"),
    (Request([1], 3, id="x", arrival=4, deadline=3), "deadline is 3"), (Request([1], 3, id="x", temperature=-1), "temperature is -1"),
    (Request([1], 3, id="x", heat=1), "heat"), (Request([1], 3, id="x", seed="a"), "seed is 'a'"),
    (Request([1], 3, id="x", seed=0.0), "seed is 0.0"), (Request([1], 3, id="x", seed=2 ** 70), "Overflow"), (Request([1], 3, id="x", stop=5.5), "float"), (Request([1], 1.5, id="x"), "max_new_tokens is 1.5"),
])
@pytest.mark.parametrize("make", [Engine, StaticBatcher])
def test_bad_requests_are_refused_by_name_and_the_others_go_on(make, request_, says):
    engine, good = make(MODEL, 2), Request([1, 2, 3], 4, id="good")
    engine.add(good)
    engine.step()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=f"request 'x': .*{says}"):
        engine.add(request_)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="request 'x'"):
        engine.generate([Request([5], 2, id="with it"), request_])
    while engine.running:
        engine.step()
    assert engine.sequences["good"].new == alone(good) and "x" not in engine.sequences
    empty(engine)


def test_what_is_no_request():
    with pytest.raises(TypeError, match=r"\[1, 2\] is no Request"):
        Engine(MODEL).add([1, 2])


def test_an_id_is_used_once_at_a_time():
    engine = Engine(MODEL)
    request = Request([1, 2], 2, id="a")
    engine.add(request)
    with pytest.raises(ValueError, match="request 'a': it is there already"):
        engine.add(request)
    while engine.waiting or engine.running:
        engine.step()
    assert engine.add(request) == "a"                                     # it has ended: a cell may be run again
    assert engine.add(Request([1], 1, id=4)) == 4
    names = [engine.add(Request([1], 1)) for _ in range(5)]
    assert len({*names, "a", 4}) == 7


@pytest.mark.parametrize("changes, says", [
    ({"max_num_seqs": 0}, "max_num_seqs is 0"), ({"max_num_batched_tokens": -5}, "max_num_batched_tokens is -5"),
    ({"block_size": 0}, "block_size is 0"), ({"num_blocks": -1}, "num_blocks is -1"), ({"policy": "lifo"}, "policy is 'lifo', expected one of fcfs"),
    ({"num_snapshots": -1}, "num_snapshots is -1"), ({"max_num_seqs": 2.0}, "max_num_seqs is 2.0"),
])
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        Engine(MODEL, **changes)
    with pytest.raises(ValueError, match="timeout is -1"):
        StaticBatcher(MODEL, timeout=-1)


def test_cancelling():
    engine = Engine(MODEL, 1)
    a, b = Request([1, 2], 9, id="a"), Request([3], 2, id="b")
    engine.add(a), engine.add(b)
    engine.step()
    engine.step()
    engine.cancel("a")
    assert engine.sequences["a"].new == alone(a)[:2] and engine.sequences["a"].reason == "cancelled"
    s = engine.sequences["a"]
    assert (s.latency, s.time_to_first_token, s.time_per_token) == (2, 1, 1.0)
    engine.cancel("a")
    with pytest.raises(KeyError, match="request 'c' is unknown"):
        engine.cancel("c")
    while engine.waiting or engine.running:
        engine.step()
    assert engine.sequences["b"].new == alone(b)
    assert [r.finished for r in engine.records] == [{}, {}, {"a": "cancelled"}, {"b": "length"}]
    early = engine.add(Request([1], 1, arrival=10))
    engine.cancel(early)
    assert engine.sequences[early].latency == 0
    empty(engine)


@pytest.mark.parametrize("when", range(5))
def test_cancelling_in_a_static_batch(when):
    static = StaticBatcher(MODEL, 2)
    requests = [Request(p, 6, id=i) for i, p in enumerate(tokens(22, 3, 5, 4))]
    for request in requests:
        static.add(request)
    for step in range(40):
        if step == when:
            static.cancel(0)
        if not static.waiting and not static.running:
            break
        static.step()
        sound(static)
    assert [static.sequences[i].new for i in (1, 2)] == [alone(r) for r in requests[1:]]
    assert static.sequences[0].new == alone(requests[0])[:when]
    empty(static)


@pytest.mark.parametrize("make", [Engine, StaticBatcher])
def test_stops_and_answers_of_no_token(make):
    """Each stop ends its own request only; a first token may be one; 0 new tokens are none."""
    prompts, batcher = tokens(20, 4, 30, 2, 9), make(MODEL, 2)
    first = [alone(Request(p, 5)) for p in prompts]
    requests = [Request(prompts[0], 5, stop=first[0][0]), Request(prompts[1], 5, stop={first[1][2]}), Request(prompts[2], 0),
                Request(prompts[3], 1, stop=None)]
    assert batcher.generate(requests) == [alone(r) for r in requests]
    assert [s.reason for s in batcher.sequences.values()] == ["stop", "stop", "length", "length"]
    assert batcher.generate([]) == []
    empty(batcher)


def test_static_waits_for_a_full_batch_or_its_timeout():
    static = StaticBatcher(MODEL, 3, timeout=4)
    requests = [Request([i + 1, 2], 2, id=i, arrival=i) for i in range(5)]
    assert static.generate(requests) == [alone(r) for r in requests]
    assert [(r.step, r.admitted) for r in static.records if r.admitted] == [(2, (0, 1, 2)), (7, (3, 4))]


def test_static_reserves_the_longest_possible_answers():
    static = StaticBatcher(MODEL, 8, 4, 10)
    requests = [Request(p, 9) for p in tokens(21, 8, 8, 8)]               # 16 slots each, 4 blocks
    assert static.generate(requests) == [alone(r) for r in requests]
    assert static.records[0].blocks_used == 8 and [len(r.admitted) for r in static.records if r.admitted] == [2, 1]
