"""What the worked example prints, number for number, stands in the executed chapters."""
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"

PRINTED = {
    "01": ["""\
=== SCENARIO 1: UNBATCHED ===
User A Query: tensor([[1., 1.]])
User B Query: tensor([[0., 1.]])
""", """\
=== SCENARIO 2: BATCHED ===
X_batch shape: torch.Size([2, 2])
Q_batch shape: torch.Size([2, 2])
Batched Queries:
tensor([[1., 1.],
        [0., 1.]])
""", "SUCCESS: Batched output perfectly matches sequential output!\n"],
    "02": ["""\
=== BATCHED ATTENTION (BONUS) ===
Attention Scores Shape: torch.Size([2, 1, 4]) -> (Batch, 1, Hist + 1)
Scores:
tensor([[[1., 2., 1., 1.]],

        [[1., 0., 1., 1.]]])
"""],
    "04": ["""\
Q_batch (Batch, Seq_New, Dim):
tensor([[[1., 1.],
         [1., 2.]],

        [[0., 1.],
         [2., 2.]]])
""", "K_cache shape: torch.Size([2, 5, 2]) -> (Batch, Hist + Seq_New, Dim)\n", """\
              User A's keys           User B's keys
             hist      new           hist      new
            k0 k1 k2   k3 k4        k0 k1 k2   k3 k4
A1 (q3)   [  1  1  1    1  0    |    0  0  0    0  0  ]
A2 (q4)   [  1  1  1    1  1    |    0  0  0    0  0  ]
          ---------------------+----------------------
B1 (q3)   [  0  0  0    0  0    |    1  1  1    1  0  ]
B2 (q4)   [  0  0  0    0  0    |    1  1  1    1  1  ]
""", """\
Raw scores (Batch, Seq_New, Hist + Seq_New):
tensor([[[1., 2., 1., 1., 2.],
         [1., 3., 2., 1., 3.]],

        [[1., 0., 1., 1., 0.],
         [2., 4., 4., 2., 4.]]])
""", """\
User B raw scores:
[[0., 1., 0., 1., 0.],
 [0., 2., 4., 2., 4.]]
   ^ pad column
""", """\
Causal mask (True = may attend):
tensor([[ True,  True,  True,  True, False],
        [ True,  True,  True,  True,  True]])
""", """\
Masked scores:
tensor([[[1., 2., 1., 1., -inf],
         [1., 3., 2., 1., 3.]],

        [[1., 0., 1., 1., -inf],
         [2., 4., 4., 2., 4.]]])
""", """\
Attention weights (top-right of each user is exactly 0):
tensor([[[0.1749, 0.4754, 0.1749, 0.1749, 0.0000],
         [0.0513, 0.3790, 0.1394, 0.0513, 0.3790]],

        [[0.2969, 0.1092, 0.2969, 0.2969, 0.0000],
         [0.0414, 0.3057, 0.3057, 0.0414, 0.3057]]])
"""],
}


# What the description of serving and the worked example's part on time and memory say in numbers, each followed through:
# the right value as it stands, a wrong or a loose one with the word that calls it so in the same line.
NUMBERS = {
    "05": [
        "SRAM: 33 MiB, filled 462 times in a step", "SRAM          34.6 MB", "L2            50.0 MB", "HBM       80,000.0 MB",
        "weights   16,000.0 MB", "SRAM holds 1/462 of the weights, told as a five-hundredth",
        "ridge point: 295 FLOP a byte", "990 TFLOPS / 3.35 TB/s = 295.5 FLOP a byte, told as 295",
        "one user is 295 times below, told as 300", "the weights: 4.78 ms, so at most 209 tokens a second for one user",
        "idle 99.7%; 4.8 ms; 210 tokens a second; 10 users 30 times below; equal near 300 users",
        "1 users:   1 FLOP a byte", "compute idle 99.66%, 209 tokens a second", "ridge is  29.53 times that",
        "7 billion weights,  1 rows: 14 GB, 14 GFLOP, 1 FLOP a byte", "32 rows: 14 GB, 448 GFLOP, 32 FLOP a byte",
        "wrong ridge 660 (591 with the right bandwidth), right ridge 295; 1,979 / 989.4 = 2.00",
        "batch  32:  11% of the right ridge", "batch  64:  22% of the right ridge", "batch 128:  43% of the right ridge",
        "batch 256:  87% of the right ridge,  39% of the wrong one", "12,288 bytes a token", "131,072 bytes a token",
    ],
    "09": [
        "50 tokens/s: $13.89 a million; popular and wrong: $50, 3.6 times too high",
        "2000 tokens/s: $0.3472 a million; popular and wrong: $1.25, 3.6 times too high",
        "demand 2,000 tokens/s, 0.67 of a GPU; at 70 % utilisation 0.95: 1 GPU",
        "each answer takes 25 s", "2,500 user-seconds", "250,000 'token-seconds'; / 3,000 = 83 'GPU-seconds'",
        "3.3 'GPUs', told as 3.5", "50,000 tokens; / 3,000 tokens/s = 16.7 GPU-seconds; / 25 s = 0.67 GPUs",
        "estimate_gpus returns 92, and those are GPU-seconds", "to be done in 60 s: 1.52, so 2 GPUs",
        "2,500 is an engine's figure too, 7B at batch 32",
        "weights alone: 4.78 ms a step, at most 13,400 tokens/s", "3,000 is 21% of that",
        "ridge 295 (wrong: 660", "batch  32:  11% of the ridge", "batch  64:  22% of the ridge", "batch 128:  43% of the ridge",
        "batch 256:  87% of the ridge,  39% of the wrong one",
        "by query heads 524,288 bytes a token, by KV heads 131,072: 4 times too much",
        "idle 99.7%, and it is the compute", "14 GB against 33 MiB on the chip: they fill it 405 times a step",
        "padded to B: 1,900 of A's 2,000 columns are pads; waiting for eight costs up to 100 ms",
        "B may answer  500: static, A's 10 tokens are held for  500 steps", "B may answer 2000: static, A's 10 tokens are held for 2000",
        "continuous, A leaves after step 10", "one of 8 ends and 2 enter: 9 rows in 8 (wrong); one enters: 8 rows (right)",
        "max_tokens 500 or 2000: up to 10.7 s or 42.7 s on a row", "in 500 ms: 23 tokens", "25.0 s at 20 tokens/s",
        "p50 under 200 ms: of what?", "10% of the pool is 42,678 tokens", "block size 16: 8 of 1,000", "block size 32: 24", "block size 64: 24",
        "53 useful of 100 computed", "80 GiB = 85,899,345,920 bytes",
    ],
}
PRINTED |= NUMBERS


@pytest.mark.parametrize("chapter, text", [(chapter, text) for chapter, texts in PRINTED.items() for text in texts])
def test_a_cell_prints_it(chapter, text):
    (path,) = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    printed = ["".join(o.text for o in cell.outputs if o.output_type == "stream") for cell in cells]
    assert any(text in out for out in printed)


def test_the_stack_error():
    (path,) = NOTEBOOKS.glob("04_*.ipynb")
    errors = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert any(o.ename == "RuntimeError" and "[5, 2] at entry 0 and [4, 2] at entry 1" in o.evalue for o in errors)
