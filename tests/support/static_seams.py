"""Check seams against the sources of a package, without importing it.

A version that cannot run here (another torch, an NPU runtime) can still be read: where a seam's module is a
file, its attribute a definition in it, and the definition has the parameters or fields that the seam names.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from kvpp_vllm.seams import Seam

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_IMPORTS = 8


class NotInSourceError(Exception):
    """A module, name or base class that the sources do not define."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Source trees by what holds their packages, searched in order: directories, or opened archives."""

    roots: tuple[Traversable, ...]

    def problem(self, seam: Seam) -> str | None:
        """What is wrong with `seam` in these sources, in the words of `check_seams`; None if nothing is."""
        try:
            module, found = self.find(seam.module, seam.attribute)
        except NotInSourceError as error:
            return f"is missing ({error})"
        if seam.parameters is not None:
            if not isinstance(found, FUNCTIONS):
                return "is no function"
            actual = _parameters(found)
            if actual != seam.parameters:
                return f"takes ({', '.join(actual)}); expected ({', '.join(seam.parameters)})"
        if seam.fields:
            if not isinstance(found, ast.ClassDef):
                return "is no class"
            known = self._fields(module, found)
            if missing := [name for name in seam.fields if name not in known]:
                return f"has no field {missing[0]!r}"
        return None

    def find(self, module: str, attribute: str) -> tuple[str, ast.stmt]:
        """The module and the definition that `attribute` of `module` comes to, imports and bases followed.

        Raises NotInSourceError.
        """
        first, *rest = attribute.split(".")
        module, found = self._top_level(module, first, MAX_IMPORTS)
        for name in rest:
            if not isinstance(found, ast.ClassDef):
                raise NotInSourceError(f"{module} has no class {first}")
            module, found = self._member(module, found, name)
        return module, found

    def _tree(self, module: str) -> tuple[bool, ast.Module]:
        """Whether `module` is a package, and its syntax tree."""
        place = module.replace(".", "/")
        for root in self.roots:
            for name in (f"{place}/__init__.py", f"{place}.py"):
                if (path := root.joinpath(name)).is_file():
                    return name.endswith("/__init__.py"), ast.parse(path.read_text(encoding="utf-8"))
        raise NotInSourceError(f"no file for module {module}")

    def _top_level(self, module: str, name: str, left: int) -> tuple[str, ast.stmt]:
        package, tree = self._tree(module)
        imported = None
        for node in _statements(tree.body):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        imported = (_source(module, package, node), alias.name)
        if imported is None or left == 0:
            raise NotInSourceError(f"{module} does not define {name}")
        return self._top_level(*imported, left - 1)

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.stmt]:
        for node in _statements(owner.body):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
                return module, node
        for base_module, base in self._bases(module, owner):
            try:
                return self._member(base_module, base, name)
            except NotInSourceError:
                continue
        raise NotInSourceError(f"{module}.{owner.name} has no {name}")

    def _bases(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Base classes that the sources define; those of other packages are left out."""
        for base in owner.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(expression, ast.Name):
                continue
            try:
                found_in, found = self._top_level(module, expression.id, MAX_IMPORTS)
            except NotInSourceError:
                continue
            if isinstance(found, ast.ClassDef):
                yield found_in, found

    def _fields(self, module: str, owner: ast.ClassDef) -> set[str]:
        """Annotated and assigned names, methods and properties of a class and its bases, `self.x = ...` too."""
        known: set[str] = set()
        for node in ast.walk(owner):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    known.add(name)
                case ast.FunctionDef(name=name):
                    known.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    known.add(name)
        for base_module, base in self._bases(module, owner):
            known |= self._fields(base_module, base)
        return known


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _source(module: str, package: bool, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _parameters(function: ast.stmt) -> tuple[str, ...]:
    assert isinstance(function, FUNCTIONS)
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [arguments.vararg.arg] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [arguments.kwarg.arg] if arguments.kwarg else []
    return tuple(name for name in names if name != "self")
