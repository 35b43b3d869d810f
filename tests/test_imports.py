"""Who may import whom (docs/design: the house), and what help and planning must never import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "jax_titan"
LEAVES = {"ops", "parallel", "mpmd", "data", "observability"}
ALLOWED = {
    **{leaf: set() for leaf in LEAVES},
    "models": {"ops", "parallel"},
    "planning": {"mpmd.schedule", "observability.flops"},
    "trainer": {"config", "models", *LEAVES},
    # What counts as a corpus is the data room's to say, what a mesh is made of that of `parallel`.
    "config": {"data.corpus", "data.errors", "parallel.mesh"},
    "__main__": {"cli"},
    "cli": {"config", "trainer", "planning", *LEAVES},
}
EXCEPTIONS = {"observability.report": {"mpmd.schedule"}}
EMPTY = ["__init__.py", "mpmd/__init__.py", "observability/__init__.py"]


def _imports(path: Path):
    """Modules of the package that a file imports, at any level of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("jax_titan"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "jax_titan":
                yield from (f"jax_titan.{alias.name}" for alias in node.names)
            elif node.module and node.module.startswith("jax_titan."):
                yield node.module


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_the_design_allows(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    room = module.split(".")[0]
    for imported in _imports(path):
        target = imported.removeprefix("jax_titan").removeprefix(".")
        if target.split(".")[0] == room or not target:
            continue
        allowed = ALLOWED[room] | EXCEPTIONS.get(module, set())
        assert any(target == a or target.startswith(a + ".") for a in allowed), f"{module} imports {target}"


def test_the_rule_sees_real_imports():
    assert sum(len(list(_imports(path))) for path in FILES) > 30


@pytest.mark.parametrize("name", EMPTY)
def test_these_inits_import_nothing(name):
    assert not list(ast.walk(ast.parse((PACKAGE / name).read_text())))[1:]


def _loaded(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join(m.split('.')[0] for m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import jax_titan.cli, jax_titan.config",
        "import jax_titan.mpmd.schedule",
        "import jax_titan.observability.summarize, jax_titan.observability.console",
        "import jax_titan.data.store, jax_titan.data.text",
    ],
)
def test_these_modules_import_no_jax(code):
    assert not {"jax", "jaxlib", "grain", "orbax"} & _loaded(code)


def test_only_one_file_names_the_private_module():
    naming = [path.name for path in FILES if "_sdy_mpmd" in path.read_text()]
    assert naming == ["_jaxlib.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_private_of_jax_is_imported(path):
    text = path.read_text()
    assert "jax._src" not in text
    if path.name != "_jaxlib.py":
        assert "import jaxlib" not in text
        assert "from jaxlib" not in text
