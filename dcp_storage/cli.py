"""The command line: each command calls one tool and shows its report. Needs the extra ``[cli]`` (typer, rich)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dcp_storage.cli_running import NOT_THERE, WRONG, run_command
from dcp_storage.cli_values import ENVIRONMENT, WrongUse, bytes_of_text, share_of_text, span_of_text, storage_options
from dcp_storage.options import LoadOptions, Report, SaveOptions
from dcp_storage.version import VERSION

__all__ = ["app"]

_CODES = (
    "Exit codes: 0 as wished; 1 something is wrong with the checkpoint (doctor: with the store); 2 wrong use; "
    "3 not there or not committed; 4 the store failed, or this program; 130 interrupted."
)
_AT_ONCE = SaveOptions().max_concurrency
_STORE = (
    f"Options of the store come from the environment variable {ENVIRONMENT} (a JSON object), then from -o flags; "
    "fsspec's own configuration files count as well. For a server of your own: "
    "-o client_kwargs.endpoint_url=http://host:9000 -o key=... -o secret=..."
)

app = typer.Typer(
    name="dcp-storage",
    help=f"Look at checkpoints and keep them, on local disk, S3, GCS or any fsspec filesystem.\n\n{_STORE}\n\n{_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Run = Annotated[str, typer.Argument(help="The folder of a run, whose sub-folders are step-<n>: a path or URL.")]
Checkpoint = Annotated[str, typer.Argument(help="The folder of a checkpoint: a path or URL.")]
Url = Annotated[str, typer.Argument(help="A folder of the store to try: a path or URL. A local one must be there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        help="A storage option for fsspec, any number of times; the value may be JSON, a.b=c is nested.",
    ),
]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Most bytes in flight, e.g. 256MiB.")]
Part = Annotated[str, typer.Option(metavar="SIZE", help="Bytes of one request, e.g. 16MiB.")]
AtOnce = Annotated[int, typer.Option(metavar="N", help="Most requests at once.")]
Single = Annotated[
    bool, typer.Option("--assume-single-writer", help="On a store that cannot refuse a second writer: my word on it.")
]


def _by_ok(report: Report) -> int:
    return 0 if report.ok else WRONG


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dcp-storage {VERSION}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options before a command."""


@app.command("ls", epilog=_CODES)
def _ls(
    run: Run,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show the folders of deleted steps. --json has them always.")
    ] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """List the steps of a run.

    Each with its state, commit, files, size, age, world size and versions. A state is one of: committed (whole, as far
    as its commit tells: ask verify), unfinished (no commit: interrupted, or still being saved), stock (written by torch
    itself), rank-by-rank (saved without collectives), damaged (its commit or manifest cannot be read), void (deleted).
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.listing import list_run

        with Bar("looking", in_bytes=False) as bar:
            report = list_run(run, storage_options=storage_options(option), callback=bar)
        return report if everything or as_json else report.folded()

    run_command(as_json, work, lambda report: NOT_THERE if report.latest is None else 0)


@app.command("show", epilog=_CODES)
def _show(
    checkpoint: Checkpoint,
    key: Annotated[str | None, typer.Argument(help="Show this key only, and how it is cut over files.")] = None,
    values: Annotated[
        int, typer.Option(metavar="N", help="With KEY: read and print its first N values along each dimension.")
    ] = 0,
    trust: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A global that objects may use, beyond the safe list.")
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint is.

    Its state, commit, keys, shapes, dtypes and shards by rank and file. With KEY also a drawing of how that tensor is
    cut over files.
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.describe import describe

        options = LoadOptions(trusted_globals=tuple(trust or ()))
        given = storage_options(option)
        with Bar("looking", in_bytes=False):
            try:
                return describe(checkpoint, key, values=values, storage_options=given, options=options)
            except KeyError as error:
                raise WrongUse(f"There is no key {key!r} in this checkpoint; show without a key lists them.") from error

    states = {"committed": 0, "damaged": WRONG, "rank-by-rank": 0}
    run_command(
        as_json, work, lambda r: (WRONG if r.problems else 0) if states.get(r.state) == 0 else states.get(r.state, 3)
    )


@app.command("verify", epilog=_CODES)
def _verify(
    checkpoint: Checkpoint,
    depth: Annotated[
        str,
        typer.Option(metavar="commit|sizes|data", help="Commit and manifest; also the files' sizes; also every byte."),
    ] = "sizes",
    sample: Annotated[
        str | None, typer.Option(metavar="SHARE", help="With --depth data: a share of the blocks, e.g. 5%.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="With --sample: choose other blocks.")] = 0,
    repair: Annotated[bool, typer.Option("--repair", help="Rewrite .metadata if it is missing or stale.")] = False,
    max_concurrency: AtOnce = _AT_ONCE,
    part_size: Part = "16MiB",
    memory_budget: Memory = "256MiB",
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a checkpoint, where, and what to do."""

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.verify import verify

        options = LoadOptions(
            max_concurrency=max_concurrency,
            part_size=bytes_of_text(part_size),
            memory_budget=bytes_of_text(memory_budget),
        )
        with Bar("reading") as bar:
            return verify(
                checkpoint,
                depth,
                sample=None if sample is None else share_of_text(sample),
                seed=seed,
                repair=repair,
                storage_options=storage_options(option),
                options=options,
                callback=bar,
            )

    run_command(as_json, work, _by_ok)


@app.command("prune", epilog=_CODES)
def _prune(
    run: Run,
    keep_latest: Annotated[int | None, typer.Option(metavar="N", help="Keep the N newest committed steps.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", help="Keep every step that N divides, and the newest.")
    ] = None,
    keep: Annotated[list[int] | None, typer.Option(metavar="STEP", help="Keep this step too.")] = None,
    grace: Annotated[
        str, typer.Option(metavar="SPAN", help="Leftovers younger than this stay, e.g. 7d or 12h.")
    ] = "7d",
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without this only say what would be done.")] = False,
    assume_single_writer: Single = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Delete old steps, and what dead saves left. A dry run unless --apply is given.

    Without --keep-latest and --keep-every no step goes. The newest whole step, pinned ones, one that is being saved
    and what is not ours by name stay in any case.
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.prune import prune

        with Bar("pruning" if apply else "looking", in_bytes=False) as bar:
            return prune(
                run,
                keep_latest=keep_latest,
                keep_every=keep_every,
                keep=keep or (),
                grace=span_of_text(grace),
                apply=apply,
                assume_single_writer=assume_single_writer,
                storage_options=storage_options(option),
                callback=bar,
            )

    run_command(as_json, work, _by_ok)


@app.command("cp", epilog=_CODES)
def _cp(
    src: Annotated[str, typer.Argument(help="The checkpoint to copy: a path or URL.")],
    dst: Annotated[str, typer.Argument(help="The folder to copy it to: a path or URL.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another checkpoint that is there.")] = False,
    src_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="As -o, for the source only.")
    ] = None,
    dst_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="As -o, for the destination only.")
    ] = None,
    assume_single_writer: Single = False,
    max_concurrency: AtOnce = _AT_ONCE,
    part_size: Part = "16MiB",
    memory_budget: Memory = "256MiB",
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint between any two stores.

    In parallel, checked on the way, committed last. Killed or failed, it goes on where it was when it is run again.
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.copy import copy

        options = SaveOptions(
            max_concurrency=max_concurrency,
            part_size=bytes_of_text(part_size),
            memory_budget=bytes_of_text(memory_budget),
            assume_single_writer=assume_single_writer,
        )
        both = option or []
        with Bar("copying") as bar:
            return copy(
                src,
                dst,
                src_options=storage_options([*both, *(src_option or [])]),
                dst_options=storage_options([*both, *(dst_option or [])]),
                overwrite=overwrite,
                options=options,
                callback=bar,
            )

    run_command(as_json, work, _by_ok)


@app.command("adopt", epilog=_CODES)
def _adopt(
    checkpoint: Checkpoint,
    data: Annotated[bool, typer.Option("--data", help="Read every byte and keep its CRC-32.")] = False,
    trust: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A global that its .metadata may use.")
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Commit what stock torch wrote, as it lies there.

    The commit says "unchanged from now on", not "right".
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.adopt import adopt

        options = LoadOptions(trusted_globals=tuple(trust or ()))
        with Bar("reading") as bar:
            return adopt(checkpoint, data=data, storage_options=storage_options(option), options=options, callback=bar)

    run_command(as_json, work, _by_ok)


@app.command("doctor", epilog=_CODES)
def _doctor(url: Url, option: Options = None, as_json: Json = False) -> None:
    """Ask a store whether it is fit for checkpoints.

    Each answer comes with what it means. Leaves nothing behind.
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.doctor import doctor

        with Bar("asking", in_bytes=False) as bar:
            return doctor(url, storage_options=storage_options(option), callback=bar)

    run_command(as_json, work, _by_ok)


@app.command("bench", epilog=_CODES)
def _bench(
    url: Url,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long it should take, about.")] = 8.0,
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes that are written; at least 64MiB.")
    ] = "2GiB",
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Measure a store, and advise on options.

    At several concurrencies and part sizes. Leaves nothing behind.
    """

    def work() -> Report:
        from dcp_storage.cli_progress import Bar
        from dcp_storage.tools.bench import bench

        with Bar("measuring", in_bytes=False) as bar:
            return bench(
                url,
                seconds=seconds,
                max_bytes=bytes_of_text(max_bytes),
                storage_options=storage_options(option),
                callback=bar,
            )

    run_command(as_json, work, _by_ok)
