"""Every command as a new user tries it, on a folder in every state: what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dcp_storage import CommitUnknownError, SaveOptions
from dcp_storage.cli import app
from dcp_storage.cli_running import exit_code
from dcp_storage.cli_values import WrongUse, bytes_of_text, share_of_text, span_of_text, storage_options
from dcp_storage.errors import CheckpointReplacedError, StoreError, UntrustedDataError
from tests.e2e import ALONE, Place, place_of, save
from tests.tools import SLOW_MOTO, STATES, flip, make, remove

pytestmark = pytest.mark.filterwarnings(ALONE)

COMMANDS = ("ls", "show", "verify", "prune", "cp", "adopt", "doctor", "bench")
ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path, place: Place | None = None) -> Any:
    """The command line in this process."""
    flags = [] if place is None else [f"-o{key}={json.dumps(value)}" for key, value in place.options.items()]
    return CliRunner().invoke(app, [*map(str, arguments), *flags], prog_name="dcp-storage")


def told(result: Any) -> Any:
    """What ``--json`` printed: one object on one line."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_help_leads_to_every_command() -> None:
    """The first help names all commands, the exit codes and where options come from; each command's help, too."""
    first = run("--help")
    assert first.exit_code == 0
    for command in COMMANDS:
        assert f"  {command} " in first.stdout
        text = run(command, "--help")
        assert text.exit_code == 0
        flat = " ".join(text.stdout.split())
        assert "Exit codes: 0 as wished; 1 something is wrong with the checkpoint" in flat
        assert "--json" in flat
        assert "-o, --option KEY=VALUE" in flat
    assert "DCP_STORAGE_OPTIONS" in first.stdout


@pytest.mark.parametrize("where", ["local", SLOW_MOTO, "gcs"])
@pytest.mark.parametrize("kind", STATES)
def test_show_and_verify_and_adopt_and_cp_on_every_state(
    request: pytest.FixtureRequest, where: str, kind: str, tmp_path: Path
) -> None:
    """The exit codes tell a committed, an unfinished, a damaged, a deleted, a stock and no checkpoint apart."""
    place = place_of(request, where)
    make(place, kind)
    wanted = {"committed": 0, "damaged": 1}.get(kind, 3)
    shown = run("show", place.url, place=place)
    assert shown.exit_code == wanted, shown.output
    assert kind in shown.stdout
    assert run("verify", place.url, "--json", place=place).exit_code == wanted
    copied = run("cp", place.url, tmp_path / "copy", place=place)
    assert copied.exit_code == wanted, copied.output
    assert (tmp_path / "copy" / ".commit").exists() is (kind == "committed")
    adopted = run("adopt", place.url, place=place)
    assert adopted.exit_code == {"stock": 0, "unfinished": 3, "nothing": 3}.get(kind, 2), adopted.output
    if kind == "stock":
        assert run("verify", place.url, "--depth", "data", place=place).exit_code == 0


@pytest.mark.parametrize("where", ["local", SLOW_MOTO])
def test_ls_shows_the_steps_of_a_run(request: pytest.FixtureRequest, where: str) -> None:
    """Each step is on a line with its state; as JSON with sizes and versions; what is no run has code 3."""
    root = place_of(request, where)
    for step, kind in enumerate(STATES[:5]):
        make(root.child(f"step-{step:08d}"), kind)
    shown = run("ls", root.url, place=root)
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line.split()[0].isdigit()}
    assert list(lines) == ["0", "1", "2", "4"]
    assert "1 deleted step not shown" in shown.stdout
    shown = run("ls", root.url, "--all", place=root)
    assert "not shown" not in shown.stdout
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line.split()[0].isdigit()}
    assert list(lines) == ["0", "1", "2", "3", "4"]
    for step, kind in enumerate(STATES[:5]):
        state = "committed" if kind == "damaged" else kind  # the commit is whole; verify finds the manifest
        assert state in lines[str(step)]
    report = told(run("ls", root.url, "--json", place=root))
    first = report["steps"][0]
    assert (report["latest"], first["world_size"], first["torch"]) == (2, 1, str(torch.__version__))
    assert first["nbytes"] == sum(root.child("step-00000000").files().values())
    assert run("ls", f"{root.url}/step-00000001", place=root).exit_code == 3
    assert run("ls", f"{root.url}/absent", "--json", place=root).exit_code == 3


def test_show_draws_a_key_and_prints_values(tmp_path: Path) -> None:
    """A key's drawing and values are printed, names with brackets as they are; an unknown key is wrong use."""
    place = Place(str(tmp_path / "c"))
    save({"w[bold]x": torch.arange(6.0).reshape(2, 3)}, place.writer())
    text = run("show", place.url, "w[bold]x", "--values", "2").stdout
    assert "w[bold]x: float32 [2, 3]" in text
    assert "│ 0    │" in text
    assert "[[0.0, 1.0], [3.0, 4.0]]" in text
    assert "w[bold]x" in run("show", place.url).stdout
    assert run("show", place.url, "absent").exit_code == 2


def test_verify_says_what_is_wrong_and_repairs_a_view(tmp_path: Path) -> None:
    """Damage is printed with file, key and advice, also as JSON; a missing view is repaired on demand."""
    place = Place(str(tmp_path / "c"))
    make(place, "committed")
    remove(place, ".metadata")
    assert run("verify", place.url).exit_code == 0
    assert "warning" in run("verify", place.url).stdout
    assert "rewritten" in run("verify", place.url, "--repair").stdout
    assert "warning" not in run("verify", place.url).stdout
    flip(place, "__0_0.distcp", 100_000)
    result = run("verify", place.url, "--depth", "data")
    assert result.exit_code == 1
    assert "wrong: altered __0_0.distcp key 'large'" in result.stdout
    report = told(run("verify", place.url, "--depth", "data", "--json"))
    assert [p["kind"] for p in report["problems"]] == ["altered"]
    assert run("verify", place.url, "--depth", "data", "--sample", "100%").exit_code == 1


def test_prune_is_a_dry_run_until_it_is_told(tmp_path: Path) -> None:
    """Without --apply nothing changes and the bytes are said; with it the oldest step goes."""
    root = Place(str(tmp_path / "run"))
    for step in range(3):
        make(root.child(f"step-{step}"), "committed")
    before = {step: root.child(f"step-{step}").files() for step in range(3)}
    dry = run("prune", root.url, "--keep-latest", "2")
    assert dry.exit_code == 0, dry.output
    assert "--apply" in dry.stdout
    assert {step: root.child(f"step-{step}").files() for step in range(3)} == before
    report = told(run("prune", root.url, "--keep-latest", "2", "--apply", "--json"))
    assert (report["deleted"], report["kept"], report["applied"]) == ([0], [1, 2], True)
    assert run("show", f"{root.url}/step-0").exit_code == 3
    assert run("show", f"{root.url}/step-2").exit_code == 0


def test_cp_refuses_and_replaces(tmp_path: Path) -> None:
    """Another checkpoint is not replaced (2) unless --overwrite; the same one again is fine (0)."""
    one, two, dst = (Place(str(tmp_path / name)) for name in ("one", "two", "dst"))
    save({"w": torch.ones(3)}, one.writer())
    save({"w": torch.zeros(3)}, two.writer())
    assert run("cp", one.url, dst.url).exit_code == 0
    assert "already" in run("cp", one.url, dst.url).stdout
    refused = run("cp", two.url, dst.url)
    assert refused.exit_code == 2
    assert "overwrite" in refused.stderr
    assert run("cp", two.url, dst.url, "--overwrite").exit_code == 0
    assert run("cp", dst.url, dst.url).exit_code == 2


@pytest.mark.parametrize("where", ["local", SLOW_MOTO])
def test_doctor_and_bench_leave_nothing(request: pytest.FixtureRequest, where: str) -> None:
    """Both print what they found, end with 0 on a fit store, and leave no object."""
    place = place_of(request, where)
    place.set("mine.txt", b"mine")
    checked = run("doctor", place.url, place=place)
    assert checked.exit_code == 0, checked.output
    assert "keeps all that checkpoints need" in checked.stdout
    assert "ok    create" in checked.stdout
    measured = run("bench", place.url, "--seconds", "0.3", "--max-bytes", "64MiB", place=place)
    assert measured.exit_code == 0, measured.output
    assert "max_concurrency=" in measured.stdout
    assert set(place.files()) == {"mine.txt"}
    assert run("doctor", f"{place.url}-absent").exit_code != 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["verify", "x", "--depth", "deep"],
        ["verify", "x", "--sample", "5%"],
        ["verify", "x", "--depth", "data", "--sample", "some"],
        ["verify", "x", "--part-size", "large"],
        ["show", "x", "-o", "nothing"],
        ["show", "nosuch://x/y"],
        ["show", "s3://"],
        ["prune", "x", "--grace", "soon"],
        ["prune", "x", "--keep-latest", "0"],
        ["cp", "x"],
        ["ls"],
        ["nosuch"],
        ["bench", "x", "--max-bytes", "1"],
    ],
)
def test_wrong_use_is_exit_code_two(wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be meant is said on standard error, with code 2, and no traceback."""
    monkeypatch.chdir(tmp_path)
    result = run(*wrong)
    assert result.exit_code == 2, result.output
    assert result.stderr.strip()
    assert "Traceback" not in result.output


def test_a_store_that_fails_is_exit_code_four() -> None:
    """A store that cannot be reached is neither wrong use nor an empty folder; as JSON the error is an object."""
    options = ["-o", "key=x", "-o", "secret=y", "-o", "client_kwargs.endpoint_url=http://127.0.0.1:9"]
    options += ["-o", 'config_kwargs={"connect_timeout": 1}']
    result = run("doctor", "s3://bucket/run", "--json", *options)
    assert result.exit_code == 4
    said = told(result)
    assert (said["ok"], said["exit_code"], said["error"]["kind"]) == (False, 4, "store")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (CommitUnknownError("x"), 4),
        (StoreError("x"), 4),
        (CheckpointReplacedError("x"), 1),
        (UntrustedDataError("x"), 1),
        (WrongUse("x"), 2),
    ],
)
def test_errors_have_their_codes(error: BaseException, code: int) -> None:
    """Each kind of error ends with the code that the help says."""
    assert exit_code(error) == code


def test_options_come_from_environment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags go over the environment, nested keys into what is there, and what is no JSON is text."""
    monkeypatch.setenv(
        "DCP_STORAGE_OPTIONS", '{"key": "env", "client_kwargs": {"region_name": "r", "endpoint_url": 1}}'
    )
    given = ["key=flag", "client_kwargs.endpoint_url=http://x", "anon=true", "n=5", "empty="]
    assert storage_options(given) == {
        "key": "flag",
        "client_kwargs": {"region_name": "r", "endpoint_url": "http://x"},
        "anon": True,
        "n": 5,
        "empty": "",
    }
    for wrong in ("[1]", "{"):
        monkeypatch.setenv("DCP_STORAGE_OPTIONS", wrong)
        with pytest.raises(WrongUse, match="DCP_STORAGE_OPTIONS"):
            storage_options([])


def test_the_environment_reaches_the_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DCP_STORAGE_OPTIONS set, no flag is needed."""
    place = place_of(request, "moto")
    make(place, "committed")
    monkeypatch.setenv("DCP_STORAGE_OPTIONS", json.dumps(place.options))
    assert run("verify", place.url).exit_code == 0


def test_texts_become_values() -> None:
    """Sizes are powers of 1024, shares percents or fractions, spans have a unit; others are refused."""
    assert [bytes_of_text(t) for t in ("5", "2K", "1.5MiB", "3 GB")] == [5, 2048, 1572864, 3 << 30]
    assert [share_of_text(t) for t in ("5%", "0.05", "100 %")] == [0.05, 0.05, 1.0]
    assert [span_of_text(t).total_seconds() for t in ("7d", "12h", "1.5m", "90s")] == [604800, 43200, 90, 90]
    for read, text in ((bytes_of_text, "x"), (share_of_text, "0%"), (share_of_text, "x"), (span_of_text, "7")):
        with pytest.raises(WrongUse):
            read(text)


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "dcp_storage", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_the_module_runs_and_uses_fsspec_config_files(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """``python -m dcp_storage`` finds the store's options in fsspec's own configuration files, and draws no bar."""
    place = place_of(request, "moto")
    make(place, "committed")
    (tmp_path / "conf.json").write_text(json.dumps({"s3": place.options}))
    process = command("verify", place.url, "--json", FSSPEC_CONFIG_DIR=str(tmp_path))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["ok"] is True


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """Where typer is missing, one sentence and exit code 2."""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')")
    process = command("ls", "x", PYTHONPATH=str(tmp_path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "The command line needs typer: pip install 'dcp-storage[cli]'\n"


def written_to(output: int, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output goes there."""
    program = [sys.executable, "-W", "ignore", "-m", "dcp_storage", *arguments]
    done = subprocess.run(program, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A reader that has seen enough changes no exit code; a full disk is said; no encoding breaks a report."""
    src = Place(str(tmp_path / "run" / "step-1"))
    save({"weight": torch.ones(4)}, src.writer())
    listing = ["ls", str(tmp_path / "run")]
    closed, gone = os.pipe()
    os.close(closed)
    for arguments in (listing, [*listing, "--json"]):
        assert written_to(gone, *arguments) == (0, "")
    os.close(gone)
    with Path("/dev/full").open("wb") as full:
        said = "Standard output cannot be written to: No space left on device. The exit code would be 0.\n"
        assert written_to(full.fileno(), *listing) == (2, said)
    copying = command("cp", src.url, str(tmp_path / "kept"), PYTHONIOENCODING="ascii")
    out, err = copying.communicate(timeout=60)
    assert (copying.returncode, err) == (0, "")
    assert " \\u2192 " in out


@pytest.mark.slow
def test_an_interrupted_copy_leaves_nothing_half_done(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Ctrl-C ends with 130, no commit and no open upload; the same command again ends well."""
    dst = place_of(request, "moto")
    src = Place(str(tmp_path / "src"))
    save({str(n): torch.randn(3 << 20) for n in range(8)}, src.writer(options=SaveOptions(shard_size=12 << 20)))
    arguments = ["cp", src.url, dst.url, "--part-size", "5MiB", "--max-concurrency", "1"]
    environment = {"DCP_STORAGE_OPTIONS": json.dumps(dst.options)}
    process = command(*arguments, **environment)
    until = time.monotonic() + 60
    while not dst.shards() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.2)  # the server shares this process, and one answer at a time
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert dst.commits() == []
    assert dst.uploads() == []
    again = command(*arguments, "--json", **environment)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads(out)["files_resumed"] >= 1


def test_a_bar_is_drawn_only_on_a_terminal_and_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short work, a stream that is no terminal, and CI show nothing; long work on a terminal shows a bar."""
    import io

    from rich.console import Console

    from dcp_storage import cli_progress

    assert cli_progress.wants_bars() is False  # the tests' standard error is no terminal
    monkeypatch.setattr(sys, "stderr", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setenv("CI", "true")
    assert cli_progress.wants_bars() is False
    monkeypatch.delenv("CI")
    assert cli_progress.wants_bars() is True

    def drawn(patience: float) -> str:
        monkeypatch.setattr(cli_progress, "_PATIENCE", patience)
        out = io.StringIO()
        with cli_progress.Bar("copying", console=Console(file=out, force_terminal=True, width=80)) as bar:
            bar.set_size(100)
            bar.relative_update(50)
        return out.getvalue()

    assert drawn(1000.0) == ""
    assert "copying" in drawn(0.0)
