"""What the README and the demo show runs as it stands there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str | Path, cwd: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def blocks_of_the_readme() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    return blocks


def test_the_errors_are_found_where_the_readme_says(tmp_path: Path) -> None:
    """The README's second block, after the first, prints the one sentence of the refusal and no traceback."""
    (tmp_path / "pasted.py").write_text("\n".join(blocks_of_the_readme()[:2]), encoding="utf-8")
    done = run("pasted.py", cwd=tmp_path, seconds=100)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^.*step-500 holds a committed checkpoint already\. .*$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_run_of_the_readme_goes_on(tmp_path: Path) -> None:
    """The README's third block keeps three steps, and run again goes on from the last of them."""
    text = "import torch\n" + blocks_of_the_readme()[2]
    (tmp_path / "pasted.py").write_text(text, encoding="utf-8")
    said = []
    for _ in range(2):
        done = run("-W", "error", "pasted.py", cwd=tmp_path, seconds=100)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said == ["steps kept: [10, 20, 30]\n", "steps kept: [40, 50, 60]\n"]


def test_the_example_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    """The README's first Python block saves and loads, and is refused when it is run again, as the text says."""
    (tmp_path / "pasted.py").write_text(blocks_of_the_readme()[0], encoding="utf-8")
    first = run("pasted.py", cwd=tmp_path, seconds=100)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "loaded step 500 True\n"
    assert {"__0_0.distcp", ".manifest", ".commit", ".metadata"} == {
        path.name for path in (tmp_path / "checkpoints" / "step-500").iterdir()
    }
    again = run("pasted.py", cwd=tmp_path, seconds=100)
    assert again.returncode != 0
    assert "CheckpointExistsError" in again.stderr
    assert "overwrite=True" in again.stderr


def test_the_readme_names_only_what_is_there() -> None:
    """Every path and link in the README and the docs exists."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        for path in re.findall(r"`((?:tests|dcp_storage|examples|scripts|docs)/[\w./*-]*)`", text):
            assert list(ROOT.glob(path.rstrip("/"))), f"{page.name} names {path}"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo's module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("demo")


@pytest.mark.parametrize(
    ("losses", "forgetful", "good"),
    [
        ([2.0, 1.0], [2.5, 1.5], True),
        ([2.0, 1.0005], [2.5, 1.5], True),
        ([2.0, 1.002], [2.5, 1.5], False),
        ([2.0, float("nan")], [2.5, 1.5], False),
        ([2.0, 1.0], [2.0, 1.0], False),
    ],
)
def test_the_demo_fails_when_losses_differ(demo: Any, losses: list[float], forgetful: list[float], good: bool) -> None:
    """The comparison holds within the tolerance, and not where a run without the optimizer's state passes as well."""
    assert demo.compare([2.0, 1.0], {"run": demo.Resumed(losses, forgetful, 0)}) is good


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_demo_ends_well(tmp_path: Path) -> None:
    """The whole demo runs from any folder, says so, and leaves with 0."""
    ended = run(ROOT / "examples" / "demo.py", cwd=tmp_path, seconds=480)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "All as it should be" in ended.stdout
    assert "CorruptCheckpointError" in ended.stdout
    assert not list(tmp_path.iterdir())
