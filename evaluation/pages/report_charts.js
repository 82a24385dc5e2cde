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

const percents = { ticks: [0, 20, 40, 60, 80, 100], text: String };

// How a policy is drawn: {style, chosen}; the chosen ones keep their style while others change.
function looks(page, policy) {
  const place = page.styleOf.get(policy);
  return place === undefined
    ? { colour: null, marker: "circle", dash: [], chosen: false }
    : { ...page.data.styles[place], chosen: true };
}

function pointText(page, row) {
  const series = page.data.series[row.series];
  return `${series.name}: score ${scoreText(row)}, kept ${percent(row.kept)}`;
}

// Score against the share kept, one chart per task (-1: all).
function accuracyChart(page, task, title) {
  const width = 400, height = 290;
  const box = { left: 46, top: 8, right: width - 8, bottom: height - 40 };
  const curves = accuracyCurves(page, task);
  const shares = [...page.budgets, ...curves.flatMap((curve) => curve.rows.map((row) => row.kept))];
  const least = Math.log(Math.min(...shares)), high = Math.log(1.06 * Math.max(...shares));
  const low = least - (page.styleOf.size ? 0.4 : 0.05) * (high - least || 1); // names stand there
  const x = (share) => box.left + ((Math.log(share) - low) / (high - low)) * (box.right - box.left);
  const y = (score) => box.bottom - ((score + 4) / 108) * (box.bottom - box.top);
  const whole = Math.max(...shares) > 0.9 && !page.budgets.includes(1) ? [1] : [];
  const across = { at: (value) => x(value / 100),
    ticks: [...page.budgets, ...whole].map((share) => 100 * share),
    text: (value) => String(Number(value.toPrecision(3))), title: "entries of the prompt kept, %" };
  const parts = [axes(box, across, { ...percents, at: y, title: "score, %" })];
  const full = page.full === null ? null : page.row(page.full, task);
  if (full && full.score) {
    const level = round(y(100 * full.score[0]));
    parts.push(svg("line", { class: "full", x1: box.left, x2: box.right, y1: level, y2: level },
      svg("title", {}, `full KV: ${scoreText(full)}`)));
  }
  for (const curve of curves) {
    parts.push(drawCurve(page, curve, (share) => x(share) + curve.aside, (score) => y(100 * score)));
  }
  const chosen = curves.filter((curve) => curve.look.chosen);
  const at = (curve) => (row) => [x(row.kept) + curve.aside, y(100 * row.score[0])];
  const labels = chosen.map((curve) => {
    const [left, level] = at(curve)(curve.rows[0]);
    return { x: left, y: level, text: curve.name, look: curve.look };
  }).sort((a, b) => a.y - b.y);
  const points = chosen.flatMap((curve) => between(curve.rows.map(at(curve))));
  const lines = full && full.score
    ? [[box.left, y(100 * full.score[0]), box.right, y(100 * full.score[0])]] : [];
  parts.push(placeLabels(labels, points, lines, box, LEFT_FIRST));
  const about = `${title}: score against the share kept; full KV `
    + `${full && full.score ? scoreText(full) : "not asked"}; ${curves.length} policies`;
  return html("figure", {}, html("figcaption", {}, title), chart(width, height, about, ...parts));
}

// The corners of a line and points between them, which labels keep off.
function between(corners) {
  return corners.flatMap(([x, y], i) => {
    const [nextX, nextY] = corners[i + 1] || [x, y];
    return [...Array(9).keys()].map((k) => [x + (k / 9) * (nextX - x), y + (k / 9) * (nextY - y)]);
  });
}

// Rows by policy, by rising share; those in colour last, so that they lie on top.
function accuracyCurves(page, task) {
  const curves = new Map();
  page.data.series.forEach((series, i) => {
    const row = page.row(i, task);
    if (series.policy === null || !row || !row.score || !row.kept) return;
    if (!curves.has(series.policy)) {
      curves.set(series.policy, { name: page.data.policies[series.policy].name, rows: [], aside: 0,
        look: looks(page, series.policy) });
    }
    curves.get(series.policy).rows.push(row);
  });
  for (const curve of curves.values()) curve.rows.sort((a, b) => a.kept - b.kept);
  // Curves in colour lie a little aside, so that bars at one share do not cover each other.
  const chosen = [...curves.values()].filter((curve) => curve.look.chosen);
  const step = Math.min(3, 16 / chosen.length); // pixels
  chosen.forEach((curve, i) => { curve.aside = step * (i - (chosen.length - 1) / 2); });
  return [...curves.values()].sort((a, b) => a.look.chosen - b.look.chosen);
}

function drawCurve(page, { name, rows, look }, x, y) {
  const colour = look.colour;
  const line = "M" + rows.map((row) => `${round(x(row.kept))},${round(y(row.score[0]))}`).join("L");
  const bars = rows.map((row) => {
    const at = round(x(row.kept)), low = round(y(row.score[1])), high = round(y(row.score[2]));
    return `M${at},${low}V${high}M${at - 3},${low}h6M${at - 3},${high}h6`;
  }).join("");
  const about = rows.map((row) => pointText(page, row)).join("; ");
  const parts = [
    svg("title", {}, name),
    svg("path", { class: "hit", d: line }),
    svg("path", { class: "line", d: line, fill: "none", stroke: colour,
      "stroke-width": look.chosen ? 2 : 1, "stroke-dasharray": look.dash.join(" ") || null }),
    svg("path", { class: "bars", d: bars, fill: "none", stroke: colour, "stroke-width": 1.2 }),
    ...rows.map((row) => svg("path", { class: "point", fill: colour, "data-about": pointText(page, row),
      d: markerPath(look.marker, x(row.kept), y(row.score[0]), look.chosen ? 3.6 : 1.8) },
    svg("title", {}, pointText(page, row)))),
  ];
  return svg("g", { class: `series ${look.chosen ? "chosen" : "other"}`, "data-about": name + ": " + about,
    role: "img", "aria-label": about, tabindex: look.chosen ? 0 : null }, ...parts);
}

// Score against a cost; what no other point beats is joined and named.
function paretoChart(page, cost, task) {
  const width = 900, height = 520, kind = COSTS[cost];
  const box = { left: 50, top: 10, right: width - 14, bottom: height - 42 };
  const rows = page.data.series.map((_, i) => page.row(i, task))
    .filter((row) => row && row.score && kind.of(row) !== null);
  const costs = rows.map((row) => kind.scale * kind.of(row));
  const least = Math.min(...costs), most = Math.max(...costs), room = 0.06 * (most - least) || 1;
  const low = Math.max(0, least - room), high = most + room;
  const x = (value) => box.left + ((value - low) / (high - low)) * (box.right - box.left);
  const y = (score) => box.bottom - ((score + 4) / 108) * (box.bottom - box.top);
  const at = (row) => [x(kind.scale * kind.of(row)), y(100 * row.score[0])];
  const parts = [axes(box, { at: x, ticks: ticks(low, high, 7), text: String, title: kind.title },
    { ...percents, at: y, title: "score, %" })];
  const bySeries = new Map(rows.map((row) => [row.series, row]));
  const front = page.front(cost, task);
  const best = front.best.map((series) => bySeries.get(series));
  const corners = best.map(at), lines = [];
  let path = "";
  corners.forEach(([px, py], i) => {
    path += i ? `H${round(px)}V${round(py)}` : `M${round(px)},${round(py)}`;
    if (i) lines.push([...corners[i - 1], px, corners[i - 1][1]], [px, corners[i - 1][1], px, py]);
  });
  parts.push(svg("path", { class: "front", d: path }));
  const order = rows.map((row) => ({ row, look: looks(page, page.data.series[row.series].policy) }));
  order.sort((a, b) => a.look.chosen - b.look.chosen);
  for (const { row, look } of order) parts.push(paretoPoint(page, row, look, kind, at(row), best));
  const shown = rows.filter((row) => front.named.includes(row.series) || row.series === page.full);
  const labels = shown.map((row) => ({ x: at(row)[0], y: at(row)[1],
    text: page.data.series[row.series].name })).sort((a, b) => a.x - b.x);
  parts.push(placeLabels(labels, rows.map(at), lines, box));
  const about = `Score against ${kind.short}; on the front: `
    + best.map((row) => `${page.data.series[row.series].name} (${scoreText(row)})`).join(", ");
  return chart(width, height, about, ...parts);
}

function paretoPoint(page, row, look, kind, [x, y], best) {
  const series = page.data.series[row.series], full = series.policy === null;
  const front = best.includes(row);
  const value = kind.scale * kind.of(row);
  const about = `${pointText(page, row)}, ${kind.short} ${Number(value.toPrecision(3))} `
    + `${kind.unit}${front ? "; on the front" : ""}`;
  const shape = full ? "star" : look.marker;
  return svg("path", { class: full ? "star" : look.chosen ? "point" : "series other point",
    fill: full ? null : look.colour || page.data.others, "data-about": about, role: "img",
    "aria-label": about, tabindex: front || look.chosen ? 0 : null,
    d: markerPath(shape, x, y, full || look.chosen ? 5 : 3.2) }, svg("title", {}, about));
}

// Scores of one policy and budget by depth (down) and length (across).
function needleChart(page, needle, series) {
  const score = needle.score[series], count = needle.count[series];
  const lengths = page.data.lengths, cell = 46, line = 20;
  const left = 52, top = 4, width = left + cell * lengths.length + 6;
  const height = top + line * score.length + 22, parts = [], said = [];
  score.forEach((row, depth) => {
    const y = top + depth * line;
    const [from, to] = [depth, depth + 1].map((n) => Math.round((100 * n) / score.length));
    const range = `${from} to ${to} %`;
    if (score.length < 8 || depth % 2 === 0) {
      parts.push(svg("text", { class: "tick", x: left - 4, y: y + 14, "text-anchor": "end",
        "font-size": 10, "aria-hidden": "true" }, range.replace(" to ", "-")));
    }
    row.forEach((value, i) => {
      const place = `depth ${range}, ${lengths[i]} tokens`;
      const about = value === null ? `${place}: nothing asked`
        : `${page.data.series[series].name}, ${place}: ${Math.round(100 * value)} % of ${count[depth][i]}`;
      said.push(value === null ? about : `${place}: ${Math.round(100 * value)} %`);
      parts.push(...needleCell(page, value, left + i * cell, y, cell, line, about));
    });
  });
  lengths.forEach((length, i) => parts.push(svg("text", { class: "tick", "font-size": 11,
    x: left + (i + 0.5) * cell, y: height - 7, "text-anchor": "middle", "aria-hidden": "true" },
  String(length))));
  const name = page.data.series[series].name;
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    tabindex: 0, "aria-label": `${name}: ${said.join("; ")}` }, ...parts);
  return html("figure", {}, html("figcaption", {}, name), figure);
}

function needleCell(page, value, x, y, width, height, about) {
  const shades = page.data.shades;
  const look = value === null ? { class: "empty" }
    : { fill: shades[Math.round(value * (shades.length - 1))] };
  const parts = [svg("rect", { x, y, width: width - 1, height: height - 1, "data-about": about, ...look },
    svg("title", {}, about))];
  if (value !== null) {
    parts.push(svg("text", { x: x + width / 2, y: y + 14, "text-anchor": "middle", "font-size": 11,
      "pointer-events": "none", "aria-hidden": "true",
      style: `fill:${value > 0.55 ? "#000" : "#fff"}` }, String(Math.round(100 * value))));
  }
  return parts;
}
