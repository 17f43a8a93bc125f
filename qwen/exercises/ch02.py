"""Exercises of chapter 02, batched attention: scores, shapes, bytes of a cache, grouped heads."""
import torch

from qwen.exercises import Function, Value


def scaled_scores(q, k):
    """q (B, T, D), k (B, S, D) -> (B, T, S)."""
    return q @ k.transpose(1, 2) / k.shape[-1] ** 0.5


Q = torch.tensor([[[1.0, 2.0, 0.0, 1.0]], [[0.0, 1.0, 3.0, 2.0]]])                  # (2, 1, 4)
K = torch.arange(24.0).view(2, 3, 4) % 7                                            # (2, 3, 4)
Q_SQUARE, K_SQUARE = torch.arange(18.0).view(2, 3, 3) % 5, torch.arange(18.0).view(2, 3, 3) % 7     # S = T = D = 3
KV = 8 * 1000 * 2 * 28 * 4 * 128 * 2                                                # bytes of exercise 02.4

EXERCISES = {
    # scores of q_C = [2, 3] over three keys and the new one, x_C = [2, 1]
    "02.1": Value([2, 6, 5, 7], (
        ([2, 6, 5], "The new token's own key joins the cache before attention: there are four scores."),
        ([2, 6, 5, 13], "Your last key is q_C; the new key is x_C times W_k, which is x_C itself."),
        ([2, 2, 3, 5], "You asked with x_C; the query is q_C = x_C W_q."),
        ([2, 2, 3, 7], "The new key met x_C's query, q_C, but the history met x_C; every key meets q_C."),
        ([2, 2, 3], "You asked with x_C, and left out the new token's own key."),
        ([7, 2, 6, 5], "The new key joins at the end of the cache, after the history."),
        (18, "Those are a sum; each key has a score of its own."),
        (20, "Those are a sum; each key has a score of its own."),
        ([n / 2 ** 0.5 for n in (2, 6, 5, 7)], "You scaled by the root of D; the question is before scaling."),
    )),
    # shape of the scores: 5 users, history 7, 3 new tokens, D = 16
    "02.2": Value([5, 3, 10], (
        ([5, 3, 7], "The new tokens' own keys join the cache before attention, so there are more than 7 keys."),
        ([5, 3, 8], "All 3 new keys join the cache, not one of them."),
        ([5, 10], "The 3 queries are missing: (B, T, S)."),
        ([5, 3, 3], "Keys of the history count too."),
        ([5, 1, 8], "That is one new token a user; here each user has 3."),
        ([5, 1, 10], "Each user asks with 3 queries, one for each new token."),
        ([5, 10, 3], "Queries stand before keys: (B, T, S)."),
        ([5, 3, 16], "D is added up and gone; the last dimension counts keys."),
        ([5, 10, 16], "That is the shape of the keys; the question is the scores."),
        ([15, 50], "That is the flat grid of everybody against everybody; a batch keeps the users apart."),
        ([15, 10], "That loses the users; keep the batch dimension in front."),
        ([5, 1, 3, 10], "One head needs no dimension of its own here: (B, T, S)."),
        (150, "That is the number of scores; give the shape, as (B, T, S)."),
    )),
    # function: q k^T / sqrt(D), user by user
    "02.3": Function(scaled_scores, ((Q, K), (Q_SQUARE, K_SQUARE)), (
        (lambda q, k: q @ k.transpose(1, 2), "The scores are right but not scaled; divide by the root of D."),
        (lambda q, k: q @ k.transpose(1, 2) / k.shape[-1], "You divided by D; it is the root of D."),
        (lambda q, k: q @ k.transpose(1, 2) / k.shape[1] ** 0.5, "You took the root of S, the number of keys; it is D."),
        (lambda q, k: q @ k.transpose(1, 2) * k.shape[-1] ** 0.5, "You multiplied by the root of D; divide."),
        (lambda q, k: q @ k.transpose(1, 2) / 2 ** 0.5, "You divided by the root of 2; that was D above. Take D from k.shape."),
        (lambda q, k: q @ k.transpose(1, 2) / q.shape[1] ** 0.5, "You took the root of T, the number of queries; it is D."),
        (lambda q, k: q @ k.transpose(1, 2) / len(q) ** 0.5, "You took the root of B, the number of users; it is D."),
        (lambda q, k: q @ k.reshape(len(k), k.shape[2], k.shape[1]) / k.shape[-1] ** 0.5,
         "`reshape` draws new borders through the numbers; `transpose` turns the keys on their side."),
        (lambda q, k: scaled_scores(k, q), "Your result is (B, S, T), keys before queries: turn it round."),
        (lambda q, k: scaled_scores(q, k.flip(0)), "Each user's queries meet another user's keys."),
        (lambda q, k: scaled_scores(q.flip(0), k), "Each user's keys meet another user's queries."),
        (lambda q, k: scaled_scores(q, k).softmax(-1), "Those are the weights; stop before the softmax."),
        (lambda q, k: q.flatten(0, 1) @ k.flatten(0, 1).T / k.shape[-1] ** 0.5,
         "You flattened the users, so every query meets every user's keys; keep the batch dimension."),
        (lambda q, k: torch.einsum("btd,csd->btcs", q, k) / k.shape[-1] ** 0.5,
         "The keys' users have a letter of their own, so everybody meets everybody; use the same letter twice."),
    )),
    # bytes of keys and values of one decode step
    "02.4": Value(KV, (
        (KV * 4, "You counted query heads; a cache has a key and a value for each KV head."),
        (KV // 2, "A factor of 2 is missing: keys and values, and 2 bytes for each number."),
        (KV // 4, "A factor of 4 is missing: the 4 KV heads, or keys and values of 2 bytes a number."),
        (KV * 2, "That is twice too much: a slot has one key and one value for each of the 4 KV heads, at 2 bytes a number."),
        (KV // 8, "That is one user; keys and values are never shared, so count all eight."),
        (KV // 1000 * 999, "The new token's own key and value are fetched too: 1000 slots a user."),
        (KV // 1000, "That is one slot a user; attention fetches every slot, 1000 of them."),
        (KV // 28, "That is one layer; each of the 28 has its own keys and values."),
        (KV // 128, "Each key and value has 128 numbers."),
        (KV / 1e6, "The right number of megabytes; the question asks for bytes."),
        (KV / 2 ** 20, "The right number of MiB; the question asks for bytes."),
        (KV / 1e9, "The right number of gigabytes; the question asks for bytes."),
        (KV / 2 ** 30, "The right number of GiB; the question asks for bytes."),
    )),
    # query heads that tiling gives the wrong KV head: 6 query heads, 2 KV heads
    "02.5": Value({1, 4}, (
        ({0, 2, 3, 5}, "Those are the heads that stay right; the question is which are wrong."),
        ({1, 2}, "That is the case of 4 query heads above; here a group has 3."),
        ({1, 3, 5}, "Those read KV head 1 when tiled; heads 3 and 5 should."),
        ({3, 4, 5}, "Those should read KV head 1; tiled, 3 and 5 still do."),
        ({2, 5}, "Heads count from 0."),
        ({0, 1, 2, 3, 4, 5}, "Some are right by luck: write 0 0 0 1 1 1 under 0 1 0 1 0 1."),
        (set(), "The shapes agree, the heads do not: write 0 0 0 1 1 1 under 0 1 0 1 0 1."),
        (2, "Not how many but which; hand over a list."),
    )),
}
