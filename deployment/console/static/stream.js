// A turn's answer, read over as many connections as it takes (docs/http.md, "Streams that break").

import * as api from "./api.js";

const SILENT_MS = 15000; // the server says something every 5 seconds
const GIVE_UP_MS = 60000;
const AGAIN_MS = [250, 500, 1000, 2000];

/** Begins a turn and reads it; a request that may not have come is sent again under its key, so that nothing runs
 *  twice. `heard(event)` gets each event `{id, data}`, `interrupted(error)` the news that a connection broke. */
export function ask(session, body, listener, signal) {
  const idempotencyKey = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16)).join("-");
  return read(session, (inner) => api.begin(session, body, idempotencyKey, inner), undefined, listener, signal);
}

/** Reads a turn that runs, or is over, from its first event on. */
export const follow = (session, turn, listener, signal) => read(session, undefined, turn, listener, signal);

async function read(session, first, turn, { heard, interrupted }, signal) {
  let after;
  let last = performance.now();
  for (let tries = 0; ; tries += 1) {
    let again = AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)];
    const silence = new AbortController();
    try {
      const inner = AbortSignal.any([signal, silence.signal]);
      const response = turn ? await api.follow(session, turn, after, inner) : await first(inner);
      turn = response.headers.get("x-turn-id") ?? turn;
      for await (const event of events(response.body, () => silence.abort())) {
        last = performance.now();
        tries = 0;
        if (event.type === "resume") break; // what was had last is known here
        after = event.id || after;
        if (event.data === "[DONE]") return;
        const data = JSON.parse(event.data);
        if (data.error) throw new api.Refusal(data.error.code === "replica_lost" ? 503 : 500, data.error);
        heard({ id: event.id, data });
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof api.Refusal && !error.passing) throw error;
      if (performance.now() - last > GIVE_UP_MS) throw error;
      if (error.retryAfter) again = error.retryAfter * 1000;
      interrupted(error);
    }
    await new Promise((done) => setTimeout(done, again));
    if (signal.aborted) return;
  }
}

/** Server-sent events: `{type, id, data}`. `silent()` is called when nothing comes any more. */
async function* events(body, silent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let timer = setTimeout(silent, SILENT_MS);
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(silent, SILENT_MS);
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const event = { type: "message", id: "", data: null };
  for (const line of block.split("\n")) {
    const [, name, value] = /^(\w*):? ?(.*)$/s.exec(line) ?? [];
    if (name === "id") event.id = value;
    else if (name === "event") event.type = value;
    else if (name === "data") event.data = value;
  }
  return event.data === null ? null : event;
}

// An event's id is its turn, the position in the session's tokens that it leads to, and a hash.
export const turnOf = (id) => id.split(".")[0];
export const positionOf = (id) => Number(id.split(".").at(-2));
