"""Each example under ``examples/`` runs as it stands there, and is the text of its page in ``docs/examples/``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SAYS = {
    "fsdp2_resume": ["losses of the resumed run: the same, bit for bit"],
    "tp_reshard": ["3 ranks with FSDP2 have what 2 ranks with tensor parallelism saved", "1 process has 348 numbers"],
    "async_s3": ["committed as 1", "loaded step 20 True"],
    "finetune_from_stock": [
        "missing: ['model.head.bias', 'model.head.weight']",
        "loaded: ['model.body.bias', 'model.body.weight']",
        "new: ['model.head.bias', 'model.head.weight']",
        "saved and loaded: True",
    ],
}


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    """It ends well within a minute on two cores, says what it should, and leaves nothing in the folder it is run in."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in SAYS[name]:
        assert line in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SAYS)
def test_the_page_is_the_example(name: str) -> None:
    """The one block of Python in the page is the example's file, to the letter."""
    page = (ROOT / "docs" / "examples" / f"{name}.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert block == (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
