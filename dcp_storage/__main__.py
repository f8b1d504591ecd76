"""``dcp-storage`` and ``python -m dcp_storage``: the command line, or a sentence on what it needs."""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich")


def main() -> None:
    """Runs the command line; without the extra it says what to install and exits with 2."""
    try:
        from dcp_storage.cli import app

        app(prog_name="dcp-storage")
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(f"The command line needs {error.name}: pip install 'dcp-storage[cli]'\n")
        sys.exit(2)
    except KeyboardInterrupt:  # while modules are loaded: a command under way says so itself
        sys.stderr.write("Interrupted: nothing was done.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
