"""Fine-tune from a checkpoint that somebody else saved with stock torch, under other names and with another head.

Run it: python examples/finetune_from_stock.py
"""

from __future__ import annotations

import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_storage import DCP, IncompatibleCheckpointError


def pretrained(folder: str) -> None:
    """What somebody else has: an encoder and a head of 1,000 classes, saved by stock torch."""
    theirs = nn.ModuleDict({"encoder": nn.Linear(16, 32), "classifier": nn.Linear(32, 1000)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock torch says that there is no process group
        dcp.save({"net": theirs.state_dict()}, storage_writer=dcp.FileSystemWriter(folder))


class Mine(nn.Module):
    """The same encoder under another name, and a head of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 3)


def main() -> None:
    """Shows what does not fit, then loads what is wanted, then saves the run as one's own."""
    with tempfile.TemporaryDirectory() as folder:
        pretrained(f"{folder}/stock")
        model = Mine()
        optimizer = torch.optim.AdamW(model.parameters())
        names = {"net.encoder": "model.body"}  # on the store → here

        try:
            # require_commit=False: stock torch makes no commit, so nothing says that its checkpoint is whole
            DCP.load({"model": model}, checkpoint_id=f"{folder}/stock", keys=names, require_commit=False)
        except IncompatibleCheckpointError as error:
            print("missing:", error.missing)  # and nothing has changed

        report = DCP.load(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=f"{folder}/stock",
            keys={"net.encoder": "model.body", "net.classifier": None},
            require_commit=False,
            strict=False,
        )
        print("loaded:", report.loaded)
        print("new:", [key for key in report.untouched if key.startswith("model.")])

        DCP.save({"model": model, "optimizer": optimizer, "step": 0}, checkpoint_id=f"{folder}/step-00000000")
        again = Mine()
        DCP.load({"model": again}, checkpoint_id=f"{folder}/step-00000000")  # strict: everything fits
        print("saved and loaded:", torch.equal(again.head.weight, model.head.weight))


if __name__ == "__main__":
    main()
