// The charts of the report: score against share kept, the front of score against cost, needles.
"use strict";

const COSTS = {
  kv_bytes: { title: "KV memory of the prompt, MiB", short: "KV memory", unit: "MiB",
    of: (row) => row.bytes, scale: 2 ** -20 },
  ttft: { title: "time to first token, ms", short: "time to first token", unit: "ms",
    of: (row) => row.ttft && row.ttft[0], scale: 1000 },
  tpot: { title: "time per output token, ms", short: "time per output token", unit: "ms",
    of: (row) => row.tpot && row.tpot[0], scale: 1000 },
};
const LINE = 12; // pixels between two names
const LETTER = 6.2; // approximate width of a letter of a name, in pixels
const SCORES = { domain: [-3, 104], ticks: [0, 20, 40, 60, 80, 100], grid: true, label: "score, %",
  labelArrow: "none" };

// The style of a policy; chosen policies keep their style when the choice changes.
function looks(page, policy) {
  const place = page.styleOf.get(policy), chosen = place !== undefined;
  const style = chosen ? page.data.styles[place]
    : { colour: page.data.others, marker: "circle", dash: [] };
  return { ...plotStyle(style), chosen };
}

function pointText(page, row) {
  const series = page.data.series[row.series];
  return `${series.name}: score ${scoreText(row)}, kept ${percent(row.kept)}`;
}

// Policies with their points by rising share; those in colour last, so that they are on top.
function accuracyCurves(page, task) {
  const curves = page.data.policies.map(({ name }, policy) => {
    const rows = page.data.series.flatMap((series, i) => (series.policy === policy ? [i] : []))
      .map((i) => page.row(i, task)).filter((row) => row && row.score && row.kept)
      .sort((a, b) => a.kept - b.kept);
    const curve = { name, look: looks(page, policy), aside: 0,
      about: rows.map((row) => pointText(page, row)).join("\n") };
    curve.points = rows.map((row) => ({ curve, x: 100 * row.kept, y: 100 * row.score[0],
      low: 100 * row.score[1], high: 100 * row.score[2] }));
    return curve;
  }).filter((curve) => curve.points.length);
  // Curves in colour are moved a little, so that bars at one share do not overlap.
  const chosen = curves.filter((curve) => curve.look.chosen);
  const step = Math.min(3, 16 / chosen.length); // pixels
  chosen.forEach((curve, i) => { curve.aside = step * (i - (chosen.length - 1) / 2); });
  return d3.sort(curves, (curve) => curve.look.chosen);
}

// Line, points and intervals of a policy; the style sheet decides which intervals are visible.
function curveMarks({ points, about, look }) {
  const { colour, symbol, rotate, dash, chosen } = look, kind = chosen ? "chosen" : "other";
  return [
    Plot.line(points, { x: "x", y: "y", className: `curve ${kind}`, stroke: colour,
      strokeWidth: chosen ? 2 : 1, strokeOpacity: chosen ? 1 : 0.5, strokeDasharray: dash,
      ariaLabel: chosen ? () => about : null }),
    Plot.link(points, { x1: "x", x2: "x", y1: "low", y2: "high", className: `bars ${kind}`,
      stroke: colour, strokeWidth: 1.4 }),
    Plot.dot(points, { x: "x", y: "y", symbol, rotate, fill: colour, r: chosen ? 4 : 2 }),
  ];
}

// Names of the policies in colour in a column, each as near as possible to its curve's beginning.
function nameMarks(curves, low, perScore) {
  const gap = LINE / perScore, first = (curve) => curve.points[0].y;
  if (curves.length * gap > SCORES.domain[1]) return []; // the choice of policies names them too
  const sorted = d3.sort(curves, first), places = [];
  sorted.forEach((curve, i) => places.push(i ? Math.max(first(curve), places[i - 1] + gap)
    : Math.max(first(curve), 0)));
  sorted.forEach((_, i) => {
    places[i] = Math.min(places[i], 100 - (sorted.length - 1 - i) * gap);
  });
  return sorted.flatMap(({ name, look: { colour, symbol, rotate } }, i) => {
    const at = { x: () => low, y: () => places[i] };
    return [
      Plot.dot([0], { ...at, dx: 8, symbol, rotate, fill: colour, r: 3.5 }),
      Plot.text([name], { ...at, dx: 15, text: String, textAnchor: "start", fill: "currentColor",
        stroke: "var(--page)", strokeWidth: 4 }),
    ];
  });
}

// Score against the share kept, of one task (-1: all).
function accuracyChart(page, task, width) {
  const height = 290, curves = accuracyCurves(page, task);
  const chosen = curves.filter((curve) => curve.look.chosen);
  const points = curves.flatMap((curve) => curve.points);
  const asked = page.budgets.map((share) => 100 * share);
  const shares = [...asked, ...points.map((point) => point.x), ...(points.length ? [] : [100])];
  const least = Math.min(...shares), high = 1.06 * Math.max(...shares);
  const low = least * (least / high) ** (chosen.length ? 0.5 : 0.05); // names stand there
  const full = page.full === null ? null : page.row(page.full, task).score;
  const pixel = (high / low) ** (1 / (width - 48));
  for (const point of points) point.x *= pixel ** point.curve.aside;
  const all = high > 95 && !asked.includes(100) ? [100] : [];
  const chart = Plot.plot({
    width, height, marginLeft: 40, marginRight: 8, marginTop: 18, marginBottom: 40,
    x: { type: "log", domain: [low, high], ticks: [...asked, ...all], grid: true,
      tickFormat: (share) => String(Number(share.toPrecision(3))), labelAnchor: "center",
      label: "entries of the prompt kept, %", labelArrow: "none" },
    y: SCORES,
    marks: [
      Plot.frame({ stroke: "var(--line)" }),
      Plot.ruleY(full ? [100 * full[0]] : [], { stroke: "currentColor", strokeDasharray: "6 3",
        title: () => `full KV: ${scoreText(page.row(page.full, task))}` }),
      ...curves.flatMap(curveMarks),
      ...nameMarks(chosen, low, (height - 58) / 107),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", lineWidth: 32,
        title: (point) => point.curve.about })),
    ],
  });
  chart.addEventListener("input", () => {
    for (const kind of [".curve", ".bars"]) {
      chart.querySelectorAll(kind).forEach((marks, i) =>
        marks.classList.toggle("told", chart.value?.curve === curves[i]));
    }
  });
  return chart;
}

function accuracyAbout(page, task) {
  const full = page.full === null ? null : page.row(page.full, task);
  return `${page.taskTitle(task)}: score against the share kept; full KV `
    + (full && full.score ? scoreText(full) : "not asked");
}

// Points of "score against a cost", with the text of each.
function paretoPoints(page, cost, task) {
  const kind = COSTS[cost], front = page.front(cost, task);
  return page.data.series.map((_, i) => page.row(i, task))
    .filter((row) => row && row.score && kind.of(row) !== null).map((row) => {
      const series = page.data.series[row.series], x = kind.scale * kind.of(row);
      const best = front.best.includes(row.series), full = series.policy === null;
      return { x, y: 100 * row.score[0], name: series.name, best, full,
        named: full || front.named.includes(row.series), look: looks(page, series.policy),
        about: `${pointText(page, row)}, ${kind.short} ${Number(x.toPrecision(3))} ${kind.unit}`
          + (best ? "; on the front" : "") };
    });
}

// Names above and left of their points, where there are no beaten points; without room there, right
// of them. Each moves up until it covers neither point nor name; a line leads to names that moved
// far.
function frontNames(points, across, up) {
  const taken = points.map((point) => {
    const x = across.apply(point.x), y = up.apply(point.y);
    return [x - 5, x + 5, y - 5, y + 5];
  });
  const names = d3.sort(points.filter((point) => point.named), (point) => point.y).map((point) => {
    const x = across.apply(point.x), long = 6 + LETTER * point.name.length;
    const left = x - long > across.range[0], [from, to] = left ? [x - long, x] : [x, x + long];
    let y = up.apply(point.y) - 9;
    while (y > LINE && taken.some(([start, end, top, bottom]) =>
      start < to && from < end && top < y + LINE / 2 && y - LINE / 2 < bottom)) y -= 2;
    taken.push([from, to, y - LINE / 2, y + LINE / 2]);
    return { ...point, left, at: up.invert(y), far: up.apply(point.y) - y > 2 * LINE };
  });
  const text = (left) => Plot.text(names.filter((name) => name.left === left), { x: "x", y: "at",
    text: "name", dx: left ? -5 : 5, textAnchor: left ? "end" : "start", fill: "currentColor",
    stroke: "var(--page)", strokeWidth: 4 });
  return [Plot.link(names.filter((name) => name.far), { x1: "x", x2: "x", y1: "y", y2: "at",
    stroke: "var(--dim)" }), text(true), text(false)];
}

// Score against a cost; the points of the front are joined and named.
function paretoChart(page, cost, task, width) {
  const points = paretoPoints(page, cost, task), margins = { left: 40, right: 14 };
  const [least, most] = d3.extent(points, (point) => point.x), room = 0.06 * (most - least) || 1;
  const x = { domain: [Math.max(0, least - room), most + room], grid: true, ticks: width / 110,
    labelAnchor: "center", label: COSTS[cost].title, labelArrow: "none" };
  const height = 480, top = 36, bottom = 40;
  const across = Plot.scale({ x: { ...x, range: [margins.left, width - margins.right] } });
  const up = Plot.scale({ y: { ...SCORES, range: [height - bottom, top] } });
  const dots = (test, r) => {
    const own = points.filter((point) => !point.full && test(point));
    return Plot.dot(own, { x: "x", y: "y", symbol: ({ look }) => look.symbol, r,
      rotate: ({ look }) => look.rotate, fill: ({ look }) => look.colour,
      ariaLabel: (point) => (point.best || point.look.chosen ? point.about : null) });
  };
  return Plot.plot({
    width, height, marginLeft: margins.left, marginRight: margins.right, marginTop: top,
    marginBottom: bottom, x, y: SCORES,
    marks: [
      Plot.frame({ stroke: "var(--line)" }),
      Plot.line(d3.sort(points.filter((point) => point.best), (point) => point.x),
        { x: "x", y: "y", curve: "step-after", stroke: "currentColor", strokeWidth: 1 }),
      dots(({ look }) => !look.chosen, 3),
      dots(({ look }) => look.chosen, 5),
      Plot.dot(points.filter((point) => point.full), { x: "x", y: "y", symbol: "star", r: 6,
        fill: "currentColor", ariaLabel: "about" }),
      ...frontNames(points, across, up),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: "about" })),
    ],
  });
}

// Depth and length of each cell, with its score in percent; null where nothing was answered.
function needleCells(page, needle, series) {
  const depths = needle.score[series].length;
  const edge = (depth) => Math.round((100 * depth) / depths);
  return needle.score[series].flatMap((row, depth) => row.map((value, i) => {
    const place = `depth ${edge(depth)} to ${edge(depth + 1)} %, ${page.data.lengths[i]} tokens`;
    const score = value === null ? null : rounded(value);
    return { depth: `${edge(depth)}-${edge(depth + 1)} %`, length: page.data.lengths[i], score,
      about: score === null ? `${place}: nothing asked`
        : `${place}: ${score} % of ${needle.count[series][depth][i]}` };
  }));
}

const SHADES = { scheme: "cividis", domain: [0, 100] };

function needleChart(page, needle, series) {
  const cells = needleCells(page, needle, series), at = { x: "length", y: "depth" };
  const depths = [...new Set(cells.map((cell) => cell.depth))], known = cells.filter(({ score }) =>
    score !== null);
  const every = depths.length < 8 ? 1 : 2;
  const name = page.data.series[series].name;
  const chart = Plot.plot({
    width: 62 + 46 * page.data.lengths.length, height: 26 + 20 * depths.length, marginLeft: 56,
    marginRight: 6, marginTop: 4, marginBottom: 22, padding: 0.03,
    x: { type: "band", domain: page.data.lengths, label: null, tickSize: 0 },
    y: { type: "band", domain: depths, label: null, tickSize: 0,
      ticks: depths.filter((_, i) => i % every === 0) },
    color: SHADES,
    marks: [
      Plot.cell(cells.filter(({ score }) => score === null), { ...at, fill: "var(--empty)" }),
      Plot.cell(known, { ...at, fill: "score" }),
      Plot.text(known, { ...at, text: "score", fill: ({ score }) => (score > 55 ? "#000" : "#fff") }),
      Plot.tip(cells, Plot.pointer({ ...at, title: "about" })),
    ],
  });
  chart.setAttribute("aria-hidden", "true");
  const said = cells.map((cell) => cell.about).join("; ");
  return element("figure", {}, element("figcaption", {}, name),
    element("div", { className: "chart", role: "img", tabIndex: 0, "aria-label": `${name}: ${said}` },
      chart));
}
