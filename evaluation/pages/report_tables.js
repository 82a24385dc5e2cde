// The tables of the report, sorted by a click on a column's name.
"use strict";

const UNKNOWN = "-";
const percent = (share) => (share === null ? UNKNOWN : `${Number((100 * share).toPrecision(3))} %`);
// A share in percent, rounded to 1 / `parts` points, half away from zero as in summary.md.
const rounded = (share, parts = 1) => Math.sign(share)
  * Math.round(Math.abs(Number((100 * parts * share).toPrecision(4)))) / parts;
const number = (value) => (value === null ? UNKNOWN : String(Number(value.toPrecision(3))));

function scoreText(row) {
  if (!row.score) return row.answered < row.asked ? `n = ${row.answered}/${row.asked}` : UNKNOWN;
  const missing = row.answered < row.asked ? ` n = ${row.answered}/${row.asked}` : "";
  const [mean, low, high] = row.score.map((share) => rounded(share));
  return `${mean} (${low} to ${high})${missing}`;
}

// Whole points; tenths near zero, so that an interval beside zero does not seem to touch it.
function points(share) {
  const value = rounded(share) || rounded(share, 10);
  return value > 0 ? `+${value}` : `${value}`;
}

function differenceText(row) {
  if (!row.difference) return UNKNOWN;
  const [mean, low, high] = row.difference.map(points);
  return `${mean} (${low} to ${high})`;
}

function bytesText(count) {
  if (count === null) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (count >= 1024 && unit < 3) { count /= 1024; unit += 1; }
  return `${Number(count.toPrecision(3))} ${units[unit]}`;
}

const milliseconds = (spread) => (spread
  ? `${number(1000 * spread[0])} (${number(1000 * spread[1])} to ${number(1000 * spread[2])})` : UNKNOWN);

// A cell: its text, its sorting key (null comes last), and its class.
const cell = (text, key, kind = "") => ({ text, key, kind });
const scoreCell = (row) => cell(scoreText(row), row.score && row.score[0],
  row.answered < row.asked ? "missing" : "");
const differenceCell = (row) => cell(differenceText(row), row.difference && row.difference[0],
  row.difference && (row.difference[1] > 0 || row.difference[2] < 0) ? "sure" : "");

function nameCells(page, row) {
  const series = page.data.series[row.series];
  const name = series.policy === null ? "full KV" : page.data.policies[series.policy].name;
  return [cell(name, name, "text"), cell(percent(series.budget), series.budget)];
}

const NAMES = [["policy", "text", "the policy"], ["asked", "", "share of the prompt's entries asked for"]];

// Columns [name, class, title] and rows of cells with all figures of a task.
function figureTable(page, rows) {
  const columns = [...NAMES,
    ["score, %", "", "mean with its 95 % interval"],
    ["to full KV", "", "difference in points, paired by question, with its 95 % interval; bold: zero lies outside"],
    ["kept", "", "share of the prompt's entries kept after its prefill"],
    ["held", "", "share of all entries held after the last token"],
    ["KV", "", "memory of what is kept of the prompt, mean"],
    ["TTFT, ms", "", "time to first token: median and quartiles"],
    ["TPOT, ms", "", "time per output token: median and quartiles"],
    ["output", "", "tokens of the answer, mean"],
    ["in full", "text", "how many prompts were served in full, and why"]];
  return { columns, rows: rows.map((row) => [...nameCells(page, row), scoreCell(row),
    differenceCell(row), cell(percent(row.kept), row.kept), cell(percent(row.held), row.held),
    cell(bytesText(row.bytes), row.bytes), cell(milliseconds(row.ttft), row.ttft && row.ttft[0]),
    cell(milliseconds(row.tpot), row.tpot && row.tpot[0]), cell(number(row.output), row.output),
    cell(row.inFull || UNKNOWN, row.inFull, "text")]) };
}

// Columns and rows with a cell per task; `of` is scoreCell or differenceCell.
function taskTable(page, series, of) {
  const tasks = page.tasks();
  const columns = [...NAMES, ["kept", "", "share of the prompt's entries kept after its prefill"],
    ...tasks.map((task) => [page.taskName(task), "", page.taskTitle(task)])];
  return { columns, rows: series.map((i) => {
    const total = page.row(i, -1);
    return [...nameCells(page, total), cell(percent(total.kept), total.kept),
      ...tasks.map((task) => of(page.row(i, task)))];
  }) };
}

// First and later questions of the tasks that have both.
function turnTable(page, series) {
  const kinds = page.data.conversations.flatMap((task) => [[task, 1, "first"], [task, 2, "later"]]);
  const columns = [...NAMES, ...kinds.map(([task, , turns]) =>
    [`${page.taskName(task)}: ${turns}`, "", `${page.taskTitle(task)}: ${turns} questions`])];
  return { columns, rows: series.map((i) => [...nameCells(page, page.row(i, -1)),
    ...kinds.map(([task, turns]) => scoreCell(page.row(i, task, turns)))]) };
}

function compare(a, b) {
  if (a === null || b === null) return 0;
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

// Fills a table. `sorting` is {column, down}, kept by the caller and changed by clicks.
function fillTable(table, made, sorting, again) {
  const rows = [...made.rows];
  if (sorting.column !== null && sorting.column < made.columns.length) {
    const key = (row) => row[sorting.column].key ?? null;
    const sign = sorting.down ? -1 : 1;
    rows.sort((a, b) => (key(a) === null) - (key(b) === null) || sign * compare(key(a), key(b)));
  }
  const head = made.columns.map(([name, kind, title], i) => {
    const mine = sorting.column === i;
    const button = element("button", { type: "button", title,
      textContent: name + (mine ? (sorting.down ? " ▼" : " ▲") : "") });
    button.addEventListener("click", () => {
      sorting.down = mine ? !sorting.down : kind !== "text";
      sorting.column = i;
      again(i);
    });
    return element("th", { className: kind, scope: "col",
      "aria-sort": mine ? (sorting.down ? "descending" : "ascending") : "none" }, button);
  });
  const body = rows.map((row) => element("tr", {},
    ...row.map(({ text, kind }) => element("td", { className: kind, textContent: text }))));
  table.replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}
