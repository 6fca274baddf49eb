// Elements and small charts. Text only ever becomes text nodes and attribute values: names of
// workers and models come from elsewhere and are not to be trusted.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "-";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function percent(value) {
  return value === null || value === undefined ? "-" : `${(value * 100).toFixed(1)} %`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "-";
  if (ms < 1000) return `${number(ms, ms < 10 ? 1 : 0)} ms`;
  for (const [size, unit] of [[86400e3, "d"], [3600e3, "h"], [60e3, "min"]]) {
    if (ms >= size) return `${number(ms / size, 1)} ${unit}`;
  }
  return `${number(ms / 1000, 1)} s`;
}

export function bytes(n) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (n >= size) return `${number(n / size, 1)} ${unit}`;
  }
  return `${n} B`;
}

const WIDTH = 400;
const HEIGHT = 90;
const BASE = 76; // y of the axis; what is below is for its labels

// A line chart. `series`: [{name, values}], as long as `times` (Unix seconds); null = a hole.
export function chart(title, times, series, show, top = null) {
  const known = series.flatMap((s) => s.values).filter((v) => v !== null);
  const most = top ?? Math.max(1e-9, ...known);
  const first = times[0] ?? 0;
  const span = Math.max(1, (times.at(-1) ?? 1) - first);
  const x = (t) => ((t - first) / span) * WIDTH;
  const y = (v) => BASE - (Math.min(v, most) / most) * (BASE - 6);
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `${title}: ${series.map((s) => `${s.name} ${latest(s.values, show)}`).join(", ")}`,
  });
  for (const line of [BASE, 6]) {
    picture.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: line, y2: line }));
  }
  series.forEach((one, i) => {
    picture.append(svg("path", { class: `s${i}`, d: path(times.map(x), one.values, y) }));
  });
  const names = series.map((s, i) => el("span", { class: `k${i}` }, s.name));
  return el(
    "figure",
    {},
    el("figcaption", {}, el("span", {}, title, " ", ...spaced(names)), el("b", {}, latest(series[0].values, show))),
    picture,
    el("figcaption", {}, el("span", {}, times.length ? `${Math.round(span / 60)} min` : "no samples yet"), el("span", {}, `top ${show(known.length ? most : null)}`)),
  );
}

function latest(values, show) {
  return show(values.findLast((v) => v !== null) ?? null);
}

function spaced(nodes) {
  return nodes.length < 2 ? [] : nodes.flatMap((node) => [node, " "]);
}

function path(xs, values, y) {
  let drawn = "";
  let pen = false;
  values.forEach((v, i) => {
    if (v === null) {
      pen = false;
      return;
    }
    // A lone point is a short line, or it would not be seen.
    const lone = !pen && (values[i + 1] ?? null) === null;
    drawn += `${pen ? "L" : "M"}${xs[i].toFixed(1)} ${y(v).toFixed(1)}`;
    if (lone) drawn += "h2";
    pen = true;
  });
  return drawn;
}
