// The explain form and its answer: per worker and KV-cache group a strip, one cell per block.

import { el, number, svg } from "./charts.js";

const CODES = ["missing", "device", "host", "storage", "predicted"];
const CELLS = 256; // at most, per strip; then several blocks share one, and the worst is shown
const WORST = [4, 0, 1, 2, 3]; // by code
const MAX_BODY = 1 << 20;
const $ = (id) => document.getElementById(id);

export function start() {
  $("legend").replaceChildren(
    ...[1, 2, 3, 4, 0].flatMap((code) => [
      svg("svg", { class: "key", viewBox: "0 0 1 1" }, svg("rect", { class: `h${code}`, width: 1, height: 1 })),
      CODES[code],
    ]),
  );
  $("question").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
}

// Offer the models of the fleet, each with its namespace.
export function offer(workers) {
  const found = new Map(workers.map((w) => [JSON.stringify([w.namespace, w.model]), w]));
  const wanted = [...found.keys()].sort();
  const select = $("model");
  if (wanted.join() === [...select.options].map((o) => o.value).join()) return;
  const before = select.value;
  select.replaceChildren(
    ...wanted.map((key) => {
      const w = found.get(key);
      return el("option", { value: key }, w.namespace ? `${w.namespace} / ${w.model}` : w.model);
    }),
  );
  if (found.has(before)) select.value = before;
}

async function ask() {
  const answer = $("answer");
  let question;
  try {
    question = read();
  } catch (error) {
    answer.replaceChildren(el("p", { class: "warn" }, error.message));
    return;
  }
  $("asked").textContent = "asking ...";
  try {
    const response = await fetch("ui/api/explain", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: question,
    });
    const found = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(`${found.code ?? response.status}: ${found.error ?? ""}`);
    answer.replaceChildren(...whole(found), ...found.workers.map(worker));
  } catch (error) {
    answer.replaceChildren(el("p", { class: "warn" }, error.message));
  } finally {
    $("asked").textContent = "";
  }
}

// The request's body, from the form. Throws an Error that says what is wrong.
function read() {
  const [namespace, model] = JSON.parse($("model").value || '["", ""]');
  const question = { namespace, model, lora_name: $("lora").value, cache_salt: $("salt").value };
  question.top_k = Number($("top").value) || 10;
  if ($("candidate").value) question.candidates = [$("candidate").value];
  const typed = $("prompt").value;
  if ($("kind").value === "text") {
    question.text = typed;
  } else if ($("kind").value === "token_ids") {
    const words = typed.split(/[\s,\[\]]+/).filter((word) => word);
    if (!words.length || !words.every((word) => /^\d+$/.test(word))) {
      throw new Error("token ids: expected whole numbers, such as 12, 7, 503");
    }
    question.token_ids = words.map(Number);
  } else {
    question.body = JSON.parse(typed);
    question.path = "messages" in question.body ? "/v1/chat/completions" : "input" in question.body ? "/v1/responses" : "/v1/completions";
  }
  const body = JSON.stringify(question);
  if (new Blob([body]).size > MAX_BODY) throw new Error("prompt: longer than the 1 MiB that this form takes; use kvindexd explain");
  return body;
}

// What is said of the prompt as a whole.
function whole(found) {
  const head = `prompt of ${number(found.prompt_tokens)} tokens`;
  if (!found.workers.length) return [el("p", {}, `${head}: no worker matches`)];
  const d = found.divergence;
  if (!d) return [el("p", {}, `${head}, held to its last full block`)];
  const held = `${head}, ${number(d.held_tokens)} of them held somewhere from its start on`;
  const others = d.variations.map((v) => el("li", {}, `${v.detail}: ${number(v.matched_tokens)} tokens on ${v.workers.join(", ")}`));
  return [
    el("p", {}, `${held}: ${d.detail}`),
    ...(others.length ? [el("ul", {}, ...others)] : []),
    ...d.unknown.map((words) => el("p", { class: "soft" }, words)),
  ];
}

function worker(w) {
  const tiers = ["device", "host", "storage", "predicted"]
    .filter((tier) => w[`${tier}_tokens`])
    .map((tier) => `${number(w[`${tier}_tokens`])} ${tier}`);
  const summary = [
    `${number(w.reusable_tokens)} tokens reusable${w.upper_bound ? " at most" : ""}`,
    `${number(w.matched_tokens)} matched`,
    ...tiers,
    `cost ${number(w.cost, 2)}`,
  ];
  return el(
    "article",
    { class: "explained" },
    el("h3", {}, `${w.worker_id}#${w.dp_rank} `, el("span", { class: `state ${w.state}` }, w.state), ` ${w.address}`),
    el("p", { class: "soft" }, summary.join(", "), w.reason ? `: ${w.reason}` : ""),
    ...w.groups.map(run),
  );
}

function run(group) {
  const name = `${group.idx} ${group.kind || "(kind not on the wire)"}`;
  const size = `${group.block_size} tokens a block${group.window ? `, window ${group.window}` : ""}`;
  return el(
    "div",
    { class: "run" },
    el("span", {}, name, el("br"), el("span", { class: "soft" }, size)),
    strip(group),
    el("p", {}, group.why),
  );
}

function strip(group) {
  const blocks = group.held.flatMap(([code, count]) => new Array(count).fill(code));
  const per = Math.max(1, Math.ceil(blocks.length / CELLS));
  const cells = [];
  for (let i = 0; i < blocks.length; i += per) {
    cells.push(blocks.slice(i, i + per).reduce((a, b) => (WORST[b] > WORST[a] ? b : a)));
  }
  const width = Math.max(1, cells.length);
  const words = group.held.map(([code, count]) => `${count} ${CODES[code]}`).join(", ");
  const picture = svg("svg", {
    class: "strip",
    viewBox: `0 0 ${width} 1`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": words || "no full block",
  });
  for (let i = 0; i < cells.length; ) {
    let end = i + 1;
    while (cells[end] === cells[i]) end += 1;
    picture.append(svg("rect", { class: `h${cells[i]}`, x: i, width: end - i, height: 1 }));
    i = end;
  }
  picture.append(svg("title", {}, words));
  const stop = group.stops_at / per;
  if (group.stops_at < blocks.length) {
    picture.append(svg("line", { class: "stop", x1: stop, x2: stop, y1: 0, y2: 1 }));
  }
  return picture;
}
