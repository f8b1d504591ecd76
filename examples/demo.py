"""The main job of this package, from end to end: train, save, see the commit, resume elsewhere on another layout.

Run it with ``make demo``. An S3 server (moto) runs in a thread of this process; nothing leaves the machine. Four ranks
train a small transformer, save it to a folder and to S3, and train on. Two ranks, on other layouts, resume from each
and must compute the same losses. The exit status is 1 if they do not, or if a damaged checkpoint goes unnoticed.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from botocore.session import get_session
from demo_ranks import FirstRun, Place, Resumed, first_run, resume
from moto.server import ThreadedMotoServer
from torch.distributed.checkpoint.api import CheckpointException

from dcp_storage import CorruptCheckpointError, FsspecStorageReader
from dcp_storage.testing.ranks import RankPool

__all__ = ["compare", "main"]

HOST = "127.0.0.1"
BUCKET = "demo"
SAVE_AT, STEPS = 12, 24
RANKS, RANKS_AFTER = 4, 2
TOLERANCE = 1e-3
"""Most that a resumed loss may differ: ranks add the same numbers in another order, and training amplifies that."""
SECONDS = 300.0


def main() -> int:
    """Runs the demo; the exit status."""
    begun = time.monotonic()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise
    # torch says so once for each load in a single process, which is what is meant here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="dcp_storage-demo-") as folder:
            status = _run(Path(folder), "http://{}:{}".format(*server.get_host_and_port()))
    finally:
        server.stop()
    print(f"\n{'All as it should be' if status == 0 else 'FAILED'}, in {time.monotonic() - begun:.0f} s.")
    return status


def _run(folder: Path, endpoint: str) -> int:
    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    options = {"key": "demo", "secret": "demo-secret", "client_kwargs": client}
    s3 = get_session().create_client(
        "s3", aws_access_key_id=options["key"], aws_secret_access_key=options["secret"], **client
    )
    s3.create_bucket(Bucket=BUCKET)
    disk = Place("disk", str(folder / "step-12"), {})
    bucket = Place("S3", f"s3://{BUCKET}/run/step-12", options)

    with RankPool(preload=("demo_ranks",)) as pool:
        _say(f"{RANKS} ranks train a byte transformer (FSDP2, rows sharded); after step {SAVE_AT} they save")
        arguments = ("fsdp-rows", [disk, bucket], SAVE_AT, STEPS)
        first: list[FirstRun] = pool.run(first_run, RANKS, *arguments, timeout=SECONDS)
        kept = {path.name: path.read_bytes() for path in Path(disk.path).iterdir()}
        _show(disk.path, kept)
        objects = s3.list_objects_v2(Bucket=BUCKET, Prefix="run/step-12/")["Contents"]
        bodies = {o["Key"]: s3.get_object(Bucket=BUCKET, Key=o["Key"])["Body"].read() for o in objects}
        _show(bucket.path, {key.rpartition("/")[2]: body for key, body in bodies.items()})

        _say("A second save to the same place, without overwrite=True, is refused on every rank")
        print(f"  {first[0].refusals.get(disk.name)}")
        refused = all(name in rank.refusals for rank in first for name in (disk.name, bucket.name))

        _say(f"{RANKS_AFTER} ranks begin with other weights, load, and train steps {SAVE_AT} to {STEPS - 1} again")
        resumed: dict[str, Resumed] = {}
        for place, layout in ((disk, "fsdp-columns"), (bucket, "tensor-parallel")):
            ranks: list[Resumed] = pool.run(resume, RANKS_AFTER, layout, place, SAVE_AT, STEPS, timeout=SECONDS)
            resumed[f"{place.name}, 2 ranks, {layout}"] = ranks[0]
            print(f"  from {place.name:4}  {sum(r.bytes_read for r in ranks):>9,} bytes read by both ranks")
    close = compare(first[0].losses[SAVE_AT:], resumed)

    _say("One byte of a shard is flipped")
    found = _flip_a_byte(folder, disk.path)
    return 0 if refused and close and found else 1


def _say(text: str) -> None:
    print(f"\n== {text}.", flush=True)


def _show(place: str, files: dict[str, bytes]) -> None:
    print(f"  {place}")
    for name in sorted(files):
        print(f"    {len(files[name]):>10,}  {name}")
    commit = json.loads(files[".commit"])
    print(f"    .commit: {json.dumps({k: commit[k] for k in ('state', 'number', 'world_size', 'manifest')})}")


def compare(wanted: list[float], resumed: dict[str, Resumed]) -> bool:
    """Prints the losses side by side; whether all resumed ones are near enough and the forgetful ones are not."""
    _say("Losses, beside those of the run that was not interrupted")
    steps = range(0, len(wanted), 4)
    shown = [*steps, len(wanted) - 1]
    print(f"  {'':36}" + "".join(f"{f'step {SAVE_AT + k}':>10}" for k in shown) + "  largest difference")
    print(f"  {f'uninterrupted, {RANKS} ranks, fsdp-rows':36}" + "".join(f"{wanted[k]:>10.5f}" for k in shown))
    good = True
    for name, run in resumed.items():
        for losses, what in ((run.losses, name), (run.forgetful, "  the same without the optimizer")):
            differences = [abs(a - b) for a, b in zip(wanted, losses, strict=True)]
            near = all(difference <= TOLERANCE for difference in differences)  # false for NaN too
            good &= near is (losses is run.losses)
            print(f"  {what:36}" + "".join(f"{losses[k]:>10.5f}" for k in shown) + f"  {max(differences):.1e}")
    print(f"  Tolerance: {TOLERANCE:g}. The runs without the optimizer's state must differ by more.")
    return good


def _flip_a_byte(folder: Path, checkpoint: str) -> bool:
    """Flips one byte in the middle of the largest tensor item of a copy and loads that; whether it is found."""
    damaged = folder / "damaged"
    shutil.copytree(checkpoint, damaged)
    manifest = json.loads((damaged / ".manifest").read_bytes())
    item = max(manifest["items"], key=lambda i: i.get("payload_length", 0))
    at = item["offset"] + item["payload_offset"] + item["payload_length"] // 2
    with (damaged / manifest["files"][item["file"]]["name"]).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    entry = manifest["entries"][item["key"]]
    state: dict[str, Any] = {item["key"]: torch.zeros(entry["size"])}
    try:
        dcp.load(state, storage_reader=FsspecStorageReader(damaged), no_dist=True)
    except CheckpointException as error:
        reason = error.failures[0][0]
        print(f"  {type(reason).__name__}: {str(reason).replace(str(folder), '')}")
        return isinstance(reason, CorruptCheckpointError)
    print("  The load said nothing.")
    return False


if __name__ == "__main__":
    sys.exit(main())
