"""Which upstream symbols the overlay depends on, and how, read from its source files without importing them.

Seen: monkey-patch targets, base classes, overridden members, imports, calls (with their argument counts and
keywords) and attributes of objects whose class follows from an annotation, a constructor, a return type or
`self`. Not seen: names in strings, `getattr`, what arrives in `*args` or untyped parameters, elements of
containers, and what upstream calls on our objects. For those there is a declared file (`relies_on.toml`).
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from . import toml
from .errors import Exit, PatchsetError
from .modules import FUNCTIONS, Code, Found, absolute, parameters
from .snapshot import layers

UPSTREAM = "vllm/"
DECLARED = "relies_on.toml"
# Strongest first; it decides how closely a symbol is compared.
WAYS = ("monkey patch", "overridden", "declared", "subclassed", "called", "attribute", "imported")
DEEP = WAYS[:4]


@dataclass(frozen=True)
class Call:
    """The shape of one call: positional arguments, keywords, and whether * or ** hide more."""

    positional: int
    keywords: tuple[str, ...]
    starred: bool = False
    double: bool = False


@dataclass
class Need:
    """One upstream symbol, `module:Qualname` as the overlay names it. `fingerprint`: of a monkey patch."""

    target: str
    ways: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)
    reason: str = ""
    fingerprint: str = ""

    @property
    def kind(self) -> str:
        """The strongest way in which it is needed."""
        return min(self.ways, key=WAYS.index)

    @property
    def deep(self) -> bool:
        """Whether its code matters and not only its interface."""
        return self.kind in DEEP


def collect(
    overlay: Mapping[str, bytes], upstream: Mapping[str, bytes], package: str
) -> tuple[list[Need], list]:
    """(needs sorted by kind and name, "path:line expression" of what could not be found upstream).

    `overlay` holds the files of `package`, `upstream` those of the pinned version with the patches in,
    against which the overlay was written.
    """
    declared = toml.loads(overlay.get(f"{package}/{DECLARED}", b"").decode())
    reader = _Reader(Code(layers(overlay, upstream)), declared.get("names", {}))
    for path in sorted(overlay):
        if path.startswith(f"{package}/") and path.endswith(".py"):
            reader.file(path)
    for target, reason in declared.get("symbols", {}).items():
        need = reader.need(target.strip('"'), "declared", f"{package}/{DECLARED}")
        need.reason = reason
    for entry in monkey_patches(overlay.get(f"{package}/patching.py", b"")):
        need = reader.need(entry["target"], "monkey patch", f"{package}/patching.py")
        need.reason, need.fingerprint = entry.get("reason", ""), entry.get("fingerprint", "")
    order = sorted(reader.needs.values(), key=lambda n: (WAYS.index(n.kind), n.target))
    return order, sorted(reader.unresolved)


def monkey_patches(source: bytes) -> Iterator[dict[str, str]]:
    """The string arguments of every entry of the module-level tuple `PATCHES`."""
    for node in ast.parse(source).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(t, ast.Name) and t.id == "PATCHES" for t in targets):
            for call in getattr(node.value, "elts", []):  # type: ignore[attr-defined]
                constants = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
                yield {k: v for k, v in constants.items() if k and isinstance(v, str)}


def mismatch(call: Call, found: Found, code: Code) -> str:
    """Why `call` does not fit the signature of a function or class, or ""."""
    node, skip = found.node, 0
    if isinstance(node, ast.ClassDef):
        init = code.member(found, "__init__")
        if init is None or not isinstance(init.node, FUNCTIONS):
            return _misfit_fields(call, fields(found, code)) if init is None else ""
        node, skip = init.node, 1
    elif isinstance(node, FUNCTIONS):
        marks = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
        skip = int("." in found.qualname and "staticmethod" not in marks)
    else:
        return ""
    places = [a.arg for a in [*node.args.posonlyargs, *node.args.args]][skip:]
    return _misfit(call, places, _required(node)[skip:], [a.arg for a in node.args.kwonlyargs], node)


def fields(found: Found, code: Code) -> list[str]:
    """The fields of a dataclass or NamedTuple, bases first, required ones without a mark and others with "="."""
    out: dict[str, str] = {}
    for owner in reversed([c for c in code.lineage(found) if c]):
        for node in getattr(owner.node, "body", []):
            named = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            if named and "ClassVar" not in ast.unparse(node.annotation):
                out[node.target.id] = node.target.id + ("=" if node.value else "")
    return list(out.values())


def _required(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[bool]:
    places = [*node.args.posonlyargs, *node.args.args]
    return [i < len(places) - len(node.args.defaults) for i in range(len(places))]


def _misfit(
    call: Call,
    places: list[str],
    required: list[bool],
    only: list[str],
    node: ast.FunctionDef | ast.AsyncFunctionDef,
) -> str:
    if call.positional > len(places) and not node.args.vararg:
        return f"takes {len(places)} positional arguments, we pass {call.positional}"
    unknown = [k for k in call.keywords if k not in places and k not in only]
    if unknown and not node.args.kwarg:
        return f"has no argument {', '.join(unknown)}"
    missing = [p for i, p in enumerate(places) if required[i] and i >= call.positional]
    missing += [a for a, default in zip(only, node.args.kw_defaults) if default is None]
    missing = [m for m in missing if m not in call.keywords]
    if missing and not (call.starred or call.double):
        return f"wants {', '.join(missing)}, which we do not pass"
    return ""


def _misfit_fields(call: Call, names: list[str]) -> str:
    bare = [n.rstrip("=") for n in names]
    unknown = [k for k in call.keywords if k not in bare]
    if unknown and bare:
        return f"has no field {', '.join(unknown)}"
    missing = [n for n in names[call.positional :] if not n.endswith("=") and n not in call.keywords]
    return f"wants {', '.join(missing)}" if missing and not (call.starred or call.double) else ""


@dataclass
class _Scope:
    """What names mean inside one function: `names` were imported, `values` are instances of a class.
    Keys of `values` are names and dotted names."""

    module: Found
    owner: Found | None = None
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, Found] = field(default_factory=dict)

    def inner(self, owner: Found | None = None) -> "_Scope":
        return _Scope(self.module, owner or self.owner, dict(self.names), dict(self.values))


class _Reader:
    def __init__(self, code: Code, names: Mapping[str, str]) -> None:
        self.code = code
        self.needs: dict[str, Need] = {}
        self.unresolved: set[str] = set()
        self._declared: dict[str, Found] = {}
        for name, target in names.items():
            module, _, qualname = target.partition(":")
            found = code.resolve(module, qualname)
            if found is None or not isinstance(found.node, ast.ClassDef):
                raise PatchsetError(
                    Exit.PATCH, f"{DECLARED}: {name} = {target!r} is no class", "correct the file"
                )
            self._declared[name] = found

    def need(self, target: str, way: str, use: str) -> Need:
        need = self.needs.setdefault(target, Need(target))
        need.ways.add(way)
        need.uses.add(use)
        return need

    def file(self, path: str) -> None:
        tree = self.code.tree(path)
        if tree is None:
            raise SyntaxError(f"{path} cannot be parsed")
        module = self.code.resolve(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), "")
        assert module is not None
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = absolute(path, node)
                for alias in node.names:
                    if self._is_upstream(self.code.resolve(source, alias.name)) or source.startswith("vllm."):
                        self.need(f"{source}:{alias.name}", "imported", f"{path}:{node.lineno}")
        self._body(tree.body, _Scope(module))

    @staticmethod
    def _is_upstream(found: Found | None) -> bool:
        return found is not None and found.path.startswith(UPSTREAM)

    def _body(self, body: list[ast.stmt], scope: _Scope) -> None:
        for node in body:
            self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        if isinstance(node, FUNCTIONS):
            self._function(node, scope)
            return
        if isinstance(node, ast.ClassDef):
            self._class(node, scope)
            return
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                scope.names[alias.asname or alias.name] = (absolute(scope.module.path, node), alias.name)
        blocks = {"body", "orelse", "finalbody", "handlers", "cases"}
        for name, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST) and name not in blocks and name != "annotation":
                    self._expression(part, scope)
        self._bind(node, scope)
        inner = scope
        if isinstance(node, ast.If) and (narrowed := self._isinstance(node.test, scope)):
            inner = scope.inner()
            inner.values.update([narrowed])
        self._body(getattr(node, "body", []), inner)
        for handler in getattr(node, "handlers", []):
            self._body(handler.body, scope)
        self._body(getattr(node, "orelse", []), scope)
        self._body(getattr(node, "finalbody", []), scope)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: _Scope) -> None:
        inner = scope.inner()
        for expression in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self._expression(expression, scope)
        for arg in parameters(node):
            inner.values.pop(arg.arg, None)
            found = self._annotation(arg.annotation, inner) or self._declared.get(arg.arg)
            if found:
                inner.values[arg.arg] = found
        first = next(iter(node.args.args), None)
        if scope.owner is not None and first is not None and first.arg in ("self", "cls"):
            inner.values[first.arg] = scope.owner
        self._body(node.body, inner)

    def _class(self, node: ast.ClassDef, scope: _Scope) -> None:
        path, module = scope.module.path, scope.module.module
        prefix = f"{scope.owner.qualname}." if scope.owner else ""
        owner = Found(path, module, prefix + node.name, node)
        for base in node.bases:
            self._expression(base, scope)
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self._callee(plain, scope)
            if found is not None and self._is_upstream(found):
                self.need(self._named(plain, found, scope), "subclassed", f"{path}:{node.lineno}")
        for child in node.body:
            for name in _defined(child):
                member = self._overridden(owner, name)
                if member is not None:
                    self.need(member.target, "overridden", f"{path}:{child.lineno}")
        self._body(node.body, scope.inner(owner))

    def _overridden(self, owner: Found, name: str) -> Found | None:
        """The upstream member that a definition in a class of ours hides."""
        for base in list(self.code.lineage(owner))[1:]:
            if base is not None and self._is_upstream(base):
                return self.code.member(base, name)
        return None

    def _bind(self, node: ast.stmt, scope: _Scope) -> None:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts)
                else:
                    pairs.append((target, node.value))
        elif isinstance(node, ast.AnnAssign):
            found = self._annotation(node.annotation, scope)
            if found:
                scope.values[ast.unparse(node.target)] = found
        elif isinstance(node, ast.Assert) and (narrowed := self._isinstance(node.test, scope)):
            scope.values.update([narrowed])
        for target, value in pairs:
            if isinstance(target, ast.Name | ast.Attribute):
                found = self._infer(value, scope)
                if found:
                    scope.values[ast.unparse(target)] = found
                elif isinstance(target, ast.Name):
                    scope.values.pop(target.id, None)

    def _isinstance(self, test: ast.expr, scope: _Scope) -> tuple[str, Found] | None:
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance":
            found = self._callee(test.args[1], scope) if len(test.args) == 2 else None
            if found and isinstance(found.node, ast.ClassDef):
                return ast.unparse(test.args[0]), found
        return None

    def _expression(self, node: ast.AST, scope: _Scope) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute):
                self._attribute(child, scope)
            elif isinstance(child, ast.Call):
                self._call(child, scope)

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        owner = self._infer(node.value, scope)
        if owner is None or isinstance(owner.node, FUNCTIONS):
            return
        member = self.code.member(owner, node.attr)
        where = f"{scope.module.path}:{node.lineno}"
        if self._is_upstream(member):
            assert member is not None
            self.need(member.target, "attribute", where)
        elif member is None and isinstance(owner.node, ast.ClassDef):
            lineage = list(self.code.lineage(owner))
            dynamic = any(
                isinstance(c.node, ast.ClassDef) and self.code.member(c, "__getattr__") for c in lineage if c
            )
            if all(lineage) and any(map(self._is_upstream, lineage)) and not dynamic:
                self.unresolved.add(f"{where} {ast.unparse(node)}")

    def _call(self, node: ast.Call, scope: _Scope) -> None:
        func, arguments, hidden = node.func, node.args, False
        if isinstance(func, ast.Name) and func.id == "partial" and arguments:
            func, arguments, hidden = arguments[0], arguments[1:], True
        found = self._callee(func, scope)
        if not self._is_upstream(found) or found is None:
            return
        call = Call(
            sum(not isinstance(a, ast.Starred) for a in arguments),
            tuple(sorted(k.arg for k in node.keywords if k.arg)),
            hidden or any(isinstance(a, ast.Starred) for a in arguments),
            hidden or any(k.arg is None for k in node.keywords),
        )
        if isinstance(found.node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            need = self.need(self._named(func, found, scope), "called", f"{scope.module.path}:{node.lineno}")
            need.calls.add(call)

    def _callee(self, func: ast.expr, scope: _Scope) -> Found | None:
        """The function or class an expression names; None for an instance."""
        if isinstance(func, ast.Name):
            return None if func.id in scope.values else self._name(func.id, scope)
        if isinstance(func, ast.Attribute):
            if _is_super(func.value) and scope.owner is not None:
                bases = [b for b in self.code.bases(scope.owner) if b]
                return next((m for b in bases if (m := self.code.member(b, func.attr))), None)
            owner = self._infer(func.value, scope)
            found = self.code.member(owner, func.attr) if owner else None
            return found if found and not isinstance(found.node, ast.Assign | ast.AnnAssign) else None
        return None

    def _name(self, name: str, scope: _Scope) -> Found | None:
        if name in scope.names:
            module, inner = scope.names[name]
            return self.code.resolve(module, inner) or self.code.resolve(f"{module}.{inner}", "")
        return self.code.resolve(scope.module.module, name)

    def _named(self, func: ast.expr, found: Found, scope: _Scope) -> str:
        """The symbol under the name by which the overlay imports it, else where it is defined."""
        if isinstance(func, ast.Name):
            imported = scope.names.get(func.id) or self.code.imports(scope.module.path).get(func.id)
            if imported and imported[1] and imported[0].split(".")[0] == UPSTREAM.rstrip("/"):
                return f"{imported[0]}:{imported[1]}"
        return found.target

    def _annotation(self, node: ast.expr | None, scope: _Scope) -> Found | None:
        for name in ast.walk(node) if node is not None else ():
            if isinstance(name, ast.Name) and name.id in scope.names:
                found = self._name(name.id, scope)
                if found and isinstance(found.node, ast.ClassDef):
                    return found
        return self.code.annotated(scope.module, node)

    def _infer(self, node: ast.expr, scope: _Scope) -> Found | None:
        """The class of an expression's value; the class, module or function itself where it names one."""
        if isinstance(node, ast.Name | ast.Attribute) and (known := scope.values.get(ast.unparse(node))):
            return known
        if isinstance(node, ast.Name):
            found = self._name(node.id, scope)
            return self.code.class_of(found) if found and _is_value(found) else found
        if isinstance(node, ast.Attribute):
            owner = self._infer(node.value, scope)
            member = self.code.member(owner, node.attr) if owner else None
            if member is None or isinstance(member.node, ast.ClassDef | ast.Module):
                return member
            if isinstance(member.node, FUNCTIONS) and not _is_property(member.node):
                return None
            return self.code.class_of(member)
        if isinstance(node, ast.Call):
            called = self._callee(node.func, scope)
            if called is None or isinstance(called.node, ast.ClassDef):
                return called
            return self.code.class_of(called) if isinstance(called.node, FUNCTIONS) else None
        if isinstance(node, ast.IfExp):
            return self._infer(node.body, scope) or self._infer(node.orelse, scope)
        return None


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, FUNCTIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).endswith("property") for d in node.decorator_list)


def _is_value(found: Found) -> bool:
    return isinstance(found.node, ast.Assign | ast.AnnAssign)
