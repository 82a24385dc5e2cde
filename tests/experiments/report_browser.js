// As much of a browser as a report on an experiment uses. Runs the page's scripts with a recorder in
// place of the chart library, as wide as the second argument says, and prints what was drawn.
"use strict";
const fs = require("fs");
const vm = require("vm");

const page = fs.readFileSync(process.argv[2], "utf8");
const width = Number(process.argv[3]);
const scripts = [...page.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
const places = [...page.matchAll(/data-chart="([^"]+)"/g)].map(([, chart]) => ({
  dataset: { chart }, clientWidth: width, drawn: [],
  replaceChildren(...nodes) { this.drawn = nodes; },
}));

// A mark keeps its rows, and what its channels say of each of them.
const mark = (name) => (rows, options = {}) => ({ name, rows: rows.map((row) =>
  Object.fromEntries(Object.entries(options).map(([key, channel]) =>
    [key, typeof channel === "function" ? channel(row) : row[channel] ?? channel]))) });
globalThis.Plot = Object.fromEntries(
  ["ruleX", "ruleY", "dot", "text", "tip", "barX"].map((name) => [name, mark(name)]));
Plot.pointerY = (options) => options;
Plot.plot = (options) => ({ ...options, attributes: {},
  setAttribute(key, value) { this.attributes[key] = value; } });

globalThis.ResizeObserver = class {
  constructor(told) { this.told = told; }
  observe(target) { this.told([{ target }]); this.told([{ target }]); }
};
globalThis.document = {
  getElementById: () => ({ textContent: scripts.find(([, kind]) => kind.includes("json"))[2] }),
  querySelectorAll: () => places,
};
vm.runInThisContext(scripts.at(-1)[2]);
console.log(JSON.stringify(Object.fromEntries(places.map((place) => {
  const [{ width, height, x, y, marks, attributes }] = place.drawn;
  return [place.dataset.chart, { width, height, x, y, marks, attributes }];
}))));
