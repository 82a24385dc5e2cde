// A map of the entries that a policy kept: drawKeptMap(place, map).
//
// map = {
//   tokens: [string],            the prompt, one text per position
//   layers: L, kv_heads: G,
//   bits: string,                base64 of rows of bits, [L][G][N], each row padded to whole bytes,
//                                the first position in the highest bit (numpy.packbits)
//   title: string,
//   asked: [[start, stop], ...]  positions to mark; may be empty or missing
// }
//
// Layers go down and positions across; the shade is the share of a layer's KV heads that hold the
// position. A click on a layer opens its heads and restricts the text below to it. The place may be
// hidden at first. Tokens are never read as HTML.
globalThis.drawKeptMap = (() => {
  "use strict";

  const TEXT_LEVELS = 4; // shades of the text
  const LEFT = 58, RIGHT = 52, BELOW = 22; // pixels beside and below the cells
  const LEAST = 1e-6; // smallest share with another colour than "none"
  const STRETCH = 0.7; // exponent that spreads small shares, which are the usual ones
  const ALL = -1;

  const within = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const number = (value) => value.toLocaleString("en");

  // The mask as counts by position: 0 or 1 for a list, the number of heads that hold it for a layer.
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
      this.byLayer = d3.range(this.layers).map((layer) =>
        sum(d3.range(this.heads).map((head) => this.list(layer, head))));
      this.everywhere = sum(this.byLayer);
    }

    list(layer, head) {
      const start = (layer * this.heads + head) * this.stride;
      const bit = (i) => (this.bytes[start + (i >> 3)] >> (7 - (i & 7))) & 1;
      return new Uint8Array(this.length).map((_, i) => bit(i));
    }

    // {counts, most} of the whole map, a layer or a head; most: the count of a position held by all.
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

  // Colours of the theme: Plot paints cells into an image, where CSS variables do not work.
  const colours = (...names) => {
    const theme = getComputedStyle(document.documentElement);
    return names.map((name) => theme.getPropertyValue(`--${name}`).trim());
  };
  const shades = { type: "pow", exponent: STRETCH };

  // Rows of cells, with names on the left and shares on the right.
  class Rows {
    constructor(parent, label, events) {
      this.place = element("div", { className: "chart", tabIndex: 0, role: "img",
        "aria-label": label });
      this.cursor = element("div", { className: "kept-cursor", hidden: true });
      this.frame = element("div", { className: "kept-row", hidden: true });
      this.box = element("div", { className: "kept-plot" }, this.place, this.cursor, this.frame);
      parent.append(this.box);
      this.rows = [];
      this.place.addEventListener("mousemove", (e) => events.point(...this.at(e)));
      this.place.addEventListener("click", (e) => events.pick(...this.at(e)));
      this.place.addEventListener("keydown", (e) => {
        if (events.key(e.key, e.shiftKey)) e.preventDefault();
      });
    }

    show(rows, length, asked) {
      Object.assign(this, { rows, length, asked });
      showChart(this.place, (width) => this.draw(width));
    }

    get height() { return Math.max(4, Math.min(22, Math.floor(360 / this.rows.length))); }

    // Row and position under the mouse; outside the cells the nearest row.
    at(event) {
      const { left, top, width } = this.place.getBoundingClientRect();
      const position = (event.clientX - left - LEFT) / (width - LEFT - RIGHT) * this.length;
      const row = (event.clientY - top) / this.height;
      return [within(row, this.rows.length), within(position, this.length)];
    }

    point(position) {
      this.cursor.hidden = position === null;
      const share = (position + 0.5) / this.length;
      this.cursor.style.left = `calc(${LEFT}px + ${share} * (100% - ${LEFT + RIGHT}px))`;
      this.cursor.style.height = `${this.rows.length * this.height}px`;
    }

    choose(row) {
      this.frame.hidden = row === ALL;
      Object.assign(this.frame.style, { left: `${LEFT - 2}px`, right: `${RIGHT - 2}px`,
        top: `${row * this.height - 1}px`, height: `${this.height + 2}px` });
    }

    // At most one cell per pixel, all in one image: an element per cell would take seconds.
    draw(width) {
      const { rows, length, asked } = this, high = rows.length * this.height;
      const cells = Math.max(1, Math.min(length, Math.floor(width - LEFT - RIGHT)));
      const edge = (cell) => Math.floor(cell * length / cells);
      const values = rows.flatMap(({ counts, most }) => d3.range(cells).map((cell) =>
        Mask.share({ counts: counts.subarray(edge(cell), edge(cell + 1)), most })));
      // Names of low rows would overlap, so only every n-th row has one.
      const named = d3.range(0, rows.length, Math.ceil(12 / this.height));
      const side = (anchor, text) => Plot.axisY(named, { anchor, text, y: (row) => row + 0.5,
        tickSize: 0, color: "var(--dim)" });
      const positions = d3.ticks(0, length, width / 90).filter(Number.isInteger);
      return Plot.plot({
        width, height: high + BELOW, marginLeft: LEFT, marginRight: RIGHT, marginTop: 0,
        marginBottom: BELOW, x: { domain: [0, length], label: null },
        y: { domain: [rows.length, 0], label: null },
        color: { ...shades, domain: [0, LEAST, 1], range: colours("none", "low", "most") },
        marks: [
          Plot.raster(values, { width: cells, height: rows.length, x1: 0, x2: length, y1: 0,
            y2: rows.length, imageRendering: "pixelated" }),
          Plot.ruleY(this.height > 6 ? d3.range(1, rows.length) : [], { stroke: "var(--page)" }),
          // Square ends make short ranges visible.
          Plot.ruleY(asked, { x1: "0", x2: "1", y: () => rows.length, dy: 3, strokeWidth: 4,
            strokeLinecap: "square", stroke: "var(--mark)" }),
          Plot.axisX(positions, { tickSize: 4, tickFormat: number, color: "var(--dim)" }),
          side("left", (row) => rows[row].name), side("right", (row) => percent(rows[row].share)),
        ],
      });
    }
  }

  // The text, one span per token; `show` shades the spans by the chosen lists.
  class Text {
    constructor(parent, map, events) {
      const own = { className: "kept-text", role: "region", tabIndex: 0 };
      this.asked = new Set((map.asked || []).flatMap(([start, stop]) => d3.range(start, stop)));
      this.spans = map.tokens.map((token) =>
        element("span", { textContent: token.replaceAll("\n", "↵\n") }));
      this.box = element("div", { ...own, "aria-label": "Text of the prompt" });
      for (const span of this.spans) this.box.append(span); // too many to be arguments
      parent.append(this.box);
      const places = new Map(this.spans.map((span, i) => [span, i]));
      this.box.addEventListener("mouseover", (e) => {
        if (places.has(e.target)) events.point(places.get(e.target));
      });
      this.here = null;
    }

    show({ counts, most }) {
      this.spans.forEach((span, i) => {
        const stretched = Math.round((counts[i] / most) ** STRETCH * (TEXT_LEVELS - 1));
        const shade = `kept-${counts[i] ? 1 + stretched : 0}`;
        const name = this.asked.has(i) ? `${shade} kept-asked` : shade;
        if (span.className !== name) span.className = name;
      });
    }

    point(position, scroll) {
      if (this.here) this.here.classList.remove("kept-here");
      this.here = position === null ? null : this.spans[position];
      this.here?.classList.add("kept-here");
      if (!this.here || !scroll) return;
      // Scrolls the box only: scrollIntoView would move the page as well.
      this.box.scrollTop = this.here.offsetTop - this.box.offsetTop - this.box.clientHeight / 2;
    }
  }

  class KeptMap {
    constructor(place, map) {
      this.map = map;
      this.mask = new Mask(map);
      this.asked = map.asked || [];
      [this.layer, this.head, this.position] = [ALL, ALL, null];
      this.root = element("section", { className: "kept-map", "aria-label": map.title },
        element("h3", {}, map.title));
      place.append(this.root);
      this.makeBar();
      this.status = element("div", { className: "kept-status", role: "status" });
      this.root.append(this.status);
      const label = "Layers down, positions across. Arrow keys choose a layer and a position.";
      this.layersPlot = new Rows(this.root, label, this.events(false));
      this.headsPlot = new Rows(this.root, "KV heads of the chosen layer", this.events(true));
      this.text = new Text(this.root, map, { point: (i) => this.point(i, false) });
      this.show(this.layersPlot, d3.range(this.mask.layers), "layer", (i) => this.mask.of(i, ALL));
      this.choose(ALL, ALL);
    }

    makeBar() {
      const bar = element("div", { className: "kept-bar" });
      const choice = (label, count, changed) => {
        const options = [[ALL, "all"], ...d3.range(count).map((i) => [i, i])];
        const select = element("select", {}, ...options.map(([value, textContent]) =>
          element("option", { value, textContent })));
        select.addEventListener("change", () => changed(Number(select.value)));
        bar.append(element("label", {}, `${label} `, select));
        return select;
      };
      this.layerChoice = choice("Layer", this.mask.layers, (i) => this.choose(i, ALL));
      this.headChoice = choice("KV head", this.mask.heads, (i) => this.choose(this.layer, i));
      const scale = element("div", { className: "chart kept-scale", role: "img",
        "aria-label": "Shades from held by few to held by all KV heads" });
      bar.append(scale, element("span", { className: "kept-none" }, "held by none"));
      if (this.asked.length) bar.append("orange line: what is asked for");
      this.root.append(bar);
      showChart(scale, (width) => Plot.legend({ width, label: "KV heads that hold a position",
        color: { ...shades, domain: [0, 1], range: colours("low", "most") }, tickFormat: "%",
        ticks: [0, 0.25, 0.5, 0.75, 1] }));
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

    // Handles arrows, Home, End and Escape; returns whether the key was used.
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
      this.layersPlot.choose(layer);
      this.headsPlot.choose(this.head);
      this.headsPlot.box.hidden = layer === ALL;
      this.text.show(this.mask.of(this.layer, this.head));
      if (layer !== ALL) {
        const heads = d3.range(this.mask.heads);
        this.show(this.headsPlot, heads, "head", (i) => this.mask.of(layer, i));
      }
      this.point(this.position, false);
    }

    show(plot, numbers, name, of) {
      const rows = numbers.map((i) => {
        const held = of(i);
        return { name: `${name} ${i}`, ...held, share: Mask.share(held) };
      });
      plot.show(rows, this.mask.length, this.asked);
    }

    // Marks a position in map and text; layer and head under the mouse, by default the chosen ones.
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
  }

  return (place, map) => {
    try {
      return new KeptMap(place, map);
    } catch (error) {
      place.append(element("p", {}, `This map cannot be drawn: ${error.message}.`));
      return null;
    }
  };
})();
