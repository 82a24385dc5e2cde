// What the charts are drawn with: SVG elements, markers, scales, labels that keep off each other.
"use strict";

// An element of SVG; `children` are elements, or texts.
function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// An element of HTML; keys that are properties are set as such.
function html(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const round = (value) => Math.round(value * 10) / 10;

// The outline of a marker of radius r.
function markerPath(shape, x, y, r) {
  const points = {
    square: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
    diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
    triangle: [[0, -1.2], [1.2, 1], [-1.2, 1]],
    down: [[0, 1.2], [1.2, -1], [-1.2, -1]],
    cross: [[-1.2, -0.6], [-0.6, -1.2], [0, -0.6], [0.6, -1.2], [1.2, -0.6], [0.6, 0], [1.2, 0.6],
      [0.6, 1.2], [0, 0.6], [-0.6, 1.2], [-1.2, 0.6], [-0.6, 0]],
    star: [...Array(10).keys()].map((i) => {
      const angle = (i * Math.PI) / 5, far = i % 2 ? 0.75 : 1.8;
      return [far * Math.sin(angle), -far * Math.cos(angle)];
    }),
  }[shape];
  if (!points) { // circle
    return `M${round(x - r)},${round(y)}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`;
  }
  return `M${points.map(([dx, dy]) => `${round(x + r * dx)},${round(y + r * dy)}`).join("L")}Z`;
}

// A chart; `about` is what is read out of it.
function chart(width, height, about, ...children) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": about }, ...children);
}

// Round numbers between two, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

// A frame with grid and numbers. `box` is {left, top, right, bottom}; `across` and `up` are
// {at: number -> pixel, ticks: [number], text: number -> string, title}.
function axes(box, across, up) {
  const parts = [];
  for (const value of across.ticks) {
    const x = round(across.at(value));
    parts.push(svg("line", { class: "grid", x1: x, x2: x, y1: box.top, y2: box.bottom }),
      svg("text", { class: "tick", x, y: box.bottom + 14, "text-anchor": "middle",
        "font-size": 11 }, across.text(value)));
  }
  for (const value of up.ticks) {
    const y = round(up.at(value));
    parts.push(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }),
      svg("text", { class: "tick", x: box.left - 5, y: y + 4, "text-anchor": "end",
        "font-size": 11 }, up.text(value)));
  }
  const middle = (box.top + box.bottom) / 2;
  parts.push(
    svg("rect", { class: "frame", x: box.left, y: box.top, width: box.right - box.left,
      height: box.bottom - box.top }),
    svg("text", { class: "axis", x: (box.left + box.right) / 2, y: box.bottom + 30,
      "text-anchor": "middle", "font-size": 12 }, across.title),
    svg("text", { class: "axis", x: box.left - 34, y: middle, "text-anchor": "middle",
      "font-size": 12, transform: `rotate(-90 ${box.left - 34} ${middle})` }, up.title));
  return svg("g", { "aria-hidden": "true" }, ...parts);
}

const LETTER = 5.9; // pixels of a letter of a label, about
const LABEL = 11;
const MARK = 10; // pixels of a marker before a label

const AROUND = [0, 180, -45, 45, -135, 135, -90, 90, -20, 20, -160, 160]; // degrees, best first
const LEFT_FIRST = [180, 170, -170, 160, -160, 145, -145, 125, -125, 90, -90];

// Labels beside points: [{x, y, text, look}] -> elements; with a look the marker stands before the
// text. Each takes the nearest place where it covers no label, no point of `others` ([x, y]) and no
// part of `lines` ([x1, y1, x2, y2], across or up).
function placeLabels(points, others, lines, box, angles = AROUND) {
  const taken = [
    ...others.map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]),
    ...lines.map(([x1, y1, x2, y2]) =>
      [Math.min(x1, x2) - 1, Math.min(y1, y2) - 1, Math.max(x1, x2) + 1, Math.max(y1, y2) + 1]),
  ];
  const placed = [];
  for (const point of points) {
    const spot = freeSpot(point, taken, box, angles);
    taken.push(spot);
    const near = [Math.min(Math.max(point.x, spot[0]), spot[2]),
      Math.min(Math.max(point.y, spot[1]), spot[3])];
    if (Math.hypot(near[0] - point.x, near[1] - point.y) > 11) {
      placed.push(svg("line", { class: "leader", x1: round(point.x), y1: round(point.y),
        x2: round(near[0]), y2: round(near[1]) }));
    }
    if (point.look) {
      placed.push(svg("path", { fill: point.look.colour,
        d: markerPath(point.look.marker, spot[0] + 4, spot[3] - 6, 3.2) }));
    }
    placed.push(svg("text", { class: "label", x: round(spot[0] + (point.look ? MARK : 0)),
      y: round(spot[3] - 2.5), "font-size": LABEL }, point.text));
  }
  return svg("g", { "pointer-events": "none", "aria-hidden": "true" }, ...placed);
}

function freeSpot(point, taken, box, angles) {
  const width = LETTER * point.text.length + (point.look ? MARK : 0), height = LABEL + 1;
  let best = null;
  for (const distance of [7, 13, 22, 34, 48, 64, 84, 110]) {
    for (const angle of angles) {
      const across = Math.cos((angle * Math.PI) / 180), down = Math.sin((angle * Math.PI) / 180);
      const x = point.x + across * (distance + width / 2) - width / 2;
      const y = point.y + down * (distance + height / 2) - height / 2;
      const spot = [x, y, x + width, y + height];
      const outside = x < box.left || y < box.top || spot[2] > box.right || spot[3] > box.bottom;
      const covered = taken.filter((other) => spot[0] < other[2] && other[0] < spot[2]
        && spot[1] < other[3] && other[1] < spot[3]).length + (outside ? 100 : 0);
      if (covered === 0) return spot;
      if (!best || covered < best.covered) best = { covered, spot };
    }
  }
  return best.spot;
}
