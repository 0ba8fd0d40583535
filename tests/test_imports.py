"""The tree is the architecture: imports point down, the core is pure, the package is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_diloco

pytestmark = pytest.mark.fast

SOURCE = Path(hf_diloco.__file__).parent

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "config": {"errors", "core"},
    "links": {"errors", "core", "config"},
    "syncer": {"errors", "core", "config", "links"},
    "learner": {"errors", "core", "config", "links"},
    "integrations": {"errors", "core", "config", "links", "learner"},
    "chaos": {"errors", "core", "config", "links", "syncer", "learner", "integrations"},
    "cli": {"errors", "core", "config", "links", "syncer", "learner", "integrations", "chaos"},
}
IMPURE = ("time", "threading", "os", "logging", "torch.distributed", "socket", "subprocess", "asyncio", "random")
MODULES = sorted(SOURCE.rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Full names of all that a module imports, also inside functions and for types only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    part = part_of(path)
    if part == "__init__":
        return  # names the homes of what is public
    assert part in MAY_IMPORT, f"{part} has no place in the order of the tree"
    # The version, and no more, may be taken from the package itself.
    ours = {name.split(".")[1] for name in imported_names(path) if name.startswith("hf_diloco.")} - {"__version__"}
    assert ours <= MAY_IMPORT[part] | {part}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if part_of(path) == "core"], ids=lambda path: str(path.relative_to(SOURCE))
)
def test_the_core_is_pure(path):
    impure = {name for name in imported_names(path) for no in IMPURE if name == no or name.startswith(no + ".")}
    assert not impure


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize("code", ["import hf_diloco", "import hf_diloco.config", "import hf_diloco.cli.main"])
def test_what_must_be_light_loads_neither_torch_nor_transformers(code):
    assert not loaded_by(code) & {"torch", "transformers", "accelerate", "datasets", "numpy"}


def test_the_guard_is_smaller_still():
    assert not loaded_by("import hf_diloco.cli.guard") & {"torch", "typer", "rich"}


def test_public_names_are_those_in_all():
    assert set(hf_diloco.__all__) == {*hf_diloco._HOMES, "__version__"}
    for name in hf_diloco.__all__:
        assert getattr(hf_diloco, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_diloco.no_such_name  # noqa: B018
