"""What serving costs and how much of it a load needs: money, GPUs, waiting, what a user sees.

Plain arithmetic, no torch. Seconds, bytes, tokens and dollars, never their multiples: milliseconds and GiB are
converted at the door (`/ 1000`, `to_bytes`). GB is 1e9 bytes and GiB is 2**30. What a batch costs in time and memory
is in `qwen.roofline`.
"""
import heapq
from math import ceil

from qwen.roofline import count, number, share

UNITS = {"B": 1, "KB": 10 ** 3, "MB": 10 ** 6, "GB": 10 ** 9, "TB": 10 ** 12,
         "KiB": 2 ** 10, "MiB": 2 ** 20, "GiB": 2 ** 30, "TiB": 2 ** 40}
SLACK = 1e-9                                                # 2100 / 3000 / 0.7 is one GPU, whatever the last bit says


def to_bytes(amount: float, unit: str) -> int:
    """Bytes of an amount in B, KB … TB (powers of 1000) or KiB … TiB (of 1024). (IEC 80000-13.)"""
    number(unit, amount=amount)
    if unit not in UNITS:
        raise ValueError(f"the unit is {unit!r}, expected one of {', '.join(UNITS)}")
    return round(amount * UNITS[unit])


# Money -----------------------------------------------------------------------------------------------------------

def cost_per_million(dollars_per_hour: float, tokens_per_second: float) -> float:
    """Dollars for a million tokens: price of a second, over tokens of a second. (An hour has 3600 seconds.)"""
    number("$/h", dollars_per_hour=dollars_per_hour)
    number("tokens/s", tokens_per_second=tokens_per_second)
    return dollars_per_hour / 3600 / tokens_per_second * 1e6


def useful(lengths) -> tuple[int, int]:
    """(useful, computed) tokens of a batch that runs until its longest answer ends; lengths: tokens of each answer."""
    count(1, **{f"the length of row {row}": length for row, length in enumerate(lengths)})
    return sum(lengths), len(lengths) * max(lengths, default=0)


# Load ------------------------------------------------------------------------------------------------------------

def in_system(per_second: float, seconds: float) -> float:
    """How many are there at a time, on average: arrivals per second × seconds that each stays.

    Little 1961, doi 10.1287/opre.9.3.383: true of every queue that neither grows nor shrinks in the long run.
    """
    number("1/s", per_second=per_second)
    number("s", seconds=seconds)
    return per_second * seconds


def gpu_seconds(requests: int, tokens: float, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """GPU-seconds to make `tokens` for each of `requests`: an amount of work, not a number of GPUs."""
    count(1, requests=requests)
    number("tokens", tokens=tokens)
    number("tokens/s", tokens_per_second=tokens_per_second)
    share(utilisation=utilisation)
    return requests * tokens / tokens_per_second / utilisation


def gpus_for_work(gpu_seconds: float, window: float) -> int:
    """GPUs that finish so many GPU-seconds within `window` seconds."""
    number("GPU-seconds", gpu_seconds=gpu_seconds)
    number("s", window=window)
    return ceil(gpu_seconds / window - SLACK)


def gpus_for_rate(demand: float, tokens_per_second: float, utilisation: float = 0.7) -> int:
    """GPUs that keep up with `demand` tokens/s, each busy for at most the share `utilisation` of its time."""
    number("tokens/s", demand=demand, tokens_per_second=tokens_per_second)
    share(utilisation=utilisation)
    return ceil(demand / tokens_per_second / utilisation - SLACK)


# Waiting ---------------------------------------------------------------------------------------------------------

def erlang_c(servers: int, offered: float) -> float:
    """The probability that an arrival has to wait, M/M/c: random arrivals, exponential service, c equal servers.

    offered: arrivals/s × mean service seconds, the servers that are busy on average; below `servers`, or the queue
    grows for ever. Erlang 1917; recursion for Erlang B, and B -> C, as in Kleinrock 1975, Queueing Systems 1, §3.5–3.6.
    """
    count(1, servers=servers)
    number("busy servers", offered=offered)
    if offered >= servers:
        raise ValueError(f"{offered:g} servers' work is offered to {servers}, expected less: "
                         "the queue would grow for ever")
    blocked = 1.0                                           # Erlang B with 0 servers
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def mean_wait(per_second: float, service: float, servers: int) -> float:
    """Mean seconds in the queue, M/M/c; service: mean seconds on a server. (Kleinrock 1975, §3.5.)"""
    offered = in_system(per_second, service)
    return erlang_c(servers, offered) * service / (servers - offered)


def waits(arrivals, services, servers: int) -> list[float]:
    """Seconds that each request queues for one of `servers` (rows of a batch, say), first come, first served.

    arrivals: ascending times in s; services: seconds on a server. Nothing random in here: draw the two yourself.
    """
    count(1, servers=servers)
    if len(arrivals) != len(services):
        raise ValueError(f"there are {len(arrivals)} arrivals and {len(services)} services, expected as many")
    free, queued = [0.0] * servers, []                      # when each server becomes free
    for arrival, service in zip(arrivals, services):
        start = max(arrival, free[0])
        heapq.heapreplace(free, start + service)
        queued.append(start - arrival)
    return queued


# What a user sees ------------------------------------------------------------------------------------------------

def end_to_end(first: float, per_token: float, tokens: int) -> float:
    """Seconds from question to last token: time to first token, then one step for each further token."""
    number("s", first=first, per_token=per_token)
    count(1, tokens=tokens)
    return first + (tokens - 1) * per_token


def goodput(first, per_token, seconds: float, first_limit: float, per_token_limit: float) -> float:
    """Requests per second that kept *both* promises. (Zhong et al. 2024, DistServe, arXiv 2401.09670.)

    first, per_token: seconds of each request; seconds: how long they were counted; limits in s.
    """
    number("s", seconds=seconds, first_limit=first_limit, per_token_limit=per_token_limit)
    if len(first) != len(per_token):
        raise ValueError(f"there are {len(first)} first-token times and {len(per_token)} token times, expected as many")
    return sum(a <= first_limit and b <= per_token_limit for a, b in zip(first, per_token)) / seconds


# Blocks ----------------------------------------------------------------------------------------------------------

def blocks(tokens: int, block_size: int = 16) -> int:
    """Blocks that a row of `tokens` takes, the last one perhaps partly empty. (Kwon et al. 2023, arXiv 2309.06180.)"""
    count(1, tokens=tokens, block_size=block_size)
    return -(-tokens // block_size)
