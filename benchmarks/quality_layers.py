"""Layers after which ASL lets tokens leave, by prompt: why it keeps what FastKV may lose."""

from __future__ import annotations

from collections import Counter

import report
from kvpolicy.dsl.syntax.library import POLICIES
from kvpolicy.evaluation.questions import catalog
from kvpolicy.evaluation.reporting.summary_text import percent
from kvpolicy.evaluation.serving import Server, serve
from quality_parts.orderings import LOOSER, WIDE
from quality_parts.runs import Run, fixed

Layers = dict[tuple[str, str, float], Counter]
"""By policy, task and budget: how many prompts selected at each layer; None: at none."""


def chosen_layers(run: Run, tau: float, kernel: int, count: int) -> Layers:
    """Layers that ASL chooses for the first `count` samples of each task, at all budgets of a run.

    Raises:
        ServerFailed: the server does not start.
    """
    path = POLICIES / "asl.yaml"
    given = [setting.partition(".")[2] for setting in fixed("asl")]
    wide = [*given, f"kernel={kernel}"]
    more = {"asl": given, WIDE: wide, LOOSER: [*wide, f"tau={tau:g}"]}
    names = {(policy, b): f"{policy}@{b:g}" for policy in more for b in run.budgets}
    settings = [
        f"{name}.{each}"
        for (policy, budget), name in names.items()
        for each in (*more[policy], f"capacity={int(budget * run.length)}")
    ]
    found: Layers = {}
    with serve(run.model, [f"{name}={path}" for name in names.values()], settings) as server:
        for task in run.tasks:
            texts = [_prompt(task, run, index) for index in range(count)]
            for (policy, budget), name in names.items():
                selected = Counter(_selected(server, text, name) for text in texts)
                found[policy, task, budget] = selected
    return found


def _prompt(task: str, run: Run, index: int) -> str:
    sample = catalog.sample(
        task, form="embedded", length=run.length, index=index, seed=run.seed, count=_words
    )
    return sample.context + sample.turns[0].prompt


def _words(text: str) -> int:
    """Number of tokens for an embedded model: one per word, and <s>."""
    return 1 + len(text.split())


def _selected(server: Server, text: str, name: str) -> int | None:
    """The layer chosen for one prompt; None if none."""
    facts = server.generate(text=text, policy=name, max_new_tokens=2)["meta_info"]["kv_policy"]
    return facts.get("selected_layer")


def table(layers: Layers) -> str:
    """Table: a row per policy and task, a column per budget; cells count prompts by layer."""
    budgets = sorted({budget for *_, budget in layers}, reverse=True)
    rows = [
        [policy, task, *(_cell(layers[policy, task, budget]) for budget in budgets)]
        for policy, task in sorted({key[:2] for key in layers})
    ]
    return report.table(["policy", "task", *map(percent, budgets)], rows)


def _cell(counts: Counter) -> str:
    ordered = sorted(counts, key=lambda layer: (layer is None, layer))
    said = (f"{'none' if layer is None else layer}: {counts[layer]}" for layer in ordered)
    return ", ".join(said)
