// The charts of `kvpolicy fidelity`: KL and agreement by position, a line per policy.
"use strict";

// Where distributions agree to rounding, a logarithmic scale would magnify noise.
const NOISE = 1e-4; // nats
const SCALES = {
  kl: (most) => ({ type: "symlog", constant: NOISE, domain: [0, most],
    ticks: [0, 1e-4, 1e-3, 1e-2, 0.1, 1, 10].filter((tick) => tick <= most), tickFormat: String,
    label: "KL(full KV || policy), nats" }),
  agree: () => ({ domain: [0, 100], percent: true, label: "same top token, %" }),
};

function byPosition(width, figure, policies) {
  const points = policies.flatMap((policy) => policy.positions.map((position, i) => ({ policy,
    position, value: policy[figure][i] })));
  const most = Math.max(10 * NOISE, ...points.map((point) => point.value));
  const size = figure === "agree" ? 100 : 1;
  return Plot.plot({
    width, height: 260, marginLeft: 52, marginRight: 14, marginTop: 22, marginBottom: 40,
    x: { grid: true, ticks: width / 90, labelAnchor: "center", labelArrow: "none",
      label: "position in the continuation, tokens" },
    y: { grid: true, labelArrow: "none", ...SCALES[figure](most) },
    marks: [
      Plot.ruleY([0], { stroke: "var(--dim)" }),
      ...policies.flatMap((policy) => {
        const own = points.filter((point) => point.policy === policy);
        const { colour, dash, symbol, rotate } = plotStyle(policy.style);
        return [
          Plot.line(own, { x: "position", y: "value", stroke: colour, strokeWidth: 1.8,
            strokeDasharray: dash }),
          Plot.dot(own, { x: "position", y: "value", fill: colour, symbol, rotate, r: 3.2 }),
        ];
      }),
      Plot.tip(points, Plot.pointer({ x: "position", y: "value", title: ({ policy, position, value }) =>
        `${policy.name}\nabout position ${Math.round(position)}: ${Number((size * value).toPrecision(3))}`
        + (size > 1 ? " %" : " nats") })),
    ],
  });
}

function start() {
  const policies = pageData();
  byId("policies").append(...policies.map(({ name, style }) =>
    element("span", {}, sample(plotStyle(style)), name)));
  for (const place of document.querySelectorAll("[data-chart]")) {
    showChart(place, (width) => byPosition(width, place.dataset.chart, policies));
  }
}

start();
