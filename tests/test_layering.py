"""The shape of the package: imports point one way, and only the stores touch filesystems."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "dcp_storage"
ROOT = Path(__file__).parents[1] / PACKAGE

LAYERS = tuple(
    line.split()
    for line in """
    errors version
    names options crc budget plan overlaps shapes
    records store plan_slices exchange_plan exchange_rounds exchange_wire exchange_memory
    exchange_metadata exchange_links fetching
    stores.asking
    stores.local_syscalls stores.translate stores.parts stores.s3_bodies stores.s3_errors
    stores.s3_session
    stores.local_create stores.local_direct stores.s3_listing stores.remote_files stores.location
    stores.local_upload stores.gcs_errors stores.gcs_crc32c stores.obstore_errors
    stores.gcs_session
    stores.obstore_options
    stores.gcs_sending
    stores.gcs_upload
    stores.gcs_listing
    stores.local stores.memory stores.s3_upload stores.obstore_upload stores.obstore_gcs
    stores.remote stores.s3 stores.gcs
    stores.obstore_store
    stores.opening stores.probing
    sealing
    codec extensions telling wrappers pickles_stack pickles_shape pickles_zip
    checksums counting pickles_machine carrying
    placing
    scattering
    pickles_tensors pickles_numpy
    pickles_safe
    pickles
    torchview
    coverage
    current commit_object
    view
    commit fence
    save load lone
    reading session exchange_wants
    exchange
    filling peeking reader_load reader_plans resolving twins
    writer reader listing
    partial
    per_rank state_tree state_digest state_ranks state_keys state_source state_staging
    state_findings state_process
    state_models state_values state_view state_flat_groups
    state_optimizers
    state_walk state_sharing
    state_save state_spread
    state_load state_async
    state
    tools.drawing tools.opening tools.reports tools.crew tools.streams tools.copy_journal
    tools.doctor_checks tools.values tools.verify_data tools.verify_view tools.copy_files
    tools.describe tools.verify tools.copy tools.adopt tools.doctor tools.bench
    tools.runs tools.pins
    tools.listing tools.delete
    tools.retention
    tools.prune
    manager_schedule manager_signals manager_pending manager_run
    manager_watch manager_calls
    manager
    cli_values
    cli_progress cli_text
    cli_running
    cli
    __main__
    """.strip().splitlines()
)
"""Lowest first. A module imports from layers below its own only; the package's face and the test kit are on top."""

FACE = ""
PURE = (
    "errors",
    "options",
    "names",
    "records",
    "store",
    "plan",
    "plan_slices",
    "exchange_plan",
    "budget",
    "crc",
    "checksums",
)
CLIENTS = {"fsspec", "s3fs", "gcsfs", "obstore", "aiobotocore", "botocore", "aiohttp", "boto3"}
FILE_CALLS = {"open", "os.open", "io.open"}
FILE_METHODS = {"read_bytes", "read_text", "write_bytes", "write_text", "unlink", "rename", "mkdir", "rmdir"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str) -> Iterator[str]:
    """Every absolute module that a module imports, also inside functions; of ours with the package's name."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide where they point"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner.removeprefix(f"{PACKAGE}.") in MODULES else module


def ours(name: str) -> set[str]:
    return {found.removeprefix(PACKAGE).removeprefix(".") for found in imports(name) if found.split(".")[0] == PACKAGE}


def is_kit(name: str) -> bool:
    return name == "testing" or name.startswith("testing.")


def is_only_docstring(name: str) -> bool:
    return len(TREES[name].body) == 1 and ast.get_docstring(TREES[name]) is not None


PRODUCT = [name for name in MODULES if name != FACE and not is_kit(name) and not is_only_docstring(name)]


def test_every_module_has_its_layer() -> None:
    """The table of layers names every module of the package, and each once."""
    listed = [name for layer in LAYERS for name in layer]
    assert set(PRODUCT) <= set(listed)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("name", PRODUCT)
def test_imports_point_down(name: str) -> None:
    """A module imports from lower layers only: never from its own, from above, from the face or from the test kit."""
    level = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    wrong = {found for found in ours(name) if level.get(found, len(LAYERS)) >= level[name]}
    assert not wrong


def test_nothing_imports_in_a_circle() -> None:
    """The whole package, the test kit too, has an order in which it can be imported."""
    order = TopologicalSorter({name: ours(name) for name in MODULES}).static_order()
    assert set(order) == set(MODULES)


def test_the_face_imports_only_what_it_shows() -> None:
    """The package's ``__init__`` has a sorted ``__all__``, says where each name lives, and imports it from there.

    Everything else in it is what makes that lazy: importing the package imports nothing of ours.
    """
    body = TREES[FACE].body
    assert {ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)} == {
        "from __future__ import annotations",
        "import importlib",
        "from typing import TYPE_CHECKING",
    }
    assigned = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    assert set(assigned) == {"__all__", "_HOMES"}
    names, homes = ast.literal_eval(assigned["__all__"]), ast.literal_eval(assigned["_HOMES"])
    assert sorted(names) == list(homes)
    typed, lazy = (node for node in body if isinstance(node, ast.If))
    assert (ast.unparse(typed.test), ast.unparse(lazy.test)) == ("TYPE_CHECKING", "not TYPE_CHECKING")
    shown = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert len(shown) == len(typed.body)
    assert {(a.name, a.asname, node.module) for node in shown for a in node.names} == {
        (name, name, home) for name, home in homes.items()
    }
    defined = [node.name for node in (*lazy.body, *body) if isinstance(node, ast.FunctionDef)]
    assert defined == ["__getattr__", "__dir__"]


@pytest.mark.parametrize("name", [n for n in PRODUCT if not n.startswith("stores.")])
def test_only_stores_open_filesystems(name: str) -> None:
    """Outside ``stores/`` nobody imports a filesystem or a client of one, and nobody opens or changes a file."""
    clients = {found for found in imports(name) if found.split(".")[0] in CLIENTS}
    assert clients <= {"fsspec.callbacks"}
    assert not {"shutil", "tempfile"} & set(imports(name))
    calls = {ast.unparse(call.func) for call in ast.walk(TREES[name]) if isinstance(call, ast.Call)}
    assert not calls & FILE_CALLS
    assert not {call.rpartition(".")[2] for call in calls if "." in call} & FILE_METHODS


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_nothing_of_process_groups(name: str) -> None:
    """Records, plans and checksums need no torch.distributed, neither themselves nor by what they import of ours."""
    seen, todo = set(), {name}
    while todo:
        module = todo.pop()
        seen.add(module)
        todo |= ours(module) - seen
    found = {found for module in seen for found in imports(module) if found.startswith("torch.distributed")}
    assert not found


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_small_and_say_what_they_offer(name: str) -> None:
    """A module has at most 400 lines, a docstring, and an ``__all__`` of names that it has; none is called utils."""
    text = MODULES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(TREES[name])
    assert name.rpartition(".")[2] not in {"utils", "util", "helpers", "common", "misc"}
    if is_only_docstring(name):
        return
    listed = [
        ast.literal_eval(node.value)
        for node in TREES[name].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(listed) == 1
    assert len(set(listed[0])) == len(listed[0])


@pytest.mark.parametrize("name", MODULES)
def test_no_loose_ends(name: str) -> None:
    """No module leaves work for later, changes globals of its own, or swallows every exception in silence."""
    text = MODULES[name].read_text(encoding="utf-8")
    assert not [word for word in ("TODO", "FIXME") if word in text]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "NotImplementedError" not in ast.unparse(node.exc)
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.ExceptHandler) and ast.unparse(node.type or ast.Constant(None)) in (
            "None",
            "Exception",
            "BaseException",
        ):
            assert not all(isinstance(inner, ast.Pass) for inner in node.body)
