"""A certificate for loopback, made when it is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["make_certificate"]


def make_certificate(folder: Path) -> Path:
    """A PEM file with a key and a self-signed certificate for 127.0.0.1, valid for a day (needs ``openssl``)."""
    made = folder / "loopback.pem"
    key = folder / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(made),
        ],
        check=True,
        capture_output=True,
    )
    made.write_text(made.read_text() + key.read_text())
    return made
