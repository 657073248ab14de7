"""Imports go one way, every module is in the table of them, and importing does not touch a GPU."""

from __future__ import annotations

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import lightning_cudagraph
from tests.sources import FILES, ROOT, tree

DOCS = Path(__file__).parents[1] / "docs"
# From the bottom up. A file may import from its own floor and from those before it.
FLOORS = [
    "errors",
    "compat",
    "tensors",
    "device",
    "processes",
    "checks",
    "capture",
    "timing",
    "optim",
    "graphed_step",
    "trainer",
    "__init__",
]
KNOW_LIGHTNING = ("compat", "trainer", "__init__")
TENSORBOARD = "timing/sinks/tensorboard/"
PACKAGE = "lightning_cudagraph"
MOST_NAMES = 12
MOST_ARGUMENTS = 7
GPU = Path(__file__).parent / "gpu"


def _module(path: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {_module(path): path for path in FILES}


def _imports(path: Path) -> list[str]:
    """The modules that a file imports; `from package import module` imports both."""
    found: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [node.module, *(member for member in members if member in MODULES)]
    return [f"{PACKAGE}.__init__" if module == PACKAGE else module for module in found]


def test_imports_go_one_way() -> None:
    for path in FILES:
        relative = path.relative_to(ROOT)
        room = relative.parts[0].removesuffix(".py")
        for module in _imports(path):
            parts = module.split(".")
            if parts[0] == PACKAGE:
                assert FLOORS.index(parts[1]) <= FLOORS.index(room), f"{relative} imports {module}"
            is_lightning = parts[0] in ("lightning", "lightning_utilities", "torchmetrics")
            if room not in KNOW_LIGHTNING and not str(relative).startswith(TENSORBOARD):
                assert not is_lightning, f"{relative} imports {module}"
            if parts[0] == "tensorboard":
                assert str(relative).startswith(TENSORBOARD), f"{relative} imports {module}"


def test_imports_make_no_circle() -> None:
    """Nor do those inside of functions, which Python would let pass."""
    imports = {module: {*_imports(path)} & {*MODULES} for module, path in MODULES.items()}
    assert sum(map(len, imports.values())) > 1000
    TopologicalSorter(imports).prepare()


def _folders() -> list[Path]:
    return sorted({path.parent for path in FILES})


def _names(folder: Path) -> list[str]:
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    return files + [path.name for path in _folders() if path.parent == folder]


def test_the_picture_shows_every_folder() -> None:
    house = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    picture = house.partition("```\nlightning_cudagraph/\n")[2].partition("```")[0]
    shown = {word.rstrip("/") for word in picture.split() if word.endswith("/")}
    top = [line.split()[0].rstrip("/") for line in picture.splitlines() if re.match(r"  \w", line)]
    assert shown >= {folder.name for folder in _folders() if folder not in (ROOT, ROOT / TENSORBOARD)}
    assert top == [name + ".py" * (ROOT / f"{name}.py").exists() for name in reversed(FLOORS[:-1])]


def _defined(path: Path) -> set[str]:
    """The constants, functions `name()`, classes and methods `Name.method` that a file defines."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            found.add(f"{node.name}()")
        elif isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name, *(f"{node.name}.{method}" for method in methods)}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _named_in(page: str) -> tuple[set[str], list[tuple[str, tuple[str, ...]]]]:
    """The paths that the page names, and each name with the paths on either side of it.

    A name belongs to the last path before it or the first one after it, in its paragraph or list item.
    """
    paths: set[str] = set()
    names: list[tuple[str, tuple[str, ...]]] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", (DOCS / page).read_text()):
        quoted = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", block)]
        at = [index for index, code in enumerate(quoted) if re.fullmatch(r"[\w/]+(?:\.py|/)", code)]
        paths |= {quoted[index] for index in at}
        for index, code in enumerate(quoted):
            if re.fullmatch(r"\w+\(\)|[A-Z]\w+(?:\.\w+)?", code):
                before, after = [i for i in at if i < index][-1:], [i for i in at if i > index][:1]
                names.append((code, tuple(quoted[i] for i in before + after)))
    return paths, names


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_a_page_names_what_there_is(page: str) -> None:
    paths, names = _named_in(page)
    assert len(paths) > 20
    assert len(names) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]
    defined = {path: _defined(ROOT / path) for path in paths if path.endswith(".py")}
    assert not [
        (name, beside)
        for name, beside in names
        if not any(name in defined.get(path, ()) for path in beside)
    ]


def test_a_folder_has_a_dozen_names() -> None:
    names = {folder: _names(folder) for folder in _folders()}
    assert {folder: found for folder, found in names.items() if len(found) > MOST_NAMES} == {}


def _arguments_of(cls: ast.ClassDef) -> list[str]:
    """Arguments of a constructor; of a dataclass, its own fields without a default."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return [arg.arg for arg in (*node.args.args[1:], *node.args.kwonlyargs)]
    if "dataclass" not in "".join(map(ast.unparse, cls.decorator_list)):
        return []
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and node.value is None]
    return [ast.unparse(field.target) for field in fields]


def test_constructors_take_few_arguments() -> None:
    """The state of a run, and that of an engine, is one object each (`capture/context.py`)."""
    public = vars(lightning_cudagraph)
    classes = [node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    taken = {cls.name: _arguments_of(cls) for cls in classes if cls.name not in public}
    assert sum(map(bool, taken.values())) > 100
    assert {name: args for name, args in taken.items() if len(args) > MOST_ARGUMENTS} == {}


def test_a_file_says_what_it_is_about() -> None:
    assert [path for path in FILES if not ast.get_docstring(tree(path))] == []


def test_no_file_is_out_of_proportion() -> None:
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    files = [root / name for name in listed.stdout.decode().split("\0") if name]
    assert [file.name for file in files if file.exists() and file.stat().st_size > 500_000] == []


def test_the_version_is_cited() -> None:
    citation = (Path(__file__).parents[1] / "CITATION.cff").read_text()
    assert f"\nversion: {lightning_cudagraph.__version__}\n" in citation


def _fixtures(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return [
        f.name for f in functions if any("pytest.fixture" in ast.unparse(d) for d in f.decorator_list)
    ]


def test_fixtures_come_along_to_the_gpu() -> None:
    """`tests/gpu` imports the shared tests with a star, which leaves names with an underscore behind."""
    tests = Path(__file__).parent
    shared = [path for path in sorted(tests.glob("test_*.py")) if (tests / "gpu" / path.name).exists()]
    assert any(_fixtures(path) for path in shared)
    assert not [(path.name, name) for path in shared for name in _fixtures(path) if name.startswith("_")]


def test_tests_for_a_gpu_import_what_there_is() -> None:
    """They run on other machines than these, where a name that is gone would be found late."""
    for path in sorted((Path(__file__).parent / "gpu").rglob("test_*.py")):
        relative = path.relative_to(Path(__file__).parents[1]).with_suffix("")
        import_module(".".join(relative.parts))
