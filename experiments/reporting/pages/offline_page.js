// What the scripts of every page share: its data, elements, and charts that Plot draws as wide as
// their place is, read by mouse and keyboard alike.
"use strict";

const LEAST = 240; // pixels; a place that is narrower scales its chart

const pageData = () => JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// An element; keys that are properties are set as such. Texts never become HTML.
function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const draws = new WeakMap(); // by place: from a width in pixels to what Plot drew
const widths = new WeakMap();

function drawChart(place) {
  widths.set(place, place.clientWidth);
  const chart = draws.get(place)(Math.max(LEAST, place.clientWidth));
  place.replaceChildren(chart);
  // Without stops the place's own name says all, and a table has the figures.
  if (!addStops(chart)) chart.setAttribute("aria-hidden", "true");
}

const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (widths.get(target) !== target.clientWidth) drawChart(target);
  }
});

// Draws a chart now if its place is seen, and whenever the place's width or the theme changes.
function showChart(place, draw) {
  draws.set(place, draw);
  if (place.clientWidth) drawChart(place);
  observer.observe(place);
}

// Images that Plot paints know no variables of the style sheet.
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => {
    for (const place of document.querySelectorAll(".chart")) if (widths.has(place)) drawChart(place);
  });
}

// What a mark gives an `ariaLabel` is a stop of the Tab key, where Plot shows what it shows under
// the mouse. How many there are.
function addStops(chart) {
  const stops = chart.querySelectorAll("g[aria-label] > [aria-label]:not(g)");
  for (const stop of stops) {
    stop.setAttribute("tabindex", "0");
    stop.setAttribute("role", "img");
    const tell = (kind, place = {}) => chart.dispatchEvent(
      new PointerEvent(kind, { pointerType: "mouse", ...place }));
    stop.addEventListener("focus", () => {
      // A symbol is moved to its place, a line is told at its end; groups of marks are half a pixel
      // aside, which Plot's pointer knows nothing of.
      const [move] = stop.transform.baseVal;
      const at = move ? new DOMPoint(move.matrix.e, move.matrix.f)
        : stop.getPointAtLength(stop.getTotalLength());
      const { x, y } = at.matrixTransform(chart.getScreenCTM());
      tell("pointermove", { clientX: x, clientY: y });
    });
    stop.addEventListener("blur", () => tell("pointerleave"));
  }
  return stops.length;
}
