"""The page on stores: its example runs as pasted, and what it names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from dcp_storage.testing.conformance import StoreConformance

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"


def test_the_example_runs_as_pasted(tmp_path: Path) -> None:
    """The page's block with a test class passes the whole suite as a test file; its class body has five lines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (text for text in blocks if "class Test" in text)
    body = block.partition("class TestMine(StoreConformance):\n")[2]
    assert len(body.splitlines()) == 5
    (tmp_path / "test_mine.py").write_text(block, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    passed = re.search(r"^(\d+) passed in ", ended.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= len([name for name in dir(StoreConformance) if name.startswith("test_")])


def test_the_classes_that_the_page_names_are_there() -> None:
    """Each "`TestX` in `file`" of the page is a class of that file."""
    found = re.findall(r"((?:`Test\w+`(?:, )?)+) in `(tests/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 7
    for names, file in found:
        text = (PAGE.parents[1] / file).read_text(encoding="utf-8")
        for name in re.findall(r"Test\w+", names):
            assert f"class {name}(" in text, f"{file} has no {name}"
