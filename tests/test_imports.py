"""Who may know whom, and what stays light: the layers of `mini_vllm/`, read from its source.

cli, commands, explain, benchmark   ->   api   ->   engine   ->   worker   ->   model   ->   cache, kernels
beside them, knowing nobody above: tokenizer, store, config, sampling_params, outputs, errors
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mini_vllm

PACKAGE = Path(mini_vllm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part of the package may import, besides itself. A new part needs a line here.
LEAVES = {"errors", "config", "outputs", "sampling_params", "structured_outputs", "json_text"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "json_text": set(),
    "outputs": {"errors"},
    "config": {"errors"},
    "structured_outputs": {"errors", "json_text"},
    "sampling_params": {"errors", "structured_outputs"},
    "store": {"errors", "config"},
    "tokenizer": {"errors", "store", "json_text"},
    "cache": {"errors"},
    "kernels": {"errors", "store"},
    "model": {"cache", "kernels", "store", *LEAVES},
    "worker": {"model", "cache", "kernels", "store", "engine.scheduled_batch", "engine.sequence_table", *LEAVES},
    "engine": {"worker", "model", "cache", "tokenizer", "store", *LEAVES},
    "api": {"engine", "tokenizer", "store", *LEAVES},
    "naive_generate": {"model", "tokenizer", "store", *LEAVES},
    "explain": {"engine", "cache", *LEAVES},
    "benchmark": {"api", "engine", "worker", "model", "cache", "naive_generate", "tokenizer", "store", *LEAVES},
    "commands": {
        *("api", "explain", "benchmark", "naive_generate", "engine", "tokenizer", "store", *LEAVES),
        *("worker", "model", "kernels"),  # `doctor` says what they would do on this machine
    },
    "cli": {"commands", *LEAVES},
    "__main__": {"cli"},
    "__init__": {"engine", *LEAVES},
}
# These are only the entrance: they may be run, and imported by nobody but those named.
ENTRANCES = {"api": {"commands", "benchmark"}, "cli": {"__main__"}, "commands": {"cli"}, "__main__": set()}

USES_TORCH = ("worker.", "model.", "kernels.", "benchmark.", "naive_generate", "cache.kv_cache", "engine.startup")


def module_name(file: Path) -> str:
    """`engine.scheduler`, `config`, `tokenizer` (a package), `__init__` (the package itself)."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(file): file for file in FILES}


@cache
def syntax_tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in a file, also inside functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("mini_vllm.") in MODULES else str(node.module)


def own_imports(name: str) -> Iterator[str]:
    """The modules of this package that a module imports, without the package's name."""
    for imported in imports_of(syntax_tree(MODULES[name])):
        if imported.startswith("mini_vllm."):
            yield imported.removeprefix("mini_vllm.")
        elif imported == "mini_vllm":
            yield "__init__"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_layer_may_know(name: str) -> None:
    part = name.split(".")[0]
    assert part in ALLOWED, f"{part} is a new part of the package: say in ALLOWED what it may import"
    for imported in own_imports(name):
        target = imported.split(".")[0]
        assert target == part or target in ALLOWED[part] or imported in ALLOWED[part], f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_nobody_imports_an_entrance(name: str) -> None:
    part = name.split(".")[0]
    for imported in own_imports(name):
        target = imported.split(".")[0]
        assert target == part or part in ENTRANCES.get(target, {part}), f"{name} imports {imported}"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports at the top of files, those for types alone left out, form no circle."""
    edges: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        top = ast.Module(
            [node for node in syntax_tree(file).body if isinstance(node, ast.Import | ast.ImportFrom)], type_ignores=[]
        )
        edges[name] = {one.removeprefix("mini_vllm.") for one in imports_of(top) if one.startswith("mini_vllm.")}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in edges.get(name, ()):
                visit(other, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


# ---- light paths -----------------------------------------------------------------------------------------------------

LIGHT_MODULES = [
    "mini_vllm" if name == "__init__" else f"mini_vllm.{name}"
    for name in MODULES
    if not f"{name}.".startswith(USES_TORCH) and not name.endswith("__main__")
]


def test_bookkeeping_tokenizer_store_and_command_line_load_no_torch() -> None:
    """Imports them one after the other in a fresh process; the first one that brings torch in is named."""
    script = (
        "import importlib, sys\n"
        f"for name in {LIGHT_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "",
        "config",
        "sampling_params",
        "cache.block_manager",
        "cache.prefix_cache",
        "engine.scheduler",
        "tokenizer.tokenizer",
    ],
)
def test_the_light_paths_are_really_among_those_that_are_tried(name: str) -> None:
    assert f"mini_vllm.{name}".removesuffix(".") in LIGHT_MODULES


# The optional backend for models that are not native, which is imported late and by nobody else.
TRANSFORMERS_BACKEND = {"model.hf_attention", "model.hf_backend", "model.hf_dry_run", "model.hf_rope"}


@pytest.mark.parametrize("name", sorted(set(MODULES) - TRANSFORMERS_BACKEND))
def test_no_module_needs_the_transformers_library(name: str) -> None:
    """It is the oracle of the tests; an engine that leans on its oracle proves nothing."""
    assert not [one for one in imports_of(syntax_tree(MODULES[name])) if one.split(".")[0] == "transformers"]
    at_the_top = {
        f"{node.module}".removeprefix("mini_vllm.")
        for node in syntax_tree(MODULES[name]).body
        if isinstance(node, ast.ImportFrom)
    }
    assert not at_the_top & TRANSFORMERS_BACKEND


# ---- no mutable state at module level --------------------------------------------------------------------------------

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "deque",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "WeakValueDictionary",
}
MUTATING_METHODS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"),
    *("sort", "reverse", "update"),
}
CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*|__all__")


def mutable_names(tree: ast.Module) -> Iterator[str]:
    """Names bound at module level to something that can be changed."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        called = value.func if isinstance(value, ast.Call) else None
        call_name = getattr(called, "id", getattr(called, "attr", None))
        if isinstance(value, MUTABLE_DISPLAYS) or call_name in MUTABLE_CALLS:
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def changed_names(tree: ast.AST) -> Iterator[str]:
    """Names whose items are assigned or deleted, or on which a changing method is called."""
    for node in ast.walk(tree):
        is_item = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        is_method = isinstance(node, ast.Attribute) and node.attr in MUTATING_METHODS
        if (is_item or is_method) and isinstance(node.value, ast.Name):
            yield node.value.id


@pytest.mark.parametrize("name", MODULES)
def test_module_level_collections_are_constants(name: str) -> None:
    tree = syntax_tree(MODULES[name])
    collections = set(mutable_names(tree))
    assert not [one for one in collections if not CONSTANT.fullmatch(one)]
    assert not collections & set(changed_names(tree)), "a constant is changed"
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)], "a global statement"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_and_what_it_is_in_vllm(name: str) -> None:
    text = ast.get_docstring(syntax_tree(MODULES[name])) or ""
    assert "In vLLM:" in text or MODULES[name].stat().st_size == 0
