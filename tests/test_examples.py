import runpy
from pathlib import Path


EXAMPLES = Path(__file__).parents[1] / "examples"


def test_train_digits_learns(capsys):
    example = runpy.run_path(str(EXAMPLES / "train_digits.py"))
    accuracy = example["main"](example["Options"](epochs=4))
    printed = capsys.readouterr().out
    assert accuracy > 0.85
    assert "plain jax.grad" in printed and "pool index" in printed
