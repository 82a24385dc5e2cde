"""Reads the files of examples/deploy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
MANIFESTS = tuple(sorted((DEPLOY / "kubernetes").glob("*.yaml")))
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
REPLICAS = ("server-0", "server-1")


def load(name: str) -> Any:
    """A YAML file of the example."""
    return yaml.safe_load((DEPLOY / name).read_text())


def objects(kind: str | None = None) -> list[dict[str, Any]]:
    """Kubernetes objects, of one kind or all."""
    found = [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text()) if each]
    return [each for each in found if kind in (None, each["kind"])]


def one(kind: str, name: str) -> dict[str, Any]:
    """The Kubernetes object of a kind and name."""
    [found] = [each for each in objects(kind) if each["metadata"]["name"] == name]
    return found


def words(command: list[str]) -> list[str]:
    """Arguments of a container; a variable is replaced by its default, or else by its name."""
    text = "\n".join(command)
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)
    return re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}|\$\((\w+)\)", r"\1\2", text).split("\n")


def value(command: list[str], option: str) -> str:
    """The value of an option that is given once, as `--option=value`."""
    [found] = [word for word in command if word.startswith(f"--{option}=")]
    return found.partition("=")[2]


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Folder in the container of a compose service -> what is mounted there."""
    parts = [volume.split(":") for volume in service["volumes"]]
    return {inside: outside for outside, inside, *_ in parts}


def on_disk(path: str, service: dict[str, Any]) -> Path:
    """The file of this repository that a compose service sees at a path."""
    for inside, outside in mounts(service).items():
        if path.startswith(inside + "/") and outside.startswith("."):
            return (DEPLOY / outside / path.removeprefix(inside + "/")).resolve()
    raise AssertionError(f"nothing is mounted at {path}")


def rules(kind: str) -> list[dict[str, Any]]:
    """Rules of a kind: `alert` or `record`."""
    found = [rule for group in load("rules.yaml")["groups"] for rule in group["rules"]]
    return [rule for rule in found if kind in rule]


def panels() -> list[dict[str, Any]]:
    """Panels of the dashboard, rows included."""
    return json.loads(DASHBOARD.read_text())["panels"]


def queries() -> Iterator[tuple[str, str]]:
    """(Panel title, query) of every query of the dashboard."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def variables() -> dict[str, dict[str, Any]]:
    """Variables of the dashboard, by name."""
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return {each["name"]: each for each in listed}
