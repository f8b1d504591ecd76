"""Save to S3 behind the training: the loop stops only for a copy of the state.

Run it with moto, an S3 server for tests (pip install 'moto[server]'): python examples/async_s3.py
Or with a real bucket: python examples/async_s3.py s3://bucket/run
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dcp_storage import DCP, RngState


@contextmanager
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """A place on S3 with the options that lead there: the one that was named, or a server on this machine."""
    if len(sys.argv) > 1:
        yield sys.argv[1], {}
        return
    from moto.server import ThreadedMotoServer

    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        options = {"endpoint_url": "http://{}:{}".format(*moto.get_host_and_port())}
        import s3fs

        s3fs.S3FileSystem(**options).mkdir("bucket")
        yield "s3://bucket/run", options
    finally:
        moto.stop()


def main() -> None:
    """Twenty steps, saved after every fifth, and what was saved last is loaded again."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": RngState(), "step": 0}
    with server() as (root, options):
        stalls = []
        for step in range(1, 21):
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                begun = time.perf_counter()
                # An error of an earlier save is raised here; a save that is still going on is waited for.
                handle = DCP.async_save(
                    {**state, "step": step}, checkpoint_id=f"{root}/step-{step:08d}", storage_options=options
                )
                stalls.append(time.perf_counter() - begun)
        report = handle.result()  # the last one: committed, or its error is raised
        assert report is not None
        print(f"{report.bytes_written:,} bytes in {report.requests} requests, committed as {report.commit}")

        fresh = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        found: dict[str, Any] = {"model": fresh, "step": 0}
        DCP.load(found, checkpoint_id=f"{root}/step-00000020", storage_options=options)
        same = all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))
        print("loaded step", found["step"], same)


if __name__ == "__main__":
    main()
