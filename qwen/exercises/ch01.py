"""Exercises of chapter 01, one weight matrix."""
from qwen.exercises import Function, Value

W_Q = [[1, 1], [0, 1]]
D_IN, D_OUT = 1024, 3584
WEIGHTS = D_IN * D_OUT
TRIP = WEIGHTS * 2                                          # bytes of one matrix, 2 a weight


def bytes_moved(users, steps, d, batched):
    """Bytes that `steps` decode steps fetch through one d x d matrix of 2-byte weights."""
    trips = steps if batched else steps * users
    return trips * d * d * 2


EXERCISES = {
    # q_C = x_C @ W_q for x_C = [2, 1]
    "01.1": Value([2, 3], (
        ([3, 1], "That is W_q times x: the token stands on the left, so take the columns of W_q, not its rows."),
        ([2, 1], "That is x_C itself; multiply it by both columns of W_q."),
        ([[2, 2], [0, 1]], "Those are the products; add them up down each column."),
        ([2, 0], "Those are the products of column 0; add them up and you have the first number."),
        ([2, 2], "That is 2 times row 0 of W_q; 1 times row 1 still has to be added."),
        ([3, 2], "The right numbers in the wrong order: column 0 of W_q gives the first one."),
        ({2, 3}, "A set has no order; hand over a list, the number of column 0 first."),
    )),
    # bytes of one step, 12 users in a batch, one 1024 x 3584 matrix in bf16
    "01.2": Value(TRIP, (
        (12 * TRIP, "That is one trip for each user; in a batch all twelve share one."),
        (TRIP / 12, "That is one user's share; the question is what the whole step fetches."),
        (WEIGHTS, "You counted weights; each one has 2 bytes in bf16."),
        (2 * TRIP, "4 bytes a weight is fp32; bf16 has 2."),
        (12 * WEIGHTS, "Two slips: a weight has 2 bytes, and in a batch all twelve users share one trip."),
        (24 * TRIP, "Two slips: bf16 has 2 bytes a weight, not 4, and in a batch all twelve users share one trip."),
        (TRIP / 2 ** 20, "The right number of MiB; the question asks for bytes."),
        (TRIP / 1e6, "The right number of megabytes; the question asks for bytes."),
        (D_IN * D_IN * 2, "The matrix is not square: it has 1024 rows of 3584 weights."),
        (D_OUT * D_OUT * 2, "The matrix is not square: it has 1024 rows of 3584 weights."),
        (D_OUT * 2, "That is one row of the matrix; it has 1024 of them."),
        (D_IN * 2, "That is one column of the matrix; it has 3584 of them."),
        (TRIP + 12 * D_IN * 2, "You added the users' rows; count the weights alone."),
        (TRIP + 12 * (D_IN + D_OUT) * 2, "You added the users' rows; count the weights alone."),
    )),
    # function: bytes of a whole answer
    "01.3": Function(bytes_moved, ((3, 5, 4, True), (3, 5, 4, False), (1, 1, 2, True), (10, 7, 8, False)), (
        (lambda users, steps, d, batched: bytes_moved(users, 1, d, batched),
         "The weights do not stay on the chip: every step fetches them again."),
        (lambda users, steps, d, batched: bytes_moved(users, steps - 1, d, batched),
         "These are `steps` decode steps, and each one is a trip; take none off."),
        (lambda users, steps, d, batched: bytes_moved(users, steps + 1, d, batched),
         "Count the decode steps alone; the prefill is not among them."),
        (lambda users, steps, d, batched: bytes_moved(users, steps, d, not batched),
         "Batched and unbatched are exchanged: without a batch each user pays the trip."),
        (lambda users, steps, d, batched: bytes_moved(users, steps, d, True),
         "Without a batch every user pays the trip; look at `batched`."),
        (lambda users, steps, d, batched: bytes_moved(users, steps, d, False),
         "In a batch the users share the trip; look at `batched`."),
        (lambda users, steps, d, batched: bytes_moved(users, steps, d, batched) // 2,
         "That is the number of weights; the question asks for bytes, 2 a weight."),
        (lambda users, steps, d, batched: bytes_moved(users, steps, d, batched) * 2,
         "Here a weight has 2 bytes (bf16), not 4."),
        (lambda users, steps, d, batched: bytes_moved(users, steps, 1, batched) * d,
         "The matrix has d rows of d weights: d * d of them."),
    )),
    # rows of Q that change with row 2 of X, four users
    "01.4": Value({2}, (
        ({0, 1, 2, 3}, "A projection computes each row from its own row and W_q; nobody else's is read."),
        ({2, 3}, "Later rows are other users, not later tokens; and even later tokens would not change here."),
        ({0, 1, 2}, "Earlier rows are other users; a projection does not look at them."),
        ({1}, "Rows count from 0 here: the third user is row 2."),
        ({3}, "Rows count from 0 here: the third user is row 2."),
        ({0, 1, 3}, "Those are the rows that stay the same; the question is which ones change."),
        (2, "The right row; hand it over as a list, [2]."),
        (3, "Rows count from 0 here, so the third user's row has another number; and hand it over as a list."),
        (1, "Not the number of rows but which; and hand it over as a list."),
        (set(), "One row does change: the user's own."),
    )),
    # trips for a prompt of 5 tokens and an answer of 3
    "01.5": Value(3, (
        (8, "That is a trip for each token; the prompt's 5 rows share one."),
        (4, "The prefill already ends with the first new token, and the last one is not fed back."),
        (7, "The prompt's rows are known beforehand, so they go through together."),
        (1, "A new token is known only after its step, so the second and third need a trip each."),
        (2, "You left the prefill out; it is a trip as well."),
        (5, "The prompt's 5 rows share one trip; then count the decode steps."),
    )),
}
