// The operators' page: polls the JSON endpoints (see kvindexd/ui) while it is visible.

import { bytes, chart, duration, el, number, percent } from "./charts.js";
import * as explain from "./explain.js";

const EVERY = 2000; // milliseconds
const KEPT = 300; // samples
const ROWS = 200; // of the table, at most: the filter finds the others
const $ = (id) => document.getElementById(id);

const tier = (name) => (w) => w.blocks[name] ?? 0;
const COLUMNS = [
  { title: "Worker", sort: name, kind: "name", cell: (w) => [el("a", { href: link(w) }, name(w)), el("small", { title: w.detail }, w.detail)] },
  { title: "Model", sort: (w) => w.model },
  { title: "State", sort: (w) => w.state, cell: (w) => el("span", { class: `state ${w.state}` }, w.state) },
  { title: "Evidence", help: "since the last applied batch or heartbeat", sort: (w) => w.evidence_ms ?? Infinity, cell: (w) => duration(w.evidence_ms), n: true },
  { title: "Device", help: "blocks", sort: tier("device"), n: true },
  { title: "Host", help: "blocks", sort: tier("host"), n: true, rare: true },
  { title: "Storage", help: "blocks", sort: tier("storage"), n: true, rare: true },
  { title: "Events/s", sort: (w) => w.events_per_second, cell: (w) => number(w.events_per_second, 1), n: true },
  { title: "Lag", help: "of the last batch: engine's clock to visible", sort: (w) => w.lag_ms ?? -1, cell: (w) => duration(w.lag_ms), n: true },
  { title: "Gaps", sort: (w) => w.gaps, n: true },
  { title: "Lost", help: "batches that no replay brought back", sort: (w) => w.lost_batches, n: true, warn: true },
  { title: "Restarts", sort: (w) => w.restarts, n: true },
  { title: "Orphans", help: "stores whose parent was not known yet", sort: (w) => w.orphans, n: true },
  { title: "Filtered", help: "events of KV-cache groups that are not indexed", sort: (w) => w.filtered, n: true },
  { title: "Picks", sort: (w) => w.picks, n: true },
  { title: "Hit ratio", help: "tokens expected to be reused, of its picks' prompt tokens", sort: (w) => w.hit_ratio ?? -1, cell: (w) => percent(w.hit_ratio), n: true },
];

const history = { next: 0, columns: {} };
let fleet = { workers: [] };
let order = { column: COLUMNS[0], down: false };
let columns = COLUMNS; // those that are shown: rare ones where some worker has any
let page = "";

function name(w) {
  return `${w.namespace ? `${w.namespace}/` : ""}${w.worker_id}#${w.dp_rank}`;
}

function link(w) {
  const { namespace, worker_id, dp_rank } = w;
  return `#/worker?${new URLSearchParams({ namespace, worker_id, dp_rank })}`;
}

async function get(path) {
  const response = await fetch(`ui/api/${path}`, { signal: AbortSignal.timeout(10000) });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `status ${response.status}`);
  return body;
}

// -- the fleet ------------------------------------------------------------------------------------

async function showFleet() {
  const [now, samples] = await Promise.all([get("fleet"), get(`history?since=${history.next}`)]);
  fleet = now;
  keep(samples);
  explain.offer(fleet.workers);
  about();
  if (page !== "fleet") return;
  tiles();
  charts();
  table();
}

function keep(samples) {
  const fresh = samples.next - (samples.time.length ?? 0) !== history.next;
  for (const [key, values] of Object.entries(samples)) {
    if (!Array.isArray(values)) continue;
    const before = fresh ? [] : (history.columns[key] ?? []);
    history.columns[key] = [...before, ...values].slice(-KEPT);
  }
  history.next = samples.next;
}

function about() {
  const ready = fleet.not_ready ? `not ready: ${fleet.not_ready}` : "ready";
  $("about").textContent = `${fleet.role} ${fleet.version}, ${ready}`;
  $("about").className = fleet.not_ready ? "warn" : "";
}

function tiles() {
  const states = new Map();
  for (const w of fleet.workers) states.set(w.state, (states.get(w.state) ?? 0) + 1);
  const { index, scoring } = fleet;
  const shown = [
    ...[...states].sort().map(([state, n]) => [number(n), state, `state ${state}`]),
    [number(index.blocks), "blocks indexed"],
    [bytes(index.bytes), "index"],
    [number(fleet.lag), "feed entries behind"],
    [number(scoring.requests), "scoring calls"],
    [percent(last("hit_ratio") ?? last("pick_ratio")), "hit ratio"],
  ];
  $("tiles").replaceChildren(
    ...shown.map(([value, label, kind]) => el("div", { class: "tile" }, el("b", { class: kind }, value), el("span", {}, label))),
  );
}

function last(column) {
  return history.columns[column]?.findLast((v) => v !== null);
}

function charts() {
  const c = history.columns;
  $("charts").replaceChildren(
    chart("Events per second", c.time, [{ name: "events", values: c.events }], (v) => number(v, 1)),
    chart("Lag", c.time, [{ name: "mean", values: c.lag_ms }], duration),
    chart("Hit ratio", c.time, [{ name: "best worker", values: c.hit_ratio }, { name: "picks", values: c.pick_ratio }], percent, 1),
    chart("Calls per second", c.time, [{ name: "calls", values: c.requests }], (v) => number(v, 1)),
  );
}

function table() {
  const { column, down } = order;
  columns = COLUMNS.filter((c) => !c.rare || fleet.workers.some((w) => c.sort(w)));
  $("workers").tHead.replaceChildren(el("tr", {}, ...columns.map(heading)));
  const words = $("filter").value.toLowerCase().split(/\s+/).filter((word) => word);
  const fits = (w) => words.every((word) => `${name(w)} ${w.model} ${w.state} ${w.detail}`.toLowerCase().includes(word));
  const key = column.sort;
  const sorted = fleet.workers.filter(fits).sort((a, b) => compare(key(a), key(b)) || compare(name(a), name(b)));
  if (down) sorted.reverse();
  $("workers").tBodies[0].replaceChildren(...sorted.slice(0, ROWS).map(row));
  const all = fleet.workers.length + fleet.left_off;
  $("shown").textContent = all ? `${Math.min(sorted.length, ROWS)} of ${all}` : "no workers registered; see kvindexd workers add";
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

function heading(column) {
  const chosen = order.column === column;
  const mark = !chosen ? "" : order.down ? " ▾" : " ▴";
  const button = el("button", { type: "button", title: column.help }, column.title + mark);
  button.addEventListener("click", () => {
    order = { column, down: chosen ? !order.down : Boolean(column.n) };
    table();
  });
  const sorted = !chosen ? null : order.down ? "descending" : "ascending";
  return el("th", { scope: "col", class: column.n ? "n" : null, "aria-sort": sorted }, button);
}

function row(w) {
  return el(
    "tr",
    {},
    ...columns.map((column) => {
      const value = column.sort(w);
      const shown = column.cell ? column.cell(w) : column.n ? number(value) : value;
      const kind = column.warn && value > 0 ? "n warn" : (column.kind ?? (column.n ? "n" : null));
      return el("td", { class: kind }, ...[shown].flat());
    }),
  );
}

// -- one worker -----------------------------------------------------------------------------------

async function showWorker() {
  const asked = location.hash;
  const found = await get(`worker?${asked.split("?")[1]}`);
  if (location.hash !== asked) return;
  const w = found.worker;
  const facts = {
    ...found.registration,
    owner: w.owner,
    epoch: w.epoch,
    seq: w.seq,
    "evidence age": duration(w.evidence_ms),
    ...Object.fromEntries(Object.entries(w.blocks).map(([t, n]) => [`${t} blocks`, number(n)])),
  };
  const { time, events, lag_ms } = found.history;
  $("worker").replaceChildren(
    el("h2", {}, name(w), " ", el("span", { class: `state ${w.state}` }, w.state)),
    el("p", {}, w.detail, " ", el("a", { href: `#/explain?candidate=${encodeURIComponent(w.worker_id)}` }, "explain a prompt here")),
    el(
      "div",
      { class: "charts" },
      chart("Events per second", time, [{ name: "events", values: events }], (v) => number(v, 1)),
      chart("Lag", time, [{ name: "lag", values: lag_ms }], duration),
    ),
    el("h3", {}, "KV-cache groups"),
    groups(found.groups),
    el("div", { class: "two" }, el("div", {}, el("h3", {}, "Registration"), pairs(facts)), el("div", {}, el("h3", {}, "Counters"), pairs(found.counters))),
  );
}

function groups(found) {
  if (!found.length) return el("p", { class: "soft" }, "none seen yet");
  const titles = ["Group", "Kind", "Block size", "Window", "Treated as"];
  const cells = (g) => [g.idx, g.kind || "(not on the wire)", number(g.block_size), g.window || "-", g.treated_as];
  return el(
    "table",
    { id: "groups" },
    el("thead", {}, el("tr", {}, ...titles.map((t) => el("th", { scope: "col" }, t)))),
    el("tbody", {}, ...found.map((g) => el("tr", {}, ...cells(g).map((c) => el("td", {}, c))))),
  );
}

function pairs(values) {
  const shown = Object.entries(values).filter(([key, v]) => key === "dp_rank" || !["", 0, false, null].includes(v));
  const text = (v) => (typeof v === "number" ? number(v) : typeof v === "object" ? JSON.stringify(v) : v);
  const kept = shown.filter(([, v]) => typeof v !== "object" || Object.keys(v).length);
  return el("table", {}, el("tbody", {}, ...kept.map(([key, v]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, text(v))))));
}

// -- which page, and when -------------------------------------------------------------------------

function turn() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  page = ["worker", "explain"].includes(path) ? path : "fleet";
  for (const id of ["fleet", "worker", "explain"]) $(id).hidden = id !== page;
  for (const a of document.querySelectorAll("nav a")) {
    if (a.hash === `#/${page}`) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  const candidate = new URLSearchParams(query ?? "").get("candidate");
  if (page === "explain" && candidate !== null) $("candidate").value = candidate;
  if (page === "worker") $("worker").replaceChildren();
  refresh();
}

let running = false;

async function refresh() {
  if (running) return;
  running = true;
  const before = location.hash;
  try {
    await showFleet();
    if (page === "worker") await showWorker();
    $("problem").hidden = true;
  } catch (error) {
    $("problem").textContent = `kvindexd: ${error.message}`;
    $("problem").hidden = false;
  } finally {
    running = false;
  }
  if (location.hash !== before) refresh();
}

explain.start();
$("filter").addEventListener("input", table);
addEventListener("hashchange", turn);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
setInterval(() => document.hidden || refresh(), EVERY);
turn();
