"""The examples of docs/data.md, with the real data (slow)."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/data.md"


@pytest.mark.slow
@pytest.mark.real_data
def test_the_examples_of_the_page_run(real_cache):
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S):
        exec(example, scope)
    assert scope["images"].shape == (10_000 % 128, 1, 28, 28)  # the last batch
    assert len(scope["train"]) == 500 * 16
    assert len(scope["test"]) == 500 * 48
    assert set(scope["large"].scales.tolist()) == {2.0, 4.0, 8.0}
