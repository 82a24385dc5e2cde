// The charts of a report on an experiment.
"use strict";

const ROW = 46; // pixels of an arm in a chart, its label included
const COLOURS = { cleared: "var(--good)", breached: "var(--bad)", undecided: "var(--open)",
  control: "var(--aside)" };
const SYMBOLS = { cleared: "circle", breached: "times", undecided: "diamond", control: "square" };

// What all charts have in common; a row's label stands above what it shows.
function frame(width, rows, x, marks, above = []) {
  return Plot.plot({
    width, height: rows.length * ROW + 46, marginLeft: 16, marginRight: 24, marginTop: 4,
    marginBottom: 42,
    style: { fontSize: "12px", overflow: "visible" },
    x: { grid: true, labelAnchor: "center", labelArrow: "none", labelOffset: 36, ticks: Math.max(3, width / 110),
      ...x },
    y: { type: "band", axis: null, domain: rows.map((row) => row.key), padding: 0 },
    marks: [...marks, Plot.text(rows, { y: "key", text: "label", frameAnchor: "left", dy: -12,
      dx: 2, textAnchor: "start", fill: "currentColor", stroke: "var(--page)", strokeWidth: 6,
      paintOrder: "stroke" }), ...above],
  });
}

// Means with their intervals. What lies beyond the frame ends in an arrow at its edge.
function intervals(width, { rows, low, high, label, lines }) {
  const inside = (value) => Math.min(high, Math.max(low, value));
  const seen = rows.filter((row) => row.mean !== null && inside(row.mean) === row.mean);
  const colour = (row) => COLOURS[row.outcome];
  const arrow = (beyond, at, text, dx) => Plot.text(rows.filter(beyond), { y: "key", x: () => at,
    text: () => text, fill: colour, dx, dy: 8, fontSize: 13 });
  return frame(width, rows, { domain: [low, high], label }, [
    Plot.ruleX(lines.filter((line) => !line.margin), { x: "at", stroke: "var(--dim)" }),
    Plot.ruleX(lines.filter((line) => line.margin), { x: "at", stroke: "var(--mark)",
      strokeWidth: 2, strokeDasharray: "6 3" }),
    Plot.ruleY(rows, { y: "key", x1: (row) => inside(row.low), x2: (row) => inside(row.high),
      stroke: colour, strokeWidth: 5, strokeOpacity: 0.45, dy: 8 }),
    arrow((row) => row.low < low, low, "\u25c0", -7),
    arrow((row) => row.high > high, high, "\u25b6", 7),
    Plot.dot(seen, { y: "key", x: (row) => inside(row.mean), fill: colour, r: 6, dy: 8,
      symbol: (row) => SYMBOLS[row.outcome], stroke: colour, strokeWidth: 2 }),
  ], [Plot.tip(rows, Plot.pointerY({ y: "key", x: (row) => inside(row.mean ?? row.high),
      title: "about", dy: 8 }))]);
}

function bars(width, { rows, label, aside }) {
  const most = Math.max(...rows.map((row) => row.value), 0) || 1;
  return frame(width, rows, { domain: [0, most], nice: true, label }, [
    Plot.barX(rows, { y: "key", x: "value", insetTop: 22, insetBottom: 6,
      fill: aside ? "var(--aside)" : "var(--bar)", fillOpacity: (row) => (row.control ? 0.55 : 1) }),
    Plot.ruleX([0], { stroke: "var(--dim)" }),
  ]);
}

function start() {
  const charts = pageData(), draw = { intervals, bars };
  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = charts[place.dataset.chart];
    showChart(place, (width) => draw[chart.kind](width, chart));
  }
}

start();
