// A map of what a policy kept: drawKeptMap(element, map).
//
// map = {
//   tokens: [string],            the prompt, one text per position
//   layers: L, kv_heads: G,
//   bits: string,                base64 of rows of bits, [L][G][N], each row padded to whole bytes,
//                                the first position in the highest bit (numpy.packbits)
//   title: string,
//   asked: [[start, stop], ...]  positions to point at; may be empty or missing
// }
//
// Layers go down and positions across; the shade is the share of a layer's KV heads that hold the
// position. A click on a layer opens its heads and restricts the text below to it. The element may
// be hidden at first. Only textContent is written: tokens are never read as HTML.
globalThis.drawKeptMap = (() => {
  "use strict";

  const LEVELS = 16; // shades of the map
  const TEXT_LEVELS = 4; // shades of the text
  const LEFT = 58, RIGHT = 52, BELOW = 20; // pixels beside and below the cells
  const SAMPLES = [0, 1, 5, 9, 13, 16]; // shades that the legend shows
  const ALL = -1;

  const STYLE = `
.kept-map { --kept-none: #eef1f5; --kept-low: #c6dbef; --kept-all: #08306b; --kept-ink: #1b2430;
  --kept-dim: #667080; --kept-page: #ffffff; --kept-asked: #b34700; --kept-line: #c3cad4;
  color: var(--kept-ink); background: var(--kept-page); font: 14px/1.45 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .kept-map { --kept-none: #232a35; --kept-low: #274b78;
  --kept-all: #b7d7ff; --kept-ink: #e6eaf0; --kept-dim: #98a2b0; --kept-page: #14181f;
  --kept-asked: #ff9d4d; --kept-line: #455061; } }
.kept-map canvas { display: block; width: 100%; cursor: crosshair; }
.kept-map canvas:focus-visible, .kept-map select:focus-visible, .kept-text:focus-visible {
  outline: 2px solid var(--kept-asked); outline-offset: 1px; }
.kept-map h3 { font-size: 1em; margin: 0 0 .3em; }
.kept-plot { position: relative; margin: .3em 0; }
.kept-cursor { position: absolute; top: 0; bottom: ${BELOW}px; width: 1px; pointer-events: none;
  background: var(--kept-asked); }
.kept-bar { display: flex; flex-wrap: wrap; gap: .4em 1.2em; align-items: center; }
.kept-scale { display: inline-flex; align-items: center; gap: .35em; }
.kept-scale i { width: 14px; height: 14px; border: 1px solid var(--kept-line); }
.kept-status { min-height: 1.45em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.kept-text { max-height: 22em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--kept-line); padding: .5em; font: 13px/1.6 ui-monospace, monospace; }
.kept-text span { border-radius: 2px; }
.kept-text .kept-0 { color: var(--kept-dim); text-decoration: line-through;
  text-decoration-color: var(--kept-line); }
${[1, 2, 3, 4].map((level) => `.kept-text .kept-${level} { background: color-mix(in srgb, `
    + `var(--kept-all) ${[0, 10, 18, 26, 34][level]}%, var(--kept-page)); }`).join("\n")}
.kept-text .kept-asked { border-bottom: 2px solid var(--kept-asked); }
.kept-text .kept-here { outline: 2px solid var(--kept-asked); }
`;

  function make(parent, name, properties = {}) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key in node) node[key] = value; else node.setAttribute(key, value);
    }
    parent.append(node);
    return node;
  }

  const within = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
  const range = (count) => [...Array(count).keys()];
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const number = (value) => value.toLocaleString("en");

  // The mask as counts: of one list 0 or 1 by position, of a layer how many of its heads.
  class Mask {
    constructor(map) {
      [this.layers, this.heads, this.length] = [map.layers, map.kv_heads, map.tokens.length];
      this.stride = Math.ceil(this.length / 8);
      this.bytes = Uint8Array.from(atob(map.bits), (c) => c.charCodeAt(0));
      const expected = this.layers * this.heads * this.stride;
      if (this.bytes.length !== expected) {
        throw new Error(`it has ${this.bytes.length} bytes of bits instead of ${expected}`);
      }
      const sum = (lists) => {
        const counts = new Uint32Array(this.length);
        for (const list of lists) list.forEach((n, i) => { counts[i] += n; });
        return counts;
      };
      this.byLayer = range(this.layers).map((layer) =>
        sum(range(this.heads).map((head) => this.list(layer, head))));
      this.everywhere = sum(this.byLayer);
    }

    list(layer, head) {
      const start = (layer * this.heads + head) * this.stride;
      const bit = (i) => (this.bytes[start + (i >> 3)] >> (7 - (i & 7))) & 1;
      return new Uint8Array(this.length).map((_, i) => bit(i));
    }

    // {counts, most}: what the whole map, a layer or a head holds; most: the count of "all".
    of(layer, head) {
      if (layer === ALL) return { counts: this.everywhere, most: this.layers * this.heads };
      if (head === ALL) return { counts: this.byLayer[layer], most: this.heads };
      return { counts: this.list(layer, head), most: 1 };
    }

    static share({ counts, most }) {
      let sum = 0;
      for (const n of counts) sum += n;
      return counts.length ? sum / (most * counts.length) : 0;
    }
  }

  // Shades from "none" over "low" (the least that is held) to "all", of the element's own colours.
  function shades(element) {
    const read = (name) => getComputedStyle(element).getPropertyValue(name).trim();
    const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const low = parts(read("--kept-low")), all = parts(read("--kept-all"));
    const scale = [read("--kept-none")];
    for (let level = 0; level < LEVELS; level++) {
      const mixed = low.map((c, i) => Math.round(c + (all[i] - c) * level / (LEVELS - 1)));
      scale.push(`rgb(${mixed.join(", ")})`);
    }
    const named = ["ink", "dim", "asked"].map((name) => [name, read(`--kept-${name}`)]);
    return { scale, ...Object.fromEntries(named) };
  }

  // Stretched where shares are small: most policies keep little, and a pixel holds many positions.
  const level = (share, levels) => share > 0 ? 1 + Math.round(share ** 0.7 * (levels - 1)) : 0;

  // Rows of cells on a canvas, with names on the left and shares on the right.
  class Plot {
    constructor(parent, label, events) {
      this.box = make(parent, "div", { className: "kept-plot" });
      const properties = { tabIndex: 0, role: "img", "aria-label": label };
      this.canvas = make(this.box, "canvas", properties);
      this.cursor = make(this.box, "div", { className: "kept-cursor", hidden: true });
      this.rows = [];
      this.canvas.addEventListener("mousemove", (e) => events.point(...this.at(e)));
      this.canvas.addEventListener("click", (e) => events.pick(...this.at(e)));
      this.canvas.addEventListener("keydown", (e) => {
        if (events.key(e.key, e.shiftKey)) e.preventDefault();
      });
    }

    show(rows, length, asked, chosen) {
      Object.assign(this, { rows, length, asked, chosen });
      this.draw();
    }

    get height() { return Math.max(4, Math.min(22, Math.floor(360 / this.rows.length))); }

    get width() { return Math.max(1, this.canvas.clientWidth - LEFT - RIGHT); }

    // Row and position under the mouse; a row outside the cells is the nearest one.
    at(event) {
      const position = (event.offsetX - LEFT) * this.length / this.width;
      return [within(event.offsetY / this.height, this.rows.length), within(position, this.length)];
    }

    point(position) {
      this.cursor.hidden = position === null;
      this.cursor.style.left = `${LEFT + (position + 0.5) * this.width / this.length}px`;
    }

    draw() {
      if (!this.canvas.clientWidth || !this.rows.length) return; // hidden: drawn when it is seen
      const dense = globalThis.devicePixelRatio || 1, high = this.rows.length * this.height;
      this.canvas.style.height = `${high + BELOW}px`;
      this.canvas.width = Math.round(this.canvas.clientWidth * dense);
      this.canvas.height = Math.round((high + BELOW) * dense);
      const brush = this.canvas.getContext("2d"), colours = shades(this.box);
      brush.scale(dense, dense);
      brush.font = "11px system-ui, sans-serif";
      brush.textBaseline = "middle";
      this.rows.forEach((row, index) => this.drawRow(brush, colours, row, index));
      this.drawAxis(brush, colours, high);
    }

    // Cells of one row: at most one per pixel, equal neighbours joined.
    drawRow(brush, colours, row, index) {
      const top = index * this.height, gap = this.height > 6 ? 1 : 0;
      const bins = Math.min(this.length, Math.floor(this.width));
      const edge = (bin) => Math.floor(bin * this.length / bins);
      let start = 0, shown = -1;
      const paint = (end) => {
        brush.fillStyle = colours.scale[shown];
        const left = start * this.width / bins, width = (end - start) * this.width / bins;
        brush.fillRect(LEFT + left, top, width, this.height - gap);
      };
      for (let bin = 0; bin < bins; bin++) {
        const counts = row.counts.subarray(edge(bin), edge(bin + 1));
        const next = level(Mask.share({ counts, most: row.most }), LEVELS);
        if (next !== shown) {
          if (bin) paint(bin);
          [start, shown] = [bin, next];
        }
      }
      paint(bins);
      this.drawNames(brush, colours, row, index, top);
    }

    drawNames(brush, colours, row, index, top) {
      const chosen = index === this.chosen;
      [brush.strokeStyle, brush.lineWidth] = [colours.asked, 2];
      if (chosen) brush.strokeRect(LEFT - 1, top, this.width + 2, this.height - 1);
      // Names of low rows would overlap: only every so many are written.
      const every = Math.ceil(12 / this.height);
      if (index % every && !chosen) return;
      brush.fillStyle = chosen ? colours.ink : colours.dim;
      brush.textAlign = "right";
      brush.fillText(row.name, LEFT - 6, top + this.height / 2);
      brush.fillText(percent(row.share), LEFT + this.width + RIGHT - 4, top + this.height / 2);
    }

    drawAxis(brush, colours, high) {
      brush.fillStyle = colours.asked;
      for (const [start, stop] of this.asked) {
        const scale = this.width / this.length;
        brush.fillRect(LEFT + start * scale, high, Math.max(2, (stop - start) * scale), 4);
      }
      const rough = this.length / Math.max(2, this.width / 90);
      const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
      const step = power * [1, 2, 5, 10].find((n) => n * power >= rough);
      brush.fillStyle = colours.dim;
      brush.textAlign = "center";
      for (let position = 0; position < this.length; position += step) {
        const x = LEFT + (position + 0.5) * this.width / this.length;
        brush.fillText(number(position), x, high + 13);
      }
    }
  }

  // The text, one span per token; `show` shades them by what is chosen.
  class Text {
    constructor(parent, map, events) {
      const own = { className: "kept-text", role: "region", tabIndex: 0 };
      this.box = make(parent, "div", { ...own, "aria-label": "Text of the prompt" });
      const asked = (map.asked || []).map(([start, stop]) => range(stop).slice(start));
      this.asked = new Set(asked.flat());
      this.spans = map.tokens.map((token) => {
        return make(this.box, "span", { textContent: token.replaceAll("\n", "↵\n") });
      });
      const places = new Map(this.spans.map((span, i) => [span, i]));
      this.box.addEventListener("mouseover", (e) => {
        if (places.has(e.target)) events.point(places.get(e.target));
      });
      this.here = null;
    }

    show({ counts, most }) {
      this.spans.forEach((span, i) => {
        const shade = `kept-${level(counts[i] / most, TEXT_LEVELS)}`;
        const name = this.asked.has(i) ? `${shade} kept-asked` : shade;
        if (span.className !== name) span.className = name;
      });
    }

    point(position, scroll) {
      if (this.here) this.here.classList.remove("kept-here");
      this.here = position === null ? null : this.spans[position];
      this.here?.classList.add("kept-here");
      if (!this.here || !scroll) return;
      // Within the box only: scrollIntoView would move the page as well.
      this.box.scrollTop = this.here.offsetTop - this.box.offsetTop - this.box.clientHeight / 2;
    }
  }

  class KeptMap {
    constructor(element, map) {
      this.map = map;
      this.mask = new Mask(map);
      this.asked = map.asked || [];
      [this.layer, this.head, this.position] = [ALL, ALL, null];
      this.root = make(element, "section", { className: "kept-map", "aria-label": map.title });
      make(this.root, "h3", { textContent: map.title });
      this.makeBar();
      this.status = make(this.root, "div", { className: "kept-status", role: "status" });
      const label = "Layers down, positions across. Arrow keys choose a layer and a position.";
      this.layersPlot = new Plot(this.root, label, this.events(false));
      this.headsPlot = new Plot(this.root, "KV heads of the chosen layer", this.events(true));
      this.text = new Text(this.root, map, { point: (i) => this.point(i, false) });
      this.choose(ALL, ALL);
      this.watch();
    }

    makeBar() {
      const bar = make(this.root, "div", { className: "kept-bar" });
      const choice = (label, count, changed) => {
        const select = make(make(bar, "label", { textContent: `${label} ` }), "select");
        make(select, "option", { value: ALL, textContent: "all" });
        range(count).forEach((i) => make(select, "option", { value: i, textContent: i }));
        select.addEventListener("change", () => changed(Number(select.value)));
        return select;
      };
      this.layerChoice = choice("Layer", this.mask.layers, (i) => this.choose(i, ALL));
      this.headChoice = choice("KV head", this.mask.heads, (i) => this.choose(this.layer, i));
      const scale = make(bar, "span", { className: "kept-scale", textContent: "held by none" });
      this.samples = SAMPLES.map((shade) => {
        const share = shade ? percent(((shade - 1) / (LEVELS - 1)) ** (1 / 0.7)) : "none";
        return make(scale, "i", { title: shade === 1 ? "the least" : share });
      });
      scale.append("all KV heads");
      if (this.asked.length) make(bar, "span", { textContent: "orange line: what is asked for" });
    }

    events(ofHeads) {
      const at = (row) => ofHeads ? [this.layer, row] : [row, ALL];
      const point = (row, position) => {
        this.status.setAttribute("aria-live", "off"); // a mouse would make it speak all the time
        this.point(position, false, ...at(row));
      };
      return {
        point,
        pick: (row, position) => { this.choose(...at(row)); this.point(position, true); },
        key: (key, shift) => this.key(key, shift, ofHeads, (row) => this.choose(...at(row))),
      };
    }

    // Arrows, Home, End and Escape; whether the key was used.
    key(key, shift, ofHeads, choose) {
      const row = ofHeads ? this.head : this.layer;
      const rows = ofHeads ? this.mask.heads : this.mask.layers;
      const step = shift ? Math.ceil(this.mask.length / 20) : 1;
      const move = (to) => {
        this.status.setAttribute("aria-live", "polite");
        this.point(within(to, this.mask.length), true);
      };
      const at = this.position ?? -1;
      const actions = {
        ArrowUp: () => choose(within(row - 1, rows)),
        ArrowDown: () => choose(within(row + 1, rows)),
        ArrowLeft: () => move(at - step),
        ArrowRight: () => move(at + step),
        Home: () => move(0),
        End: () => move(this.mask.length - 1),
        Escape: () => this.choose(ofHeads && this.head !== ALL ? this.layer : ALL, ALL),
      };
      actions[key]?.();
      return key in actions;
    }

    choose(layer, head) {
      [this.layer, this.head] = [layer, layer === ALL ? ALL : head];
      this.layerChoice.value = this.layer;
      this.headChoice.value = this.head;
      this.headChoice.disabled = layer === ALL;
      this.headsPlot.box.hidden = layer === ALL;
      this.text.show(this.mask.of(this.layer, this.head));
      this.draw();
      this.point(this.position, false);
    }

    draw() {
      const row = (name, held) => ({ name, ...held, share: Mask.share(held) });
      const { layers, heads, length } = this.mask;
      const all = range(layers).map((i) => row(`layer ${i}`, this.mask.of(i, ALL)));
      this.layersPlot.show(all, length, this.asked, this.layer);
      if (this.layer !== ALL) {
        const own = range(heads).map((i) => row(`head ${i}`, this.mask.of(this.layer, i)));
        this.headsPlot.show(own, length, this.asked, this.head);
      }
      const { scale } = shades(this.root);
      SAMPLES.forEach((shade, i) => { this.samples[i].style.background = scale[shade]; });
    }

    // Points at a position in map and text; layer and head: where the mouse is, if not as chosen.
    point(position, scroll, layer = this.layer, head = this.head) {
      this.position = position;
      this.layersPlot.point(position);
      this.headsPlot.point(position);
      this.text.point(position, scroll);
      this.status.textContent = this.sentence(position, layer, head);
    }

    sentence(position, layer, head) {
      const held = this.mask.of(layer, head);
      const where = layer === ALL ? "all layers" : head === ALL ? `layer ${layer}`
        : `layer ${layer}, KV head ${head}`;
      if (position === null) return `${where}: ${percent(Mask.share(held))} of the entries held`;
      const token = JSON.stringify(this.map.tokens[position]);
      const count = `${held.counts[position]} of ${held.most}`;
      const kept = held.most === 1 ? (held.counts[position] ? "held" : "dropped")
        : `held by ${count} ${layer === ALL ? "lists" : "KV heads"}`;
      return `position ${number(position)} ${token}: ${kept} (${where})`;
    }

    watch() {
      new ResizeObserver(() => this.draw()).observe(this.root);
      const dark = matchMedia("(prefers-color-scheme: dark)");
      dark.addEventListener("change", () => this.draw());
    }
  }

  return (element, map) => {
    if (!document.getElementById("kept-map-style")) {
      make(document.head, "style", { id: "kept-map-style", textContent: STYLE });
    }
    try {
      return new KeptMap(element, map);
    } catch (error) {
      make(element, "p", { textContent: `This map cannot be drawn: ${error.message}.` });
      return null;
    }
  };
})();
