// Styles that distinguish policies in every chart: colours, symbols and dashes.
"use strict";

const SYMBOLS = { circle: "circle", square: "square", diamond: "diamond", triangle: "triangle",
  down: "triangle", cross: "cross" };
const TURNED = { down: 180, cross: 45 }; // degrees

// The options of Plot for a style of plot_style.py.
function plotStyle({ colour, marker, dash }) {
  return { colour, symbol: SYMBOLS[marker], rotate: TURNED[marker] ?? 0,
    dash: dash.join(" ") || null };
}

// A line and a point in a style, to show before a name.
function sample({ colour, symbol, rotate, dash }, r = 4) {
  const chart = Plot.plot({ width: 34, height: 14, margin: 0, axis: null, marks: [
    Plot.ruleY([0], { stroke: colour, strokeWidth: 2, strokeDasharray: dash }),
    Plot.dot([0], { frameAnchor: "middle", symbol, rotate, fill: colour, r }),
  ] });
  chart.setAttribute("aria-hidden", "true");
  return chart;
}
