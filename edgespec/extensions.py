"""Find what plug-ins add: objects that installed packages name as entry points of edgespec's groups.

A plug-in is a package whose metadata has an entry point in one of ``GROUPS``: its name is the name that people type,
its value ``module:object``.  The plug-ins in ``edgespec/plugins`` are listed in ``plugins/entry_points.txt`` too, so
that they are found in a checkout without metadata.  Nothing is read before a table is first looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Generic, TypeVar

from edgespec.errors import InvalidRequest, first_line

DRAFTERS = "edgespec.drafters"
ACCEPTANCE = "edgespec.acceptance_rules"
ARCHITECTURES = "edgespec.architectures"
QUANTIZERS = "edgespec.quantizers"
OUTPUTS = "edgespec.outputs"
SERVER_APIS = "edgespec.server_apis"
GROUPS = (DRAFTERS, ACCEPTANCE, ARCHITECTURES, QUANTIZERS, OUTPUTS, SERVER_APIS)
OWN = Path(__file__).parent / "plugins" / "entry_points.txt"

T = TypeVar("T")


@dataclass(frozen=True)
class Plugin:
    """An entry point."""

    name: str
    value: str  # module:object
    package: str  # the distribution that has it

    def load(self) -> object:
        """Import its module and return its object.

        Raises:
            Exception: any exception of the import.
        """
        module, _, attribute = self.value.partition(":")
        found: object = import_module(module.strip())
        for part in attribute.strip().split("."):
            found = getattr(found, part)
        return found


def listed(file: Path) -> dict[str, dict[str, str]]:
    """Read a file of entry points: {group: {name: ``module:object``}}, all of ``GROUPS``.

    Args:
        file: as ``entry_points.txt`` of a package's metadata; one that is not there has none.
    """
    parser = ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names as they are written
    parser.read(file, "utf-8")
    return {group: dict(parser.items(group)) if parser.has_section(group) else {} for group in GROUPS}


@cache
def _plugins() -> dict[str, dict[str, Plugin]]:
    """Read the entry points of all groups: edgespec's own first, then those of other packages by name."""
    from importlib.metadata import entry_points

    own = listed(OWN)
    found = {group: {name: Plugin(name, own[group][name], "edgespec") for name in own[group]} for group in GROUPS}
    for group in GROUPS:
        others = [Plugin(one.name, one.value, one.dist.name if one.dist else "?") for one in entry_points(group=group)]
        for plugin in sorted(others, key=lambda one: one.package):
            found[group].setdefault(plugin.name, plugin)  # a plug-in never replaces an existing one
    return found


def plugins(group: str) -> Mapping[str, Plugin]:
    """List the entry points of a group by name; no plug-in is imported.

    Args:
        group: one of ``GROUPS``.
    """
    return _plugins()[group]


def refresh() -> None:
    """Search plug-ins again, for example after a package was installed."""
    _plugins.cache_clear()


class Table(Mapping[str, T], Generic[T]):
    """Names and their objects: edgespec's own entries, then those of plug-ins, which are imported at the first look.

    A plug-in that cannot be imported, or is not what the group needs, has no entry; ``refused`` says why.

    Args:
        group: one of ``GROUPS``.
        own: edgespec's own entries, which nothing replaces.
        check: whether an object is what the group needs.
    """

    def __init__(self, group: str, own: dict[str, T], check: Callable[[object], bool]) -> None:
        self.group, self.own = group, own
        self._check = check
        self._lock = RLock()
        self._seen: object = None  # the entry points that were loaded
        self._plugins: dict[str, T] = {}
        self._failed: dict[str, str] = {}

    def _all(self) -> dict[str, T]:
        with self._lock:
            known = _plugins()
            if self._seen is not known:
                self._seen, self._failed, self._plugins = known, {}, {}  # while they load, there are none
                loaded = {name: made for name, plugin in known[self.group].items() if (made := self._load(plugin))}
                self._plugins = loaded
            return {**self.own, **self._plugins, **self.own}

    def _load(self, plugin: Plugin) -> T | None:
        try:
            made = plugin.load()
        except Exception as error:  # a module of another package may raise anything
            self._failed[plugin.name] = f"package {plugin.package} cannot be imported: {first_line(error)}"
            return None
        if not self._check(made):
            self._failed[plugin.name] = f"package {plugin.package} has no entry for {self.group} at {plugin.value}"
            return None
        return made  # type: ignore[return-value]  # it was checked

    def __getitem__(self, name: str) -> T:
        return self.own[name] if name in self.own else self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def refused(self, what: str, name: str) -> InvalidRequest:
        """Make the error of a name that the table has not; it names the group of entry points.

        Args:
            what: of what it is a name, as in method.
            name: as it was given.
        """
        self._all()
        if why := self._failed.get(name):
            return InvalidRequest(f"{what} {name!r}: {why}", "install it again, or remove it")
        from difflib import get_close_matches

        near = get_close_matches(name, self, 1)
        meant = f"did you mean {near[0]!r}? " if near else f"there are: {', '.join(self)}; "
        return InvalidRequest(
            f"unknown {what} {name!r}", f"{meant}others come with packages that have an entry point in {self.group}"
        )
