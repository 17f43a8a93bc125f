"""Many users on one model: requests come and go between steps, and every step runs the tokens of all that are there.

Iteration-level scheduling (Orca: Yu et al. 2022, USENIX OSDI) over a paged cache. A step is one forward pass over
flat tokens: one of each row that decodes, a chunk of each prompt that is still being read (chunked prefill: Agrawal
et al. 2023, arXiv 2308.16369). Each answer is the one that the request would get alone.
"""
import itertools
import time
from copy import copy
from dataclasses import dataclass, field

import torch

from qwen.paged import PagedCache
from qwen.roofline import count
from qwen.sample import check_sampling, sample, seeded, stop_set

POLICIES = ("fcfs", "priority", "deadline")
AGING = 16                                                  # steps of waiting that make up for one level of priority
PATIENCE = 256                                              # steps after which no deadline, or a late one, counts as due


class Request:
    """What a user wants: up to max_new_tokens after prompt, as `sample.generate`. An engine works on a copy.

    arrival: the step at which it comes, counted from when it is added; deadline: the step, counted alike, by which
    its answer is wanted. priority: a whole number, lower first. sampling: `sample`'s settings.
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, stop=(), id=None, arrival: int = 0, priority: int = 0,
                 deadline: int | None = None, seed: int | None = None, **sampling):
        self.prompt, self.max_new_tokens, self.stop, self.id = prompt, max_new_tokens, stop, id
        self.arrival, self.priority, self.deadline = arrival, priority, deadline
        self.seed, self.sampling = seed, sampling


@dataclass(eq=False)
class Sequence:
    """A request on its way through an engine, and its figures. Steps are the engine's, from 0."""

    id: object
    request: Request
    arrival: int                                            # the step at which it is there
    due: int                                                # what the policy sorts by
    order: int                                              # in which it was added
    tokens: list[int]                                       # the prompt, then the new ones
    stop: set
    generator: torch.Generator | None
    row: int | None = None                                  # its place while it runs
    computed: int = 0                                       # tokens that the cache holds
    farthest: int = 0                                       # the most it ever held: up to there it is computed again
    keys: list = field(default_factory=list)                # of its full blocks, see `PagedCache.extend`
    marks: tuple = ()                                       # lengths where a chunk must end, for a snapshot
    admitted: int | None = None                             # step at which it ran first
    first_token: int | None = None                          # step that gave its first new token
    finished: int | None = None                             # step that ended it; cancelled: the last one before
    reason: str | None = None                               # "stop", "length" or "cancelled"
    preemptions: int = 0
    reused: int = 0                                         # tokens taken over from a prefix instead of computed

    @property
    def new(self) -> list[int]:
        """The new tokens; a stop token, if one came, is the last."""
        return self.tokens[len(self.request.prompt):]

    @property
    def behind(self) -> int:
        """Tokens that the cache lacks: 1 in a row that decodes."""
        return len(self.tokens) - self.computed

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
    """What happened in one step."""

    step: int
    rows: dict                                              # id -> tokens of it that ran
    seats: tuple                                            # id in each place while the step ran, None: nobody
    finished: dict                                          # id -> why: "stop", "length", "cancelled" since the last step
    admitted: tuple                                         # ids that entered, also again after a preemption
    preempted: tuple
    queue_depth: int                                        # arrived and not running, after the step
    blocks_used: int                                        # different ones, while the step ran
    useful: int                                             # tokens computed for the first time, for a living request
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

    max_num_seqs: places for running rows. max_num_batched_tokens: tokens of one step; every running row gets one.
    policy, who enters first and is preempted last: "fcfs" the earliest; "priority" the smallest
    arrival + AGING · priority; "deadline" the smallest deadline, at most arrival + PATIENCE. These sums never change,
    so whoever waits ages: those that overtake it came at most AGING steps a level, or PATIENCE steps, after it. With k
    requests ranked ahead and M tokens (prompt and new) in the longest there is, a request ends at most 2·M·(k + 1)
    steps after it and those k have come.
    enable_chunked_prefill=False: a prompt runs whole, and as the only one of its step where it exceeds the budget.
    enable_prefix_caching: reuse blocks that end in one of up to num_snapshots states of the linear layers. A snapshot
    is taken where a prompt parts from what others left, and after the last full block before its last token; its chunks,
    whole prompts too, end there.

    For one thread. `records` and `sequences` keep all figures; from `sequences` remove only requests that have ended.
    """

    def __init__(self, model, max_num_seqs: int = 8, max_num_batched_tokens: int = 256, block_size: int = 16,
                 num_blocks: int | None = None, policy: str = "fcfs", enable_chunked_prefill: bool = True,
                 enable_prefix_caching: bool = False, num_snapshots: int = 16):
        """num_blocks: default max_num_seqs rows of 1,024 tokens. Raises ValueError naming the setting."""
        count(1, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size)
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
        self.sequences, self.records = {}, []                             # id -> Sequence, ended ones too; StepRecords
        self.waiting, self.running = [], []
        self.ended = {}                                                   # id -> reason, since the last record

    # Requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request):
        """Take a request in; returns its id. Raises ValueError or TypeError naming the request, and takes nothing."""
        sequence = self._sequence(request)
        self.added += 1
        self.waiting.append(sequence)
        self.sequences[sequence.id] = sequence
        return sequence.id

    def cancel(self, id):
        """End a request with the tokens it has; nothing happens if it has ended. Raises KeyError for an unknown id."""
        if id not in self.sequences:
            raise KeyError(f"request {id!r} is unknown")
        sequence = self.sequences[id]
        if sequence.finished is None:
            try:
                self._end(sequence, "cancelled", max(self.now, sequence.arrival) - 1)
            except BaseException:
                self._restart()
                raise

    def generate(self, requests) -> list[list[int]]:
        """Run these requests, and whatever else is there, until they have ended; their new tokens, in this order.

        If one is refused or a step breaks off, those of them that have not ended are taken out again.
        """
        ids = []
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
        """The request checked and copied: what its owner does with it later changes nothing."""
        if not isinstance(request, Request):
            raise TypeError(f"{request!r} is no Request")
        request = copy(request)
        if request.id is None:
            request.id = next(n for n in itertools.count(self.added) if n not in self.sequences)
        try:
            if request.id in self.sequences and self.sequences[request.id].finished is None:
                raise ValueError("it is there already, expected an id of its own")
            self.model.check_prompts([request.prompt], request.max_new_tokens, ["its prompt"])
            check_sampling(**request.sampling)
            count(0, arrival=request.arrival)
            for what, value in (("priority", request.priority), ("seed", request.seed), ("deadline", request.deadline)):
                if type(value) is not int and (value is not None or what == "priority"):
                    raise ValueError(f"{what} is {value!r}, expected a whole number")
            if request.deadline is not None and request.deadline < request.arrival:
                raise ValueError(f"deadline is {request.deadline}, expected a step from its arrival {request.arrival} on")
            need, pool = self.pool.blocks(len(request.prompt) + max(request.max_new_tokens - 1, 0)), self.pool
            if need > pool.num_blocks:
                raise ValueError(f"it needs {need} blocks of {pool.block_size} tokens, the pool has {pool.num_blocks}")
            stop, generator = stop_set(request.stop), seeded(request.seed)
        except (ValueError, TypeError, RuntimeError) as error:            # torch's, for a seed beyond 64 bits
            raise type(error)(f"request {request.id!r}: {error}") from None
        request.prompt, request.sampling = list(request.prompt), dict(request.sampling)
        within = PATIENCE if request.deadline is None else min(request.deadline - request.arrival, PATIENCE)
        late = {"fcfs": 0, "priority": AGING * request.priority, "deadline": within}[self.policy]
        arrival = self.now + request.arrival
        return Sequence(request.id, request, arrival, arrival + late, self.added, list(request.prompt), stop, generator)

    # A step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> StepRecord:
        """One step: let in whom there is room for, run the model once, give each row that is up to date its next token.

        If anything breaks it off, Ctrl-C too, no token is lost or doubled: all requests that have not ended go back into
        the queue, the cache starts empty, and the next step goes on.
        """
        try:
            return self._step()
        except BaseException:
            self._restart()
            raise

    def _restart(self):
        """Everybody who has not ended waits again, and the cache is as new."""
        self.running, self.waiting = [], [s for s in self.sequences.values() if s.finished is None]
        for sequence in self.waiting:
            sequence.row, sequence.computed, sequence.marks = None, 0, ()
        self.cache.clear()
        if self.records and self.records[-1].step == self.now:            # written, but not counted
            self.records.pop()

    def _step(self):
        start, before = time.perf_counter(), set(self.running)
        for sequence in self._there():
            if sequence.request.max_new_tokens == 0:
                self._end(sequence, "length", self.now)
        plan, preempted = self._schedule()                                # [(sequence, its tokens in this step)]
        seats = {s.row: s.id for s in self.running}
        used, drawn = self.pool.num_used, self._run(plan) if plan else []
        useful = sum(self._count(s, tokens) for s, tokens in plan if s.finished is None)
        for sequence, token, generator in drawn:
            full = len(sequence.new) + 1 == sequence.request.max_new_tokens
            reason = "stop" if token in sequence.stop else "length" if full else None
            first = self.now if sequence.first_token is None else sequence.first_token
            news = dict(tokens=[*sequence.tokens, token], generator=generator, first_token=first)
            if reason:
                self._end(sequence, reason, self.now, **news)
            else:
                vars(sequence).update(news)                               # one call: all of it or, after Ctrl-C, nothing
        record = StepRecord(
            step=self.now, rows={s.id: tokens for s, tokens in plan},
            seats=tuple(seats.get(row) for row in range(self.max_num_seqs)),
            finished=self.ended,
            admitted=tuple(s.id for s, _ in plan if s not in before), preempted=tuple(preempted),
            queue_depth=sum(s.arrival <= self.now for s in self.waiting), blocks_used=used, useful=useful,
            seconds=time.perf_counter() - start)
        self.records.append(record)
        self.now, self.ended = self.now + 1, {}
        return record

    def _there(self):
        """Who has arrived and waits, in the policy's order."""
        return sorted((s for s in self.waiting if s.arrival <= self.now), key=lambda s: s.rank)

    def _schedule(self):
        """Decide who runs how many tokens, and take the blocks for them: ([(sequence, tokens)], ids preempted)."""
        plan, preempted, left = [], [], self.max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: s.rank):
            if sequence.row is None:                                      # preempted for one ranked before it
                continue
            others = len(self.running) - len(plan) - 1                    # each of them keeps a token of the budget
            tokens = self._chunk(sequence, left - others)
            while sequence.row is not None and self.cache.missing(sequence.row, tokens) > self.pool.num_free:
                victim = max(self.running, key=lambda s: s.rank)
                victim.preemptions += 1
                self._leave(victim)
                self.waiting.append(victim)                               # its tokens are kept, what it computed is not
                preempted.append(victim.id)
            if sequence.row is not None:
                self.cache.grow(sequence.row, tokens)
                plan.append((sequence, tokens))
                left -= tokens
        if not preempted:
            self._admit(plan, left)
        return plan, preempted

    def _admit(self, plan, left):
        """Let in who waits, in the policy's order, while there are place, budget and blocks for the one in front."""
        size, free = self.pool.block_size, sorted(set(range(self.max_num_seqs)) - {s.row for s in self.running})
        for sequence in self._there():
            keys = self._keys(sequence, len(sequence.tokens) - 1)         # the last token runs in any case
            there, kept = self.cache.match(keys)                          # blocks others left, and those to take over
            held = sum(self.pool.holders[self.cache.known[key]] > 0 for key in keys[:kept])
            if not free or left < 1 or self.pool.blocks(len(sequence.tokens)) - held > self.pool.num_free:
                return
            if not self.enable_chunked_prefill:
                rest, prompts = len(sequence.tokens) - kept * size, [(s, part) for s, part in plan if s.behind > 1]
                if any(part < s.behind for s, part in prompts) or (prompts and rest > left):
                    return
            self._seat(sequence, free.pop(0))
            if kept:
                self.cache.reuse(sequence.row, keys[:kept])
            sequence.computed, sequence.reused = kept * size, sequence.reused + kept * size
            if self.cache.num_snapshots:
                sequence.marks = tuple(sorted({n * size for n in (there, len(keys)) if n > kept}))
            tokens = self._chunk(sequence, left)
            self.cache.grow(sequence.row, tokens)
            plan.append((sequence, tokens))
            left -= tokens

    def _seat(self, sequence, row):
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.row = row
        if sequence.admitted is None:
            sequence.admitted = self.now

    def _end(self, sequence, reason, step, **news):
        """It is over, with its last news: in one call, so that after Ctrl-C it has ended or it has not."""
        self.ended[sequence.id] = reason
        vars(sequence).update(news, reason=reason, finished=step)
        self._leave(sequence)

    def _leave(self, sequence):
        """Out of the row, whose blocks are free again, or out of the queue."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.release(sequence.row)
        sequence.row, sequence.computed, sequence.marks = None, 0, ()

    def _chunk(self, sequence, most):
        """Tokens of a running sequence in this step: one to decode; of a prompt, up to `most` and to the next mark."""
        tokens = min(sequence.behind, most) if self.enable_chunked_prefill else sequence.behind
        return min([tokens, *(mark - sequence.computed for mark in sequence.marks if mark > sequence.computed)])

    def _run(self, plan):
        """The forward pass: [(sequence, next token, generator after the draw)] for the rows that are up to date."""
        rows = self.cache.rows([s.row for s, _ in plan])
        alive = [i for i, (s, _) in enumerate(plan) if s.finished is None]
        rows.length[[i for i in range(len(plan)) if i not in alive]] -= 1    # who has ended runs its last token again
        parts = [s.tokens[start:start + tokens] for (s, tokens), start in zip(plan, rows.length.tolist())]
        ids, cu_seqlens = torch.tensor(sum(parts, [])), torch.tensor([0, *map(len, parts)]).cumsum(0)
        logits = self.model.ragged(ids, cu_seqlens, rows, last_only=True).float().cpu()     # (B, vocab)
        drawn = []
        for i in alive:
            s, tokens = plan[i]
            if tokens == s.behind:
                generator = s.generator and s.generator.clone_state()
                try:
                    drawn.append((s, sample(logits[i], s.new, generator=generator, **s.request.sampling), generator))
                except ValueError as error:
                    raise ValueError(f"request {s.id!r}: {error}") from None
        rows.commit(alive)
        return drawn

    def _count(self, sequence, tokens):
        """Book so many tokens as computed; returns how many of them were so for the first time."""
        before = sequence.computed
        sequence.computed += tokens
        useful = max(0, sequence.computed - max(sequence.farthest, before))
        sequence.farthest = max(sequence.farthest, sequence.computed)
        keys, marked = self._keys(sequence, sequence.computed), sequence.computed in sequence.marks
        if marked or sequence.computed // self.pool.block_size > before // self.pool.block_size:
            self.cache.remember(sequence.row, keys, snapshot=marked)
        return useful

    def _keys(self, sequence, tokens):
        """Keys of the full blocks of its first `tokens` tokens; none where prefixes are not kept."""
        if not self.enable_prefix_caching:
            return []
        self.cache.extend(sequence.keys, sequence.tokens)
        return sequence.keys[:tokens // self.pool.block_size]


class StaticBatcher(Engine):
    """Static batching, for comparison: the same requests, cache and forward pass, but a batch is fixed when it starts.

    In arrival order, up to max_num_seqs requests whose longest possible answers all fit the pool start together, with
    whole prompts and the blocks of those answers reserved; when fewer wait, not before the first has waited `timeout`
    steps. Whoever ends keeps the place and runs along, the same token again and again, until the longest has ended.
    """

    def __init__(self, model, max_num_seqs: int = 8, block_size: int = 16, num_blocks: int | None = None,
                 timeout: int = 0):
        count(0, timeout=timeout)
        super().__init__(model, max_num_seqs, block_size=block_size, num_blocks=num_blocks)
        self.timeout = timeout

    def _schedule(self):
        there = self._there()
        full = len(there) >= self.max_num_seqs
        if not self.running and there and (full or self.now - there[0].arrival >= self.timeout):
            for row, sequence in enumerate(there[:self.max_num_seqs]):
                most = len(sequence.tokens) + sequence.request.max_new_tokens - 1 - len(sequence.new)
                if self.pool.blocks(most) > self.pool.num_free:
                    break
                self._seat(sequence, row)
                self.cache.grow(row, most)
        return [(s, s.behind if s.finished is None else 1) for s in self.running], []

    def _leave(self, sequence):
        if sequence not in self.running:
            super()._leave(sequence)
        if all(s.finished is not None for s in self.running):
            for s in list(self.running):
                super()._leave(s)
