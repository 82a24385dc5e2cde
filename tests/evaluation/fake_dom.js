// As much of a browser as kept_map.js uses: elements, events, and a canvas that notes what is
// drawn. Loads the script named first; the rest is for the script that the tests give.
"use strict";
const fs = require("fs");
const vm = require("vm");

const COLOURS = {
  "--kept-none": "#eef1f5", "--kept-low": "#c6dbef", "--kept-all": "#08306b",
  "--kept-ink": "#1b2430", "--kept-dim": "#667080", "--kept-asked": "#b34700",
  "--kept-line": "#c3cad4",
};
const drawn = ["fillRect", "strokeRect", "fillText", "scale"];

class Brush {
  constructor() {
    this.calls = [];
    for (const name of drawn) {
      this[name] = (...values) => this.calls.push([name, this.fillStyle, ...values]);
    }
  }
}

class Element {
  constructor(name) {
    Object.assign(this, {
      name, id: "", className: "", hidden: false, tabIndex: -1, value: "", disabled: false,
      children: [], handlers: {}, attributes: {}, style: {}, own: "", offsetTop: 0, scrollTop: 0,
      clientHeight: 100, clientWidth: name === "canvas" ? Element.width : 0,
    });
    this.classList = {
      add: (word) => { this.className += ` ${word}`; },
      remove: (word) => { this.className = this.className.split(" ").filter((w) => w !== word).join(" "); },
    };
  }
  append(node) { this.children.push(node); }
  setAttribute(key, value) { this.attributes[key] = value; }
  addEventListener(kind, handler) { this.handlers[kind] = handler; }
  fire(kind, event = {}) { this.handlers[kind]({ preventDefault() {}, ...event }); }
  set textContent(text) { this.own = text; }
  get textContent() { return this.own + this.children.map((c) => c.textContent ?? c).join(""); }
  getContext() { return (this.brush = new Brush()); }
  find(test) {
    const below = this.children.filter((c) => c instanceof Element).flatMap((c) => c.find(test));
    return test(this) ? [this, ...below] : below;
  }
}
Element.width = 310;

const head = new Element("head");
globalThis.document = {
  head,
  createElement: (name) => new Element(name),
  getElementById: (id) => head.find((node) => node.id === id)[0],
};
globalThis.getComputedStyle = () => ({ getPropertyValue: (name) => COLOURS[name] });
globalThis.ResizeObserver = class { observe() {} };
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.Element = Element;
vm.runInThisContext(fs.readFileSync(process.argv[2], "utf8"));
eval(fs.readFileSync(0, "utf8"));
