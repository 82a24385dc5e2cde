"""How authors write an operation: what its functions and names take and mean."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = ("kv", "group")  # `head` is shorthand for this pair


@dataclass(frozen=True)
class Parameter:
    """An argument of a function. `kind`: number, truth, any, entries, queries or width."""

    name: str
    kind: str = "number"
    optional: bool = False
    unit: str | None = None  # "tokens": a ratio or layers are refused


@dataclass(frozen=True)
class Function:
    """A function of the language.

    `rule` names how the checker types it; "derived" functions have a `body`. `axes` says whether
    brackets are "none", "required", "optional" (default `token`), "layer" or "token" (exactly that
    one). `unit` is the result's: "same" (arguments agree), "first", "none", "tokens".
    """

    name: str
    rule: str
    parameters: tuple[Parameter, ...]
    meaning: str
    cost: str = "O(size)"
    axes: str = "none"
    unit: str = "none"
    verb: str = "look"  # what it does over its axes, in messages
    result: str = ""  # type as shown in the reference
    body: str | None = None
    group: str = ""

    @property
    def only_axis(self) -> str | None:
        """The one axis that may stand in brackets; None: not just one."""
        return self.axes if self.axes in ("layer", "token") else None

    @property
    def signature(self) -> str:
        """As shown in messages and in the reference: `top[a](x, n)`."""
        arguments = ", ".join(f"{p.name}?" if p.optional else p.name for p in self.parameters)
        brackets = "" if self.axes == "none" else f"[{self.only_axis or 'a'}]"
        return f"{self.name}{brackets}({arguments})"


@dataclass(frozen=True)
class Builtin:
    """A name of the language.

    `where` says in which phases it exists: "always", "layer" (wherever a layer decides), "prompt"
    (from the prompt's arrival), "tensors" (prefill and decode), "prefill", "decode", "merge" or
    "share".
    """

    name: str
    op: str
    axes: tuple[str, ...]
    unit: str | None
    where: str
    meaning: str
    kind: str = "number"
    value: str | bool | None = None  # of the operation
    exact: bool = True
    unserved: bool = False  # the runtime does not serve it
