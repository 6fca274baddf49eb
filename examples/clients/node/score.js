// Score a prompt, pick a worker, and report the request's end, by the .proto file alone: nothing is
// generated.
//
//   npm ci --ignore-scripts
//   node score.js --address 127.0.0.1:50051 --model m --tokens prompt.json
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs, promisify } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTO = fileURLToPath(new URL("../../../proto", import.meta.url));

// gRPC itself retries by this. UNAVAILABLE: kvindexd restarts, or no worker is live just now.
// RESOURCE_EXHAUSTED: it sheds load and asks to be tried again in a few milliseconds.
const RETRIES = {
  methodConfig: [
    {
      name: [{ service: "kvindexd.v1.KVIndex" }],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.02s",
        maxBackoff: "0.5s",
        backoffMultiplier: 3,
        retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
      },
    },
  ],
};

const ADVICE = {
  NOT_FOUND:
    "no worker of this model is registered; the message lists the models that are known: " +
    "correct --model, or add the worker (kvindexd workers add)",
  UNAVAILABLE:
    "nothing answers at --address, or no worker can take the request; see whether kvindexd runs " +
    "and what `kvindexd workers list` says; a gateway now uses its own policy",
  RESOURCE_EXHAUSTED:
    "still refused after 4 attempts: the prompt is longer than limits.max_prompt_tokens, or " +
    "kvindexd is overloaded; the message says which; a gateway now uses its own policy",
  DEADLINE_EXCEEDED:
    "no answer in time; a gateway now uses its own policy, a person may raise --deadline",
  UNAUTHENTICATED: "kvindexd wants to know who asks: set KVINDEXD_TOKEN to a token of role score",
  INVALID_ARGUMENT: "the request is wrong; the message names the field",
};

function usage(problem) {
  console.error(`${problem}\nusage: node score.js --tokens FILE [--address HOST:PORT]` +
    " [--model NAME] [--deadline SECONDS] [--ca FILE] [--proto FOLDER]");
  process.exit(2);
}

function options() {
  try {
    return parseArgs({
      options: {
        address: { type: "string", default: "127.0.0.1:50051" },
        model: { type: "string", default: "" },
        tokens: { type: "string" },
        deadline: { type: "string", default: "2" },
        ca: { type: "string" },
        proto: { type: "string", default: PROTO },
      },
    }).values;
  } catch (error) {
    return usage(error.message);
  }
}

// Token ids as little-endian uint32: what kvindexd reads fastest.
function packed(tokens) {
  const isToken = (t) => Number.isInteger(t) && t >= 0 && t < 2 ** 32;
  if (!Array.isArray(tokens) || !tokens.every(isToken)) {
    throw new TypeError("integers in 0..2**32-1 are wanted");
  }
  const out = Buffer.alloc(4 * tokens.length);
  tokens.forEach((token, i) => out.writeUInt32LE(token, 4 * i));
  return out;
}

function readTokens(file) {
  try {
    return packed(JSON.parse(readFileSync(file === "-" ? 0 : file, "utf8")));
  } catch (error) {
    console.error(`--tokens ${file}: ${error.message}; expected token ids like [1, 2, 3]`);
    return process.exit(1);
  }
}

function table(rows) {
  const widths = rows[0].map((_, i) => Math.max(...rows.map((row) => String(row[i]).length)));
  for (const row of rows) {
    console.log(row.map((cell, i) => String(cell).padEnd(widths[i])).join("  ").trimEnd());
  }
}

// A client whose calls return promises and end at a deadline. With `ca` it speaks TLS.
function connect({ address, proto, deadline, ca }) {
  const definition = protoLoader.loadSync("kvindexd/v1/index.proto", {
    includeDirs: [proto],
    keepCase: true,
    longs: Number,
    enums: String,
    defaults: true,
  });
  const { KVIndex } = grpc.loadPackageDefinition(definition).kvindexd.v1;
  const { createSsl, createInsecure } = grpc.credentials;
  const client = new KVIndex(address, ca ? createSsl(readFileSync(ca)) : createInsecure(), {
    "grpc.service_config": JSON.stringify(RETRIES),
  });
  const metadata = new grpc.Metadata();
  const token = process.env.KVINDEXD_TOKEN;
  if (token) metadata.set("authorization", `Bearer ${token}`);
  const call = (name) => {
    const method = promisify(client[name].bind(client));
    return (request) => method(request, metadata, { deadline: Date.now() + 1000 * deadline });
  };
  const [score, pick, complete] = ["ScoreWorkers", "PickWorker", "CompleteRequest"].map(call);
  return { score, pick, complete, close: () => client.close() };
}

// What a gateway does with one request.
async function serve(index, asked) {
  // With an id of our own a retried pick replaces the first instead of counting as load twice.
  const picked = await index.pick({ score: asked, request_id: randomUUID() });
  try {
    const others = picked.fallbacks.map((f) => f.address).join(", ") || "nobody";
    console.log(`picked ${picked.worker.worker_id} at ${picked.worker.address}, after it ${others}`);
    // Here the request goes to picked.worker.address, and the answer to the client.
  } finally {
    // Whatever became of it, it is no load any more. The engine's `usage` may be told here, too:
    // cached_tokens and prompt_tokens.
    await index.complete({ request_id: picked.request_id });
    console.log(`completed ${picked.request_id}`);
  }
}

async function main() {
  const args = options();
  if (!args.tokens) usage("--tokens is missing");
  if (!(Number(args.deadline) > 0)) usage(`--deadline ${args.deadline}: not a number of seconds`);
  const asked = { prompt: { model: args.model, token_ids: readTokens(args.tokens) } };
  const index = connect(args);
  try {
    const answer = await index.score(asked);
    console.log(`${answer.prompt_tokens} tokens, ${answer.prompt_blocks} blocks`);
    const rows = answer.scores.map((s) => [
      s.worker_id, s.dp_rank, s.address, s.reusable_tokens, s.active_blocks, s.cost.toFixed(1),
      s.state,
    ]);
    table([["worker", "rank", "address", "reusable", "active", "cost", "state"], ...rows]);
    await serve(index, asked);
  } catch (error) {
    const code = grpc.status[error.code];
    if (code === undefined) throw error;
    console.error(`${code}: ${error.details}`);
    console.error(`  ${ADVICE[code] ?? "not expected; see the log of kvindexd"}`);
    process.exitCode = 1;
  } finally {
    index.close();
  }
}

await main();
