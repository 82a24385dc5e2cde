// As much of a browser as report.html uses. Runs the scripts of the page named first, then the
// statements on standard input, which print what the tests look at.
"use strict";
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], handlers: {}, parentNode: null,
      value: "", checked: false, hidden: false, className: "", title: "", type: "", scope: "",
      style: "", own: "" });
  }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Element) node.parentNode = this;
      this.children.push(node);
    }
  }
  replaceChildren(...nodes) { this.children = []; this.own = ""; this.append(...nodes); }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  getAttribute(key) { return this.attributes[key] ?? null; }
  addEventListener(kind, handler) { (this.handlers[kind] ??= []).push(handler); }
  focus() { document.activeElement = this; }
  closest(selector) {
    const key = selector.slice(1, -1);
    return key in this.attributes ? this : this.parentNode && this.parentNode.closest(selector);
  }
  fire(kind, target = this) {
    for (let node = this; node; node = node.parentNode) {
      for (const handler of node.handlers[kind] ?? []) handler({ target, preventDefault() {} });
    }
  }
  set textContent(text) { this.children = []; this.own = String(text); }
  get textContent() { return this.own + this.children.map((c) => c.textContent ?? c).join(""); }
  find(test) {
    const below = this.children.filter((c) => c instanceof Element).flatMap((c) => c.find(test));
    return test(this) ? [this, ...below] : below;
  }
  all(name) { return this.find((node) => node.name === name); }
}

const page = fs.readFileSync(process.argv[2], "utf8");
const ids = {};
for (const [, name, id] of page.matchAll(/<([a-z0-9]+)[^>]*? id="([^"]+)"/g)) {
  ids[id] = new Element(name);
  new Element("label").append(ids[id]);
}
for (const [, id, options] of page.matchAll(/<select id="([^"]+)">(.*?)<\/select>/g)) {
  ids[id].value = (options.match(/value="([^"]+)"/) ?? ["", ""])[1];
}
ids["table-policies"].value = "all";
const scripts = [...page.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
ids.data.own = scripts.find(([, kind]) => kind.includes("json"))[2];
globalThis.Element = Element;
globalThis.byIds = ids;
globalThis.document = {
  getElementById: (id) => ids[id] ?? null,
  createElement: (name) => new Element(name),
  createElementNS: (space, name) => new Element(name),
};
for (const [, kind, text] of scripts.filter(([, kind]) => !kind.includes("json"))) {
  vm.runInThisContext(text);
  // The map has tests of its own; here it notes what it is given.
  globalThis.maps ??= [];
  globalThis.drawKeptMap = (element, map) => maps.push(map);
}
vm.runInThisContext(fs.readFileSync(0, "utf8"));
