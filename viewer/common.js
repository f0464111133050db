"use strict";
// What both pages share. All text of models and users goes through textContent, never through HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);
const link = (href, text) => element("a", { href }, text);

/** An element with attributes and children; strings become text. Names with "on" are event listeners. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Upright bars: [name below, share of the full height, text above]. The label says the same to a screen reader. */
function bars(rows, label) {
  const columns = rows.map(([name, share, above]) => {
    const block = element("div", { class: "block", style: `--share: ${share}` });
    return element("div", {}, above, block, element("span", {}, name));
  });
  return element("div", { class: "bars", role: "img", "aria-label": label }, ...columns);
}

/** Lying bars, one below the other: [name, share of the full width, text after it, class]. */
function meters(rows, kind = "") {
  const lines = rows.map(([name, share, value, classes]) => {
    const track = element("span", { class: "track" }, element("span", { style: `width: ${100 * share}%` }));
    return element("div", { class: classes }, element("span", {}, name), track, element("span", {}, value));
  });
  return element("div", { class: `meters ${kind}` }, ...lines);
}
