"""Names in a tree of Python files, resolved as an import would resolve them, without importing anything.

`Code` works on a mapping from path to bytes. It follows imports (relative, aliased, starred), finds members
of classes through their bases, and guesses the class of an expression from annotations. What depends on run
time (`__getattr__`, decorators that replace, dynamic bases) it does not see.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .fingerprint import DEFINITIONS, find

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WRAPPERS = {"Optional", "Annotated", "ClassVar", "Final", "type", "Type", "Union"}
DEEPEST = 24


@dataclass(frozen=True)
class Found:
    """A definition. `node` is a module, a class, a function or an assignment."""

    path: str
    module: str
    qualname: str
    node: ast.AST

    @property
    def target(self) -> str:
        """`module:Qualname`."""
        return f"{self.module}:{self.qualname}"


class Code:
    """The files of one version. Syntax trees are kept, so ask one object often; those of files that are the
    same in `like` are taken from there."""

    def __init__(self, files: Mapping[str, bytes], like: "Code | None" = None) -> None:
        self.files = files
        self._like = like
        self._trees: dict[str, ast.Module | None] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}
        self._stars: dict[str, list[str]] = {}
        self._members: dict[tuple[str, str, str], Found | None] = {}

    def source(self, found: "Found") -> list[str]:
        """The lines of a definition, decorators included; bytes that are not UTF-8 are replaced."""
        lines = self.files[found.path].decode("utf-8", "replace").split("\n")
        first = min(
            [getattr(found.node, "lineno", 1), *(d.lineno for d in getattr(found.node, "decorator_list", []))]
        )
        return lines[first - 1 : getattr(found.node, "end_lineno", len(lines))]

    def tree(self, path: str) -> ast.Module | None:
        """The syntax tree; None where there is no such file or this Python cannot parse it."""
        if path not in self._trees:
            data = self.files.get(path)
            try:
                if self._like is not None and data is not None and self._like.files.get(path) == data:
                    self._trees[path] = self._like.tree(path)
                else:
                    self._trees[path] = None if data is None else ast.parse(data)
            except (SyntaxError, ValueError):
                self._trees[path] = None
        return self._trees[path]

    def path_of(self, module: str) -> str | None:
        """The file of a module or package."""
        base = module.replace(".", "/")
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self.files), None)

    def resolve(self, module: str, qualname: str, depth: int = 0) -> Found | None:
        """The definition that `from module import qualname` would give; dots descend into classes."""
        path = self.path_of(module)
        tree = self.tree(path) if path else None
        if path is None or tree is None or depth > DEEPEST:
            return None
        if not qualname:
            return Found(path, module, "", tree)
        first, _, rest = qualname.partition(".")
        node = find(tree, first)
        found = Found(path, module, first, node) if node is not None else None
        if not isinstance(node, DEFINITIONS):  # an assignment may be the fallback of an import
            found = self._imported(path, module, first, depth) or found
        for name in rest.split(".") if rest else []:
            found = self.member(found, name) if found else None
        return found

    def own(self, module: str, qualname: str) -> Found | None:
        """Like `resolve`, but only what the module itself defines."""
        path = self.path_of(module)
        tree = self.tree(path) if path else None
        node = find(tree, qualname) if tree else None
        return Found(path, module, qualname, node) if path and node is not None else None

    def imports(self, path: str) -> dict[str, tuple[str, str]]:
        """Name -> (module, name in it or "") of every import in the module's own scope."""
        if path not in self._imports:
            names: dict[str, tuple[str, str]] = {}
            stars: list[str] = []
            tree = self.tree(path)
            for node in _statements(tree.body if tree else []):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        whole = alias.name if alias.asname else alias.name.partition(".")[0]
                        names[alias.asname or whole] = (whole, "")
                elif isinstance(node, ast.ImportFrom):
                    source = absolute(path, node)
                    for alias in node.names:
                        if alias.name == "*":
                            stars.append(source)
                        else:
                            names[alias.asname or alias.name] = (source, alias.name)
            self._imports[path], self._stars[path] = names, stars
        return self._imports[path]

    def _imported(self, path: str, module: str, name: str, depth: int) -> Found | None:
        target = self.imports(path).get(name)
        if target is not None and target != (module, name):
            return self.resolve(*target, depth + 1) or (
                self.resolve(f"{target[0]}.{target[1]}", "", depth + 1) if target[1] else None
            )
        for star in self._stars[path]:
            if found := self.resolve(star, name, depth + 1):
                return found
        return self.resolve(f"{module}.{name}", "", depth + 1) if path.endswith("/__init__.py") else None

    def bases(self, owner: Found) -> list[Found | None]:
        """The classes a class names as its bases; None for one that is not in these files."""
        if not isinstance(owner.node, ast.ClassDef):
            return []
        return [self.name(owner, base) for base in owner.node.bases]

    def lineage(self, owner: Found) -> Iterator[Found | None]:
        """The class and its bases, depth first; None stands for a base from elsewhere."""
        todo: list[Found | None] = [owner]
        seen = set()
        while todo:
            now = todo.pop(0)
            if now is None or now.target not in seen:
                yield now
            if now is not None and now.target not in seen:
                seen.add(now.target)
                todo = [*self.bases(now), *todo]

    def member(self, owner: Found, name: str) -> Found | None:
        """Attribute `name` of a module or class, also one that only a method assigns to `self`."""
        if isinstance(owner.node, ast.Module):
            return self.resolve(owner.module, name)
        key = (owner.module, owner.qualname, name)
        if key not in self._members:
            self._members[key] = None  # guards against a class that is its own base
            classes = [c for c in self.lineage(owner) if c and isinstance(c.node, ast.ClassDef)]
            self._members[key] = next((m for c in classes if (m := _own_member(c, name))), None)
        return self._members[key]

    def name(self, where: Found, node: ast.expr) -> Found | None:
        """What a dotted name (or the generic it is subscripted from) means at module level."""
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name):
            return self.resolve(where.module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.name(where, node.value)
            return self.member(owner, node.attr) if owner else None
        return None

    def annotated(self, where: Found, node: ast.expr | None) -> Found | None:
        """The first class an annotation names, seen through Optional, unions and quotes."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):
            return self.annotated(where, node.left) or self.annotated(where, node.right)
        if isinstance(node, ast.Subscript) and _last(node.value) in WRAPPERS:
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return next((c for i in inner if (c := self.annotated(where, i))), None)
        found = self.name(where, node) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else None
        return found if found and isinstance(found.node, ast.ClassDef) else None

    def class_of(self, member: Found) -> Found | None:
        """The class of a member's value: its annotation, what a property returns, what is assigned."""
        node = member.node
        if isinstance(node, ast.ClassDef):
            return member
        if isinstance(node, FUNCTIONS):
            return self.annotated(member, node.returns)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(member, node.annotation)
        if isinstance(node, ast.Assign):
            return self._assigned(member, node)
        return None

    def _assigned(self, member: Found, node: ast.Assign) -> Found | None:
        value = node.value
        if isinstance(value, ast.Call):
            called = (
                self.name(member, value.func) if isinstance(value.func, ast.Name | ast.Attribute) else None
            )
            return self.class_of(called) if called else None
        if isinstance(value, ast.Name):  # self.x = x, where a method's parameter x has an annotation
            tree = self.tree(member.path)
            owner = find(tree, member.qualname.rpartition(".")[0]) if tree else None
            for method in getattr(owner, "body", []):
                if isinstance(method, FUNCTIONS) and any(n is node for n in ast.walk(method)):
                    for arg in parameters(method):
                        if arg.arg == value.id:
                            return self.annotated(member, arg.annotation)
        return None

    @cached_property
    def definitions(self) -> dict[str, list[str]]:
        """Name of every class and function of every file -> the files that define it. Reads everything."""
        out: dict[str, list[str]] = {}
        pattern = re.compile(rb"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+(\w+)", re.M)
        for path in self.files:
            if path.endswith(".py"):
                for name in set(pattern.findall(self.files[path])):
                    out.setdefault(name.decode(), []).append(path)
        return out

    def elsewhere(self, qualname: str) -> Found | None:
        """A definition of `qualname` anywhere, if exactly one file has one."""
        first = qualname.partition(".")[0]
        hits = []
        for path in self.definitions.get(first, []):
            tree = self.tree(path)
            node = find(tree, qualname) if tree else None
            if isinstance(node, DEFINITIONS):
                hits.append(Found(path, module_of(path), qualname, node))
        return hits[0] if len(hits) == 1 else None


def module_of(path: str) -> str:
    """The module a file holds."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def absolute(path: str, node: ast.ImportFrom) -> str:
    """The module an import names, relative ones resolved against the file they stand in."""
    if not node.level:
        return node.module or ""
    package = module_of(path).split(".")
    if not path.endswith("/__init__.py"):
        package.pop()
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All named parameters in order, without * and **."""
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _own_member(owner: Found, name: str) -> Found | None:
    assert isinstance(owner.node, ast.ClassDef)
    qualname = f"{owner.qualname}.{name}"
    node = find(ast.Module(body=owner.node.body, type_ignores=[]), name)
    if node is not None:
        return Found(owner.path, owner.module, qualname, node)
    plain = None
    for method in owner.node.body:
        for node in ast.walk(method) if isinstance(method, FUNCTIONS) else ():
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            flat = [t for target in targets for t in getattr(target, "elts", [target])]
            for target in flat:
                if (
                    isinstance(target, ast.Attribute)
                    and target.attr == name
                    and _last(target.value) == "self"
                ):
                    found = Found(owner.path, owner.module, qualname, node)
                    if isinstance(node, ast.AnnAssign):
                        return found
                    plain = plain or found
    return plain


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if not isinstance(node, DEFINITIONS):
            for field in ("body", "handlers", "orelse", "finalbody"):
                inner = getattr(node, field, None) or []
                for child in inner:
                    yield from _statements(child.body if isinstance(child, ast.ExceptHandler) else [child])


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
