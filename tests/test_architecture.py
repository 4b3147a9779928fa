"""Rules of the design that a reader of one file cannot see: who may import whom, and what an import costs."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import exhume

ROOT = Path(exhume.__file__).parent
ABOVE = {  # the attacker's side of the firewall: these names, and every module of these packages
    "errors", "evidence", "checkpoints", "schema", "candidates", "functional", "dense", "linalg", "change", "spaces",
    "terms", "objective", "equations", "solvers", "moves", "attack", "presets", "published", "snapshot",
    "certificate", "regime", "algebra", "algebraic", "reconstruction", "survey", "joint", "batches", "descent",
    "assumptions", "cost", "hermite", "ambiguity", "smoothing", "heads", "multipliers", "inversion", "rows", "kkt",
    "lineage", "view", "lanczos", "optimisers", "clock", "nulls",
}  # fmt: skip
BELOW = {
    "matching", "metrics", "targets", "verdict", "report", "cli", "audit", "victims", "defences", "sweep", "demo",
    "inspection", "planted", "display", "duplicates", "truth", "__main__",
}  # fmt: skip
HEAVY = ("matplotlib", "torchmetrics", "sklearn", "skimage", "mlxtend", "pandas")


@cache
def sources():
    """Syntax tree of every module, by dotted name; a package has the name of its folder."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("exhume", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imported(name):
    """Modules of exhume that a module imports anywhere in its text, in functions and type checks as well."""
    modules, is_package = sources(), (ROOT / Path(*name.split(".")[1:]) / "__init__.py").exists()
    package = name if is_package else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {full if full in modules else base for full in inner}
    return {module for module in found if module in modules} - {name}


@cache
def reach(name):
    """Everything that importing a module's own imports leads to (the package's own front page aside)."""
    seen, todo = set(), [name]
    while todo:
        for module in imported(todo.pop()) - seen - {"exhume"}:
            seen.add(module)
            todo.append(module)
    return seen


def top(name):
    """The part of a dotted name that the design's list of files names."""
    return name.split(".")[1] if "." in name else name


def test_every_module_has_a_side():
    """A new file belongs to a side before it belongs to the package."""
    known = ABOVE | BELOW | {"exhume"}
    assert {top(name) for name in sources()} <= known
    assert not ABOVE & BELOW


def test_imports_are_acyclic():
    assert [name for name in sources() if name in reach(name)] == []


def test_no_module_of_the_attackers_side_imports_the_front_page():
    assert [name for name in sources() if top(name) in ABOVE and "exhume" in imported(name)] == []


def test_nothing_above_the_firewall_leads_below_it():
    """There is no import path by which an attack could stop, choose or tune on the truth."""
    leaks = {
        name: sorted(module for module in reach(name) if top(module) in BELOW)
        for name in sources()
        if top(name) in ABOVE
    }
    assert {name: modules for name, modules in leaks.items() if modules} == {}


def test_the_firewall_test_would_notice():
    """The walk does follow imports inside functions, and through packages."""
    assert "exhume.truth" in reach("exhume.targets") & reach("exhume.victims.victim")
    assert {"exhume.linalg", "exhume.errors"} <= reach("exhume.attack")


def test_equations_and_solvers_never_meet():
    for name in sources():
        if top(name) == "equations":
            assert not [module for module in reach(name) if top(module) in ("solvers", "moves", "attack")], (
                name
            )
        if top(name) == "solvers":
            allowed = {"solvers", "errors", "linalg"}
            assert {top(module) for module in reach(name)} <= allowed, name


def test_terms_and_spaces_know_no_equation_and_no_solver():
    for name in ("exhume.terms", "exhume.spaces", "exhume.linalg", "exhume.dense", "exhume.functional"):
        assert not [
            m for m in reach(name) if top(m) in ("equations", "solvers", "moves", "objective", "attack")
        ], name


def test_no_signature_takes_keywords_it_does_not_name():
    """Configuration is typed fields; a typo fails."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and node.args.kwarg is not None
    ]
    assert found == []


def test_configuration_is_frozen():
    """Every dataclass is immutable."""
    thawed = []
    for name, tree in sources().items():
        for node in ast.walk(tree):
            for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                call = mark.func if isinstance(mark, ast.Call) else mark
                if ast.unparse(call).split(".")[-1] != "dataclass":
                    continue
                options = (
                    {k.arg: ast.unparse(k.value) for k in mark.keywords} if isinstance(mark, ast.Call) else {}
                )
                if options.get("frozen") != "True":
                    thawed.append(f"{name}.{node.name}")
    assert thawed == []


def test_nothing_seeds_or_draws_from_the_global_generator():
    """Every draw names its generator; victims, which train, restore the state they use."""
    offenders = []
    for name, tree in sources().items():
        if top(name) == "victims":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            draws = called in {
                f"torch.{f}" for f in ("rand", "randn", "randint", "randperm", "normal", "bernoulli")
            }
            seeds = called in ("torch.manual_seed", "np.random.seed", "numpy.random.seed", "random.seed")
            if seeds or (draws and "generator" not in {k.arg for k in node.keywords}):
                offenders.append(f"{name}:{node.lineno}")
    assert offenders == []


def test_every_name_on_the_front_page_resolves():
    tree = sources()["exhume"]
    names = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(names) >= 7
    assert all(hasattr(exhume, name) for name in names)
    assert all(alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)


@pytest.mark.parametrize("name", [name for name in sources() if "__all__" in ast.unparse(sources()[name])])
def test_every_listed_name_exists(name):
    module = importlib.import_module(name)
    assert all(hasattr(module, listed) for listed in getattr(module, "__all__", ()))


def test_importing_exhume_is_cheap():
    """Pictures, metrics and data sets are imported when they are used."""
    code = f"import sys, exhume; print([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
