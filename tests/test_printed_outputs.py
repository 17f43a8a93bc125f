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
