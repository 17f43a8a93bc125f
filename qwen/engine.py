"""Many users on one model: requests come and go between steps, and every step runs the tokens of all that are there.

Iteration-level scheduling (Orca: Yu et al. 2022, USENIX OSDI) over a paged cache. A step is one forward pass over
flat tokens: one of each row that decodes, a chunk of each prompt that is still being read (chunked prefill: Agrawal
et al. 2023, arXiv 2308.16369). Each answer is the one that the request would get alone.
"""
import time
from dataclasses import dataclass, field

import torch

from qwen.paged import PagedCache
from qwen.sample import check_sampling, sample, seeded, stop_set

POLICIES = ("fcfs", "priority", "deadline")
AGING = 16                                                  # steps of waiting that make up for one level of priority
PATIENCE = 256                                              # steps after which no deadline, or a late one, counts as due


class Request:
    """What a user wants: up to max_new_tokens after prompt, as `sample.generate`.

    arrival: the step at which it comes, counted from when it is added; deadline: the step, counted alike, by which its
    answer is wanted. priority: a whole number, lower first. sampling: `sample`'s settings. The engine checks and never
    changes it, so it can be sent again.
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, stop=(), id=None, arrival: int = 0, priority: int = 0,
                 deadline: int | None = None, seed: int | None = None, **sampling):
        self.prompt, self.max_new_tokens, self.stop, self.id = prompt, max_new_tokens, stop, id
        self.arrival, self.priority, self.deadline = arrival, priority, deadline
        self.seed, self.sampling = seed, sampling


@dataclass(eq=False)
class Sequence:
    """A request on its way through an engine, and its figures; steps are the engine's, from 0."""

    id: object
    request: Request
    arrival: int                                            # the step at which it is there
    due: int                                                # what the policy sorts by
    order: int                                              # in which it was added
    tokens: list[int]                                       # the prompt, then the new ones
    stop: set
    generator: torch.Generator | None
    computed: int = 0                                       # tokens that the cache holds
    farthest: int = 0                                       # the most that it ever held: beyond it a token is useful
    row: int | None = None                                  # its place while it runs
    keys: list = field(default_factory=list)                # of its full blocks, see `PagedCache.extend`
    marks: tuple = ()                                       # lengths at which a snapshot is taken
    admitted: int | None = None                             # step at which it ran first
    first_token: int | None = None                          # step that gave its first new token
    finished: int | None = None                             # step that ended it
    reason: str | None = None                               # "stop", "length" or "cancelled"
    preemptions: int = 0
    reused: int = 0                                         # tokens that it did not have to compute, from a prefix

    @property
    def new(self) -> list[int]:
        """The new tokens; a stop token, if one came, is the last."""
        return self.tokens[len(self.request.prompt):]

    @property
    def rank(self):
        """The policy's order: the smallest goes first."""
        return self.due, self.order

    @property
    def time_to_first_token(self) -> int | None:
        """Steps from its arrival up to the one that gave the first new token, that one counted."""
        return None if self.first_token is None else self.first_token - self.arrival + 1

    @property
    def latency(self) -> int | None:
        """Steps from its arrival up to the one that ended it, that one counted."""
        return None if self.finished is None else self.finished - self.arrival + 1

    @property
    def time_per_token(self) -> float | None:
        """Steps for each new token after the first."""
        late = len(self.new) - 1
        return None if self.finished is None or late < 1 else (self.finished - self.first_token) / late


@dataclass(frozen=True)
class StepRecord:
    """One step. rows: the tokens that each request ran; seats: who held each place while it ran (None: nobody)."""

    step: int
    rows: dict
    seats: tuple
    finished: dict                                          # id -> "stop", "length" or "cancelled"
    admitted: tuple
    preempted: tuple
    queue_depth: int                                        # arrived and not running, after the step
    blocks_used: int                                        # different ones, while it ran
    useful: int                                             # tokens computed for the first time, for somebody's answer
    seconds: float = field(compare=False)

    @property
    def batch_size(self) -> int:
        """Rows that ran."""
        return len(self.rows)

    @property
    def computed(self) -> int:
        """Tokens that went through the model."""
        return sum(self.rows.values())


class Engine:
    """Continuous batching: a request enters when a place and blocks are free, and leaves when its answer ends.

    max_num_seqs: places for running rows; max_num_batched_tokens: tokens of one step, shared so that each running row
    gets one at least. policy: who enters first and is preempted last: "fcfs" the earliest; "priority" the smallest arrival + AGING · priority;
    "deadline" the smallest deadline, at most arrival + PATIENCE. These sums never change, so whoever waits ages: those
    that overtake it arrived at most AGING steps a level, or PATIENCE steps, after it. With k requests ranked ahead of it
    and M tokens (prompt and new) in the longest request there is, it ends at most 2·M·(k + 1) steps after all have come.
    enable_chunked_prefill=False runs a prompt whole, if it exceeds the budget as the only one of its step. enable_prefix_caching
    keeps up to num_snapshots states of the linear layers, without which a hybrid model can reuse no block.
    """

    def __init__(self, model, max_num_seqs: int = 8, max_num_batched_tokens: int = 256, block_size: int = 16,
                 num_blocks: int | None = None, policy: str = "fcfs", enable_chunked_prefill: bool = True,
                 enable_prefix_caching: bool = False, num_snapshots: int = 16):
        """num_blocks: default max_num_seqs rows of 1,024 tokens. Raises ValueError naming the setting."""
        for name, value, least in (("max_num_seqs", max_num_seqs, 1), ("block_size", block_size, 1),
                                   ("max_num_batched_tokens", max_num_batched_tokens, 1),
                                   ("num_snapshots", num_snapshots, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}, expected one of {', '.join(POLICIES)}")
        if num_blocks is None:
            num_blocks = max_num_seqs * -(-min(1024, model.config.max_position_embeddings) // block_size)
        self.model, self.policy = model, policy
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.enable_chunked_prefill, self.enable_prefix_caching = enable_chunked_prefill, enable_prefix_caching
        self.cache = PagedCache(model, max_num_seqs, num_blocks, block_size, num_snapshots)
        self.pool = self.cache.pool
        self.now, self.added = 0, 0                                       # steps done, requests ever added
        self.sequences, self.records = {}, []                             # id -> Sequence, the ended ones too; every step
        self.waiting, self.running = [], []

    # Requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request):
        """Take a request in; returns its id. Raises ValueError or TypeError naming the request, and takes nothing."""
        sequence = self._sequence(request)
        self.sequences[sequence.id] = sequence
        self.waiting.append(sequence)
        self.added += 1
        return sequence.id

    def cancel(self, id):
        """End a request now, with the tokens it has; nothing happens if it has ended. Raises KeyError for an unknown id."""
        if id not in self.sequences:
            raise KeyError(f"request {id!r} is unknown")
        if self.sequences[id].finished is None:
            self._end(self.sequences[id], "cancelled")

    def generate(self, requests) -> list[list[int]]:
        """Run these requests, and whatever else is there, until they have ended; their new tokens, in this order.

        If one is refused or a step breaks off, those of them that have not ended are taken out again.
        """
        requests, ids = list(requests), []
        try:
            for request in requests:
                ids.append(self.add(request))
            while any(self.sequences[id].finished is None for id in ids):
                self.step()
        except BaseException:
            for id in ids:
                self.cancel(id)
            raise
        return [self.sequences[id].new for id in ids]

    def _sequence(self, request):
        id = request.id
        if id is None:
            id = next(n for n in range(self.added, self.added + len(self.sequences) + 1) if n not in self.sequences)
        name = f"request {id!r}"
        if id in self.sequences and self.sequences[id].finished is None:
            raise ValueError(f"{name} is there already, expected an id of its own")
        try:
            self.model.check_prompts([request.prompt], request.max_new_tokens, ["its prompt"])
            check_sampling(**request.sampling)
            for what, value in (("arrival", request.arrival), ("priority", request.priority), ("seed", request.seed or 0)):
                if type(value) is not int or value < 0 and what == "arrival":
                    raise ValueError(f"{what} is {value!r}, expected a whole number")
            if request.deadline is not None and (type(request.deadline) is not int or request.deadline < request.arrival):
                raise ValueError(f"deadline is {request.deadline!r}, expected None or a step not before its arrival")
            need = self.pool.blocks(len(request.prompt) + max(request.max_new_tokens - 1, 0))
            if need > self.pool.num_blocks:
                raise ValueError(f"it needs {need} blocks of {self.pool.block_size} tokens, the pool has {self.pool.num_blocks}")
            generator, stop = seeded(request.seed), stop_set(request.stop)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{name}: {error}") from None
        arrival = self.now + request.arrival
        due = arrival
        if self.policy == "priority":
            due += AGING * request.priority
        if self.policy == "deadline":
            due += PATIENCE if request.deadline is None else min(request.deadline - request.arrival, PATIENCE)
        return Sequence(id, request, arrival, due, self.added, list(request.prompt), stop, generator)

    # A step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> StepRecord:
        """One step: let in whom there is room for, run the model once, give each row that is up to date its next token.

        If the model or a draw raises, no token, length or state has changed and no block is lost: step again.
        """
        start = time.perf_counter()
        before = {id(s) for s in self.running}
        plan, preempted = self._schedule()                                # [(sequence, its tokens in this step)]
        seats = tuple(next((s.id for s in self.running if s.row == row), None) for row in range(self.max_num_seqs))
        admitted = tuple(s.id for s, _ in plan if id(s) not in before)
        used = self.pool.num_used
        drawn = self._run(plan) if plan else {}

        useful = sum(self._count(sequence, count) for sequence, count in plan if sequence.finished is None)
        finished = {}
        for sequence, (token, generator) in drawn.items():
            sequence.tokens.append(token)
            sequence.generator = generator
            if sequence.first_token is None:
                sequence.first_token = self.now
            if token in sequence.stop or len(sequence.new) == sequence.request.max_new_tokens:
                finished[sequence.id] = "stop" if token in sequence.stop else "length"
        for sequence in [s for s in self._there() if s.request.max_new_tokens == 0]:
            finished[sequence.id] = "length"
        for name, reason in finished.items():
            self._end(self.sequences[name], reason)
        record = StepRecord(self.now, {s.id: count for s, count in plan}, seats, finished, admitted, tuple(preempted),
                            len(self._there()), used, useful, time.perf_counter() - start)
        self.records.append(record)
        self.now += 1
        return record

    def _there(self):
        """Who has arrived and waits, in the policy's order."""
        return sorted((s for s in self.waiting if s.arrival <= self.now), key=lambda s: s.rank)

    def _schedule(self):
        """Decide who runs how many tokens, and take the blocks for them: ([(sequence, tokens)], ids preempted)."""
        plan, preempted, left = [], [], self.max_num_batched_tokens
        self.running.sort(key=lambda s: s.rank)
        for sequence in list(self.running):
            if sequence.row is None:                                      # preempted for one ranked before it
                continue
            behind = len(self.running) - len(plan) - 1                    # each of them keeps a token of the budget
            count = self._chunk(sequence, left - behind)
            while self.cache.missing(sequence.row, count) > self.pool.num_free:
                victim = max(self.running, key=lambda s: s.rank)
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is sequence:
                    break
            if sequence.row is not None:
                self.cache.grow(sequence.row, count)
                plan.append((sequence, count))
                left -= count
        if not preempted:
            self._admit(plan, left)
        return plan, preempted

    def _admit(self, plan, left):
        """Let in who waits, in the policy's order, as long as there is a place, budget and blocks for the one in front."""
        for sequence in self._there():
            if sequence.request.max_new_tokens == 0:
                continue
            free = sorted(set(range(self.max_num_seqs)) - {s.row for s in self.running})
            keys = self._keys(sequence, len(sequence.tokens) - 1)         # the last token runs in any case
            there, kept = self.cache.match(keys)
            shared = sum(self.pool.holders[self.cache.known[key]] > 0 for key in keys[:kept])
            size = self.pool.block_size
            whole = len(sequence.tokens) - kept * size
            if (not free or left < 1 or self.pool.blocks(len(sequence.tokens)) - shared > self.pool.num_free
                    or (not self.enable_chunked_prefill and whole > left and any(count > 1 for _, count in plan))):
                break
            self._seat(sequence, free[0])
            if kept:
                self.cache.reuse(sequence.row, keys[:kept])
            sequence.computed, sequence.reused = kept * size, sequence.reused + kept * size
            sequence.marks = tuple(sorted({n * size for n in (there, len(keys)) if n > kept}))
            count = self._chunk(sequence, left)
            self.cache.grow(sequence.row, count)
            plan.append((sequence, count))
            left -= count

    def _seat(self, sequence, row):
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.row = row
        if sequence.admitted is None:
            sequence.admitted = self.now

    def _chunk(self, sequence, most):
        """Tokens of a running sequence in this step: one to decode; of a prompt, up to `most` and to the next mark."""
        count = len(sequence.tokens) - sequence.computed
        if self.enable_chunked_prefill:
            count = min(count, most)
        return min([count, *(mark - sequence.computed for mark in sequence.marks if mark > sequence.computed)])

    def _run(self, plan):
        """The forward pass: {sequence: (its next token, its generator after the draw)} for the rows that are up to date."""
        rows = self.cache.rows([s.row for s, _ in plan])
        alive = [i for i, (s, _) in enumerate(plan) if s.finished is None]
        rows.length[[i for i in range(len(plan)) if i not in alive]] -= 1    # who has ended runs its last token again
        ids = [token for (s, count), start in zip(plan, rows.length.tolist()) for token in s.tokens[start:start + count]]
        cu_seqlens = torch.tensor([0, *(count for _, count in plan)]).cumsum(0)
        logits = self.model.ragged(torch.tensor(ids), cu_seqlens, rows, last_only=True)     # (B, vocab)
        drawn = {}
        for i in alive:
            s, count = plan[i]
            if s.computed + count == len(s.tokens):
                generator = s.generator and s.generator.clone_state()
                drawn[s] = sample(logits[i], s.new, generator=generator, **s.request.sampling), generator
        rows.commit(alive)
        return drawn

    def _count(self, sequence, count):
        """Book `count` tokens as computed; returns how many of them were so for the first time."""
        sequence.computed += count
        useful = max(0, sequence.computed - max(sequence.farthest, sequence.computed - count))
        sequence.farthest = max(sequence.farthest, sequence.computed)
        if self.enable_prefix_caching:
            keys = self._keys(sequence, sequence.computed)
            self.cache.remember(sequence.row, keys, snapshot=sequence.computed in sequence.marks)
        return useful

    def _keys(self, sequence, tokens):
        """Keys of the full blocks of its first `tokens` tokens; none where prefixes are not kept."""
        if not self.enable_prefix_caching:
            return []
        self.cache.extend(sequence.keys, sequence.tokens)
        return sequence.keys[:tokens // self.pool.block_size]

    def _preempt(self, sequence):
        """Back into the queue; what it has computed is forgotten and computed again (its tokens are kept)."""
        self._leave(sequence)
        self.waiting.append(sequence)
        sequence.preemptions += 1

    def _end(self, sequence, reason):
        self._leave(sequence)
        sequence.finished, sequence.reason = self.now, reason

    def _leave(self, sequence):
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.release(sequence.row)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.row, sequence.computed, sequence.marks = None, 0, ()


class StaticBatcher(Engine):
    """Static batching, for comparison: the same requests, cache and forward pass, but a batch is fixed when it starts.

    In arrival order, up to max_num_seqs requests whose longest possible answers all fit the pool start together, with
    whole prompts and the blocks of those answers reserved; when fewer wait, not before the first has waited `timeout`
    steps. Whoever ends keeps the place and runs along, its last token again and again, until the longest has ended.
    """

    def __init__(self, model, max_num_seqs: int = 8, block_size: int = 16, num_blocks: int | None = None, timeout: int = 0):
        super().__init__(model, max_num_seqs, block_size=block_size, num_blocks=num_blocks)
        if type(timeout) is not int or timeout < 0:
            raise ValueError(f"timeout is {timeout!r}, expected a number of steps of at least 0")
        self.timeout = timeout

    def _schedule(self):
        there = [s for s in self._there() if s.request.max_new_tokens > 0]
        if not self.running and there and (len(there) >= self.max_num_seqs or self.now - there[0].arrival >= self.timeout):
            for row, sequence in enumerate(there[:self.max_num_seqs]):
                most = len(sequence.tokens) + sequence.request.max_new_tokens - 1
                if self.pool.blocks(most) > self.pool.num_free:
                    break
                self._seat(sequence, row)
                self.cache.grow(row, most)
        return [(s, 1 if s.finished is not None else len(s.tokens) - s.computed) for s in self.running], []

    def _end(self, sequence, reason):
        if sequence in self.running:
            sequence.finished, sequence.reason = self.now, reason
        else:
            super()._end(sequence, reason)
        if all(s.finished is not None for s in self.running):
            for s in list(self.running):
                self._leave(s)
