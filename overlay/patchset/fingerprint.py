"""Fingerprints of upstream symbols, read from source files without importing them.

A symbol is named `package.module:Qualname` (a function, a class, a method, a nested one, or a constant). Its
fingerprint is the hash of its syntax tree without docstrings, positions and comments, and the same on every
supported Python. `root` is always the folder that holds the top-level package.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SKIPPED = ("type_comment", "kind", "type_params")  # not the same on every Python, or not code


class SymbolGone(LookupError):
    """The module or the name in it does not exist; `args[0]` says which."""


@dataclass(frozen=True)
class Symbol:
    """A symbol as found. `signature` is normalised too (arguments and bases), `hash` covers everything."""

    target: str
    path: str
    line: int
    hash: str
    signature: str
    source: str


def module_file(root: Path, module: str) -> Path:
    """The file of `module` below `root`. Raises SymbolGone."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise SymbolGone(f"no module {module}")


def fingerprint(root: Path, target: str) -> str:
    """Hex fingerprint of `target`. Raises SymbolGone, or SyntaxError where the file does not parse."""
    return read(root, target).hash


def read(root: Path, target: str) -> Symbol:
    """Everything about `target`. Raises SymbolGone, or SyntaxError where the file does not parse."""
    module, _, qualname = target.partition(":")
    path = module_file(root, module)
    text = path.read_bytes().decode("utf-8")
    node = find(ast.parse(text), qualname)
    if node is None:
        raise SymbolGone(f"{module} has no {qualname}")
    return Symbol(
        target=target,
        path=path.relative_to(root).as_posix(),
        line=getattr(node, "lineno", 1),
        hash=digest(node),
        signature=signature(node),
        source=ast.get_source_segment(text, node) or text,
    )


def find(tree: ast.Module, qualname: str) -> ast.AST | None:
    """The last definition of `qualname`, as an import would see it; the module itself for an empty name.

    Looks through `if`, `try` and `with`, and through functions written `outer.<locals>.inner` or
    `outer.inner`.
    """
    node: ast.AST = tree
    for name in qualname.replace(".<locals>.", ".").split(".") if qualname else []:
        found = [child for child in _children(node) if name in _names(child)]
        if not found:
            return None
        node = found[-1]
    return node


def symbols(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """(qualname, node) of every function and class of a module, methods included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
        for child in _children(node):
            if isinstance(child, DEFINITIONS):
                yield prefix + child.name, child
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, f"{prefix}{child.name}.")

    return walk(tree, "")


def digest(node: ast.AST) -> str:
    """The hash of a normalised node, 40 hex digits."""
    return hashlib.sha256(normalise(node).encode()).hexdigest()[:40]


def signature(node: ast.AST) -> str:
    """Arguments and return of a function, bases and metaclass of a class, "" for anything else."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(ast.unparse(b) for b in [*node.bases, *(k.value for k in node.keywords)])})"
    return ""


def normalise(node: object) -> str:
    """A dump that does not depend on the Python version: empty fields left out, docstrings dropped."""
    if isinstance(node, ast.Constant):
        return f"Constant({type(node.value).__name__}:{node.value!r})"
    if isinstance(node, ast.AST):
        parts = []
        for field in node._fields:
            value = getattr(node, field, None)
            if field == "body" and isinstance(node, (*DEFINITIONS, ast.Module)):
                value = _without_docstring(value)
            if (
                field in SKIPPED
                or value is None
                or value == []
                or isinstance(value, ast.Load | ast.Store | ast.Del)
            ):
                continue
            parts.append(f"{field}={normalise(value)}")
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(map(normalise, node))}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt] | None) -> list[ast.stmt]:
    body = list(body or [])
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(first, ast.Constant) and isinstance(first.value, str) else body


def _children(node: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, field, None) or []:
            if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _children(child)
            elif isinstance(child, ast.stmt):
                yield child


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, DEFINITIONS):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [t.id for t in targets if isinstance(t, ast.Name)]
