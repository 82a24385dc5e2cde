// The report: the reader's choices, and the parts that are drawn again when they change.
"use strict";

const TURNS = { all: 0, first: 1, later: 2 };

class Page {
  constructor(data) {
    this.data = data;
    this.length = -1; // index into data.lengths; -1: all
    this.styleOf = new Map(); // policy in colour -> number of its style
    this.sorting = { turns: { column: null, down: true } }; // view of a table -> its sorting
    const full = data.series.findIndex((series) => series.policy === null);
    this.full = full < 0 ? null : full;
    const shares = data.series.map((series) => series.budget).filter((share) => share !== null);
    this.budgets = [...new Set(shares)].sort((a, b) => b - a);
    this.rows = new Map();
    for (const row of data.rows) {
      const [series, task, length, turns, answered, asked, score, difference, kept, held, bytes,
        ttft, tpot, output, inFull] = row;
      this.rows.set([series, task, length, turns].join(), { series, answered, asked, score,
        difference, kept, held, bytes, ttft, tpot, output, inFull });
    }
    data.chosen.forEach((policy) => this.choose(policy));
  }

  // The row of a series and task (-1: all) at the chosen length.
  row(series, task, turns = TURNS.all) {
    return this.rows.get([series, task, this.length, turns].join());
  }

  // The series on the front, and those of them to name.
  front(cost, task) {
    const [best, named] = this.data.fronts[cost][`${task},${this.length}`] || [[], []];
    return { best, named };
  }

  tasks() { return this.data.tasks.length > 1 ? [-1, ...this.data.tasks.keys()] : [0]; }

  taskName(task) { return task < 0 ? "all tasks" : this.data.tasks[task].name; }

  taskTitle(task) {
    return task < 0 ? "mean over tasks and lengths, each with the same weight" : this.data.tasks[task].title;
  }

  // Draws a policy in colour, with the first free style.
  choose(policy) {
    const used = new Set(this.styleOf.values());
    this.styleOf.set(policy, this.data.styles.findIndex((_, i) => !used.has(i)));
  }

  // Whether a series has a budget, or has none, as full KV.
  hasBudget(series, budget) {
    const own = this.data.series[series].budget;
    return own === null || String(own) === budget;
  }

  isChosen(series) {
    const { policy } = this.data.series[series];
    return policy === null || this.styleOf.has(policy);
  }
}

function fillSelect(select, pairs, value) {
  select.replaceChildren(...pairs.map(([key, text]) => element("option", { value: key, textContent: text })));
  select.value = String(value);
}

function drawPolicies(page) {
  const chips = page.data.policies.map(({ name, about }, policy) => {
    const look = looks(page, policy);
    const box = element("input", { type: "checkbox", checked: look.chosen });
    box.addEventListener("change", () => {
      if (box.checked) page.choose(policy); else page.styleOf.delete(policy);
      drawAll(page);
      byId("policies").children[policy].children[0].focus();
    });
    return element("label", { title: about }, box, sample(look, look.chosen ? 4 : 2), name);
  });
  byId("policies").replaceChildren(...chips);
}

function drawTable(page) {
  const task = Number(byId("table-task").value), view = byId("view").value;
  const budget = byId("table-budget").value;
  const series = [...page.data.series.keys()].filter((i) =>
    (byId("table-policies").value === "all" || page.isChosen(i))
    && (budget === "all" || page.hasBudget(i, budget)));
  const made = view === "figures" ? figureTable(page, series.map((i) => page.row(i, task)))
    : taskTable(page, series, view === "scores" ? scoreCell : differenceCell);
  byId("table-task").parentNode.hidden = view !== "figures";
  byId("summary-about").textContent = (view === "figures" ? `${page.taskTitle(task)}. ` : "")
    + `Scores in percent with 95 % intervals; n = a/b: only a of b questions have an answer. `
    + `${page.data.samples} samples per task and length`
    + `${page.data.few ? ": few, so the intervals are wide" : ""}.`;
  page.sorting[view] ??= { column: null, down: true };
  sortable(byId("table"), made, page.sorting[view]);
}

// Fills a table, and fills it again after a click; the clicked button keeps the focus.
function sortable(table, made, sorting) {
  fillTable(table, made, sorting, (column) => {
    sortable(table, made, sorting);
    table.children[0].children[0].children[column].children[0].focus();
  });
}

function drawTurns(page) {
  byId("turns").hidden = page.data.conversations.length === 0;
  byId("turns-tasks").replaceChildren(...page.data.conversations.map((task) =>
    element("li", { textContent: `${page.taskName(task)}: ${page.taskTitle(task)}` })));
  sortable(byId("turns-table"), turnTable(page, [...page.data.series.keys()]), page.sorting.turns);
}

// Makes a place for the chart of each task.
function makePanels(page) {
  byId("accuracy-panels").replaceChildren(...page.tasks().map((task) => element("figure", {},
    element("figcaption", {}, task < 0 ? "All tasks" : `${page.taskName(task)}: ${page.taskTitle(task)}`),
    element("div", { className: "chart", role: "group" }))));
}

function drawAccuracy(page) {
  page.tasks().forEach((task, i) => {
    const place = byId("accuracy-panels").children[i].children[1];
    place.setAttribute("aria-label", accuracyAbout(page, task));
    showChart(place, (width) => accuracyChart(page, task, width));
  });
}

function drawPareto(page) {
  const cost = byId("cost").value, task = Number(byId("pareto-task").value);
  byId("pareto").hidden = !cost;
  if (!cost) return;
  byId("pareto-panel").setAttribute("aria-label", `Score against ${COSTS[cost].short}`);
  showChart(byId("pareto-panel"), (width) => paretoChart(page, cost, task, width));
}

function drawNeedle(page) {
  const needle = page.data.needles[Number(byId("needle-task").value)];
  byId("needle").hidden = !needle;
  if (!needle) return;
  const budget = byId("needle-budget").value;
  const shown = Object.keys(needle.score).map(Number).filter((i) =>
    page.hasBudget(i, budget) && (page.isChosen(i) || page.styleOf.size === 0));
  byId("needle-panels").replaceChildren(...shown.map((i) => needleChart(page, needle, i)));
}

// Draws the map of the chosen prompt, policy and budget; offers only those that have maps.
function drawKept(page) {
  const { prompts, shown, left_out: leftOut } = page.data.maps;
  byId("kept").hidden = shown.length === 0;
  if (shown.length === 0) return;
  const prompt = Number(byId("kept-prompt").value);
  const own = shown.filter((entry) => entry[0] === prompt);
  const policies = [...new Set(own.map((entry) => page.data.series[entry[1]].policy))];
  const policyKey = keep(byId("kept-policy"), policies.map((p) =>
    [String(p), p === null ? "full KV" : page.data.policies[p].name]));
  const budgets = own.filter((entry) => String(page.data.series[entry[1]].policy) === policyKey);
  const chosen = keep(byId("kept-budget"), budgets.map((entry) =>
    [String(page.data.series[entry[1]].budget), percent(page.data.series[entry[1]].budget)]));
  const entry = budgets.find((e) => String(page.data.series[e[1]].budget) === chosen);
  const { tokens, asked } = prompts[prompt], series = page.data.series[entry[1]];
  byId("kept-about").textContent = (leftOut ? `${leftOut} more maps are in kept.jsonl. ` : "")
    + (series.setting ? `Set for it: ${series.setting}.` : "");
  const place = element("div");
  byId("kept-map").replaceChildren(place);
  drawKeptMap(place, { tokens, layers: entry[2], kv_heads: entry[3], bits: entry[4],
    title: series.name, asked });
}

// Offers other options and keeps the chosen one if it is among them; returns the choice.
function keep(select, pairs) {
  const value = pairs.some(([key]) => key === select.value) ? select.value : pairs[0][0];
  fillSelect(select, pairs, value);
  return value;
}

function drawAll(page) {
  drawPolicies(page);
  drawTable(page);
  drawAccuracy(page);
  drawPareto(page);
  drawNeedle(page);
  drawTurns(page);
}

function fillSelects(page) {
  const { data } = page, tasks = page.tasks().map((task) => [task, page.taskName(task)]);
  const lengths = data.lengths.map((length, i) => [i, `of ${length} tokens`]);
  fillSelect(byId("length"), lengths.length > 1 ? [[-1, "of all lengths"], ...lengths]
    : [[-1, `of ${data.lengths[0]} tokens`]], -1);
  fillSelect(byId("table-task"), tasks, tasks[0][0]);
  fillSelect(byId("pareto-task"), tasks, tasks[0][0]);
  const budgets = page.budgets.map((share) => [share, percent(share)]);
  fillSelect(byId("table-budget"), [["all", "all shares"], ...budgets], "all");
  fillSelect(byId("needle-budget"), budgets, data.telling);
  fillSelect(byId("cost"), Object.keys(data.fronts).map((cost) => [cost, COSTS[cost].short]),
    Object.keys(data.fronts)[0] || "");
  fillSelect(byId("needle-task"), data.needles.map((n, i) => [i, page.taskName(n.task)]), 0);
  fillSelect(byId("kept-prompt"), data.maps.prompts.map((p, i) =>
    [i, `${page.taskName(p.task)}, ${p.length} tokens, sample ${p.index}`]), 0);
}

function start() {
  const page = new Page(pageData());
  fillSelects(page);
  const on = (id, draw) => byId(id).addEventListener("change", () => draw(page));
  for (const id of ["view", "table-task", "table-policies", "table-budget"]) on(id, drawTable);
  for (const id of ["cost", "pareto-task"]) on(id, drawPareto);
  for (const id of ["needle-task", "needle-budget"]) on(id, drawNeedle);
  for (const id of ["kept-prompt", "kept-policy", "kept-budget"]) on(id, drawKept);
  byId("length").addEventListener("change", () => {
    page.length = Number(byId("length").value);
    drawAll(page);
  });
  byId("bars").addEventListener("change", () => {
    byId("accuracy-panels").className = byId("bars").checked ? "panels all-bars" : "panels";
  });
  const choices = { best: page.data.chosen, every: [...page.data.policies.keys()], none: [] };
  for (const [id, policies] of Object.entries(choices)) {
    byId(id).addEventListener("click", () => {
      page.styleOf.clear();
      policies.forEach((policy) => page.choose(policy));
      drawAll(page);
    });
  }
  byId("needle-scale").append(Plot.legend({ color: SHADES, label: "score, %", width: 200 }));
  makePanels(page);
  drawAll(page);
  drawKept(page);
  for (const id of ["pareto", "needle", "turns", "kept"]) byId(`to-${id}`).hidden = byId(id).hidden;
}

start();
