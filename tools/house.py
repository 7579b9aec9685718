"""Print how large and how entangled the package is; fail where that grew.

`python -m tools.house` prints the lines of each room, the longest function, circles of imports, public class names with
more than one meaning, the modules that `--version`, `plan` and `run` import, and the files that a decoded token passes.
With `--check` it exits with 1 where one of `LIMITS` is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from localllm.offload.planner.profile import FormatRates, Profile, keep, machine_key

ROOT = Path(__file__).parent.parent
PACKAGE = "localllm"
LIMITS = {
    "longest function": 56,
    "functions over 60 lines": 0,
    "circles of imports": 0,
    "repeated class names": 0,
    "modules of --version": 19,
    "modules of plan": 120,
}

# Runs a command; prints the modules that it imported and, where it is watched, the files that a step's calls are in.
_WATCH = """
import json, os, sys, threading
steps, running, end = [], {}, os._exit
def watch(frame, event, _):
    code, thread = frame.f_code, threading.get_ident()
    if "/localllm/" not in code.co_filename: return
    is_step = code.co_qualname == "StepLoop.step"
    if event == "call" and is_step: running[thread] = set()
    if event == "call" and thread in running: running[thread].add(code.co_filename.rpartition("/localllm/")[2])
    if event == "return" and is_step: steps.append(running.pop(thread))
def report(code):
    ours = [name for name in sys.modules if name.split(".")[0] == "localllm"]
    token = sorted(steps[len(steps) // 2]) if steps else []
    sys.stderr.write(json.dumps({"modules": len(ours), "torch": "torch" in sys.modules, "token": token}) + chr(10))
    sys.stderr.flush()
    end(code)
os._exit = report
if sys.argv[1] == "watched": threading.setprofile(watch)
from localllm.cli import main
sys.argv = ["localllm", *sys.argv[2:]]
try: main()
except SystemExit as ended: report(ended.code or 0)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the limits, and print nothing else")
    check = parser.parse_args().check
    trees = {path: ast.parse(path.read_text("utf-8")) for path in python_files(PACKAGE)}
    functions, circles, repeated = longest_functions(trees), import_circles(trees), repeated_classes(trees)
    with tempfile.TemporaryDirectory() as home:
        know_machine(home)
        version, plan = watched(home, "--version"), watched(home, "plan", "tiny", "--device", "cpu")
        run = None if check else watched(home, *_RUN, watches=True)
    figures = {
        "longest function": functions[0][0],
        "functions over 60 lines": sum(lines > 60 for lines, _ in functions),
        "circles of imports": len(circles),
        "repeated class names": len(repeated),
        "modules of --version": version["modules"],
        "modules of plan": plan["modules"] + 1000 * plan["torch"],
    }
    if check:
        return compare(figures)
    print_rooms()
    print(f"\nlongest functions: {', '.join(f'{name} {lines}' for lines, name in functions[:8])}")
    print(*(f"circle: {' '.join(circle)}" for circle in circles), sep="\n")
    print(*(f"class {name}: {', '.join(places)}" for name, places in sorted(repeated.items())), sep="\n")
    for name, figure in figures.items():
        print(f"{figure:6} {name}")
    if run:
        print(f"{run['modules']:6} modules of run")
        print(f"{len(run['token']):6} files that a token passes: {' '.join(run['token'])}")
    return 0


_RUN = ("run", "tiny", "-p", "A fox", "--weights", "int4", "--speculate", "off", "--max-tokens", "24", "--private",
        "--no-attach", "--device", "cpu")  # fmt: skip


def compare(figures: dict[str, int]) -> int:
    """Print each figure that is not its limit; return the exit code: 1 where one has grown."""
    for name, figure in figures.items():
        if figure != LIMITS[name]:
            advice = "see `python -m tools.house`" if figure > LIMITS[name] else "lower the limit in tools/house.py"
            print(f"{name}: {figure}, the limit is {LIMITS[name]}: {advice}", file=sys.stderr)
    return int(any(figure > LIMITS[name] for name, figure in figures.items()))


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def print_rooms() -> None:
    """Print lines and files of each folder of the package, and of tests, benchmarks and tools as wholes."""
    lines: dict[str, list[int]] = defaultdict(list)
    for path in python_files(PACKAGE):
        lines[str(path.parent.relative_to(ROOT))].append(_lines(path))
    for room, counts in sorted(lines.items()):
        print(f"{sum(counts):6} {len(counts):4}  {room}")
    for whole in (PACKAGE, "tests", "benchmarks", "tools"):
        print(f"{sum(map(_lines, python_files(whole))):6} {len(python_files(whole)):4}  {whole} in all")


def _lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def longest_functions(trees: dict[Path, ast.Module]) -> list[tuple[int, str]]:
    """Return (lines, name) of every function, the longest first."""
    return sorted(
        (
            ((node.end_lineno or 0) - node.lineno + 1, f"{module_of(path)}.{node.name}")
            for path, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        reverse=True,
    )


def repeated_classes(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Return the public classes of which there are several by one name, with their modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module_of(path))
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def import_circles(trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Return the sets of modules that import each other, deferred and type-only imports counted."""
    modules = {module_of(path) for path in trees}
    graph = {module_of(path): set(_imports(tree, modules)) - {module_of(path)} for path, tree in trees.items()}
    return [sorted(part) for part in _strongly_connected(graph) if len(part) > 1]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inside if name in modules)
            if node.module in modules and not all(name in modules for name in inside):
                yield node.module


def _strongly_connected(graph: dict[str, set[str]]) -> Iterable[list[str]]:
    """Yield the strongly connected parts: two modules are in one if each reaches the other."""
    reached = {module: _reachable(graph, module) for module in graph}
    done: set[str] = set()
    for module in sorted(graph):
        if module not in done:
            part = [other for other in reached[module] if module in reached[other]] or [module]
            done.update(part)
            yield part


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - found:
            found.add(module)
            waiting.append(module)
    return found


def know_machine(home: str) -> None:
    """Save rates of this machine, so that a plan has nothing to measure."""
    os.environ["LOCALLLM_CACHE"] = home
    keep(Profile(machine_key(), 40.0, 1.5, {"bf16": FormatRates(30.0, 900.0)}))


def watched(home: str, *command: str, watches: bool = False) -> dict[str, Any]:
    """Run a command in a process of its own; return its modules, whether torch is one, and the files of a token."""
    environment = {**os.environ, "LOCALLLM_HOME": home, "LOCALLLM_CACHE": home, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", _WATCH, "watched" if watches else "counted", *command]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=home, check=True)
    result: dict[str, Any] = json.loads(run.stderr.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
