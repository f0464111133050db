"use strict";
// What both pages share. All text of models and users goes through textContent, never through HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. Names with "on" are event listeners. */
function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "text", "title", "g"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Upright bars: [label, height, text above it], heights up to `top`. */
function bars(rows, top, label) {
  const [width, height, floor] = [400, 190, 160];
  const slot = width / rows.length;
  const drawing = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  rows.forEach(([name, value, above], index) => {
    const tall = top ? (value / top) * (floor - 22) : 0;
    const [x, wide] = [index * slot + slot * 0.15, Math.min(slot * 0.7, 60)];
    const middle = x + wide / 2;
    drawing.append(
      element("rect", { x, y: floor - tall, width: wide, height: tall, rx: 2, fill: "var(--accepted)" }),
      element("text", { x: middle, y: floor - tall - 5, "text-anchor": "middle" }, above),
      element("text", { x: middle, y: floor + 16, "text-anchor": "middle", class: "dim" }, name),
    );
  });
  drawing.append(element("line", { x1: 0, x2: width, y1: floor, y2: floor, class: "axis" }));
  return drawing;
}
