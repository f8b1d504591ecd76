"""A server or a proxy in a process of its own; prints its URL and serves until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from dcp_storage.testing.proxy import Proxy, Shape

__all__ = ["main"]


def main() -> None:
    """``proxy URL LATENCY RATE [TOTAL RATE]``, ``gcs BUCKET`` or ``seaweedfs BUCKET``."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    proxy = kinds.add_parser("proxy")
    proxy.add_argument("url")
    proxy.add_argument("latency", type=float)
    proxy.add_argument("rate", type=float)
    proxy.add_argument("total_rate", type=float, nargs="?")
    for kind in ("gcs", "seaweedfs"):
        kinds.add_parser(kind).add_argument("bucket")
    options = parser.parse_args()
    if options.kind == "proxy":
        with Proxy(options.url, Shape(options.latency, options.rate, options.total_rate)) as shaped:
            print(shaped.url, flush=True)
            for _ in sys.stdin:  # each line asks what went through
                print(shaped.bytes_up, shaped.bytes_down, flush=True)
            signal.pause()
    if options.kind == "seaweedfs":
        from tests.servers import seaweedfs_server

        with tempfile.TemporaryDirectory() as folder, seaweedfs_server(Path(folder)) as endpoint:
            endpoint.client.create_bucket(Bucket=options.bucket)
            print(endpoint.endpoint_url, flush=True)
            signal.pause()
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    from tests.servers.gcs import gcs_server

    with gcs_server(with_md5=False) as server:  # it would take more of the processors than the client does
        server.make_bucket(options.bucket)
        print(server.url, flush=True)
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds: what was started is ended
    with contextlib.suppress(KeyboardInterrupt):
        main()
