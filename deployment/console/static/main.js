// The page: what is known, how it is kept up to date, and what buttons do.

import * as api from "./api.js";
import { Answer, messageOf } from "./chat.js";
import { byId, make, show } from "./dom.js";
import { parse } from "./metrics.js";
import { Scrapes, showDecoding, showReplicas } from "./panels.js";
import { ask, follow } from "./stream.js";
import * as tree from "./tree.js";

const EVERY_MS = 1000;
const MOST_SESSIONS = 50; // whose turns are looked at
const LOG_LINES = 200;

let scrapes = new Scrapes();
let known = new Map(); // by name: what the list says of a session, its turns and checkpoints, and whether they are stale
let replicas = new Map();
let chosen = null;
let newest = null; // the turn that the shown messages end with
let reading = null; // the stream that is read: {session, abort, interrupted}
let left = null; // the turn that somebody did not want to read to its end
let looking = Promise.resolve();
let lookAgain = () => {};
const removedAt = new Map(); // by name: a list that was asked for before does not count
let asked = 0; // counts keys: what was asked for under another one is not shown

// ------------------------------------------------------------------------------------------------ what happened

function tell(text, bad = false) {
  const list = byId("log");
  list.prepend(make("p", { className: bad ? "bad" : "" }, `${new Date().toLocaleTimeString()} ${text}`));
  while (list.childElementCount > LOG_LINES) list.lastChild.remove();
}

const state = (text, bad = false) => {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
};

// ------------------------------------------------------------------------------------------------ looking

async function look() {
  const [mine, began] = [asked, performance.now()];
  try {
    const [listed, found, text] = await Promise.all([api.replicas(), api.sessions(), api.metrics()]);
    if (mine !== asked) return;
    const samples = parse(text);
    scrapes.add(samples);
    noteReplicas(listed);
    noteSessions(found, began);
    showReplicas(listed, samples);
    showDecoding(scrapes);
    await lookAtTurns(mine);
    if (mine !== asked) return;
    state(`${count(listed, "replica")}, ${count(found, "session")}`);
    showSessions();
    await keepUp();
  } catch (error) {
    if (mine === asked) state(error instanceof api.Refusal ? error.message : "the server does not answer; trying again", true);
  }
}

const count = ({ length }, what) => `${length} ${what}${length === 1 ? "" : "s"}`;

function noteReplicas(listed) {
  const now = new Map(listed.map((replica) => [replica.id, replica]));
  if (replicas.size > 0) {
    for (const id of now.keys()) if (!replicas.has(id)) tell(`Replica ${id} is there.`);
    for (const id of replicas.keys()) if (!now.has(id)) tell(`Replica ${id} is gone.`, true);
  }
  replicas = now;
}

/** `began`: when the list was asked for, which cannot have what was made since. */
function noteSessions(found, began) {
  const now = new Map([...known].filter(([, session]) => session.made > began));
  for (const session of found) {
    if (removedAt.get(session.id) > began) continue;
    const before = known.get(session.id);
    const moved = before !== undefined && before.made === undefined && before.epoch !== session.epoch;
    if (moved) {
      const from = before.replica ?? "nobody";
      tell(`Session ${session.id}: owner ${from} to ${session.replica ?? "nobody"}, epoch ${before.epoch} to ${session.epoch}.`);
    }
    now.set(session.id, { turns: [], checkpoints: [], stale: true, ...before, ...session, made: undefined });
    if (moved) now.get(session.id).stale = true;
  }
  known = now;
  if (chosen !== null && !known.has(chosen)) choose(null);
}

/** Of sessions that changed. One without a living owner is left alone: to look closer would give it one. */
async function lookAtTurns(mine) {
  const alive = [...known.values()].filter((session) => replicas.has(session.replica) && !session.going);
  const wanted = alive.filter((session) => session.stale || session.id === chosen || session.running);
  const tasks = wanted.slice(0, MOST_SESSIONS).map(async (session) => {
    const [turns, checkpoints] = await Promise.all([api.turns(session.id), api.checkpoints(session.id)]);
    if (mine !== asked) return;
    const running = turns.find((turn) => turn.status === "running")?.id ?? null;
    Object.assign(session, { turns, checkpoints, running, stale: running !== null });
  });
  for (const { reason } of await Promise.allSettled(tasks)) {
    if (reason !== undefined && !(reason instanceof api.Refusal)) throw reason;
  }
}

function showSessions() {
  const all = [...known.values()];
  show(byId("tree"), tree.shown(all, chosen, { choose, fork: (name, at) => done(forked(name, null, at)) }));
  const session = known.get(chosen);
  if (session !== undefined) byId("placement").textContent = tree.placeOf(session);
  const others = [...replicas.keys()].filter((id) => id !== session?.replica);
  const options = others.map((id) => make("option", { value: id }, id));
  const select = byId("migrate-to");
  const before = select.value;
  show(select, ...options);
  if (others.includes(before)) select.value = before;
}

// ------------------------------------------------------------------------------------------------ one session

async function choose(name) {
  reading?.abort.abort();
  reading = null;
  chosen = name;
  newest = left = null;
  byId("chat-title").textContent = name ?? "No session chosen";
  byId("actions").hidden = name === null;
  byId("placement").textContent = name === null ? "Choose a session, or write: that makes a new one." : "";
  byId("messages").replaceChildren();
  byId("stream-state").textContent = "";
  readingEnded();
  showSessions();
  if (name !== null) await done(showTranscript(name));
}

/** Everything that was said; the newest answer again as its stream told it, as long as that is kept. */
async function showTranscript(name) {
  const { transcript, turns, running } = await api.session(name);
  if (chosen !== name || reading !== null) return;
  byId("messages").replaceChildren(...transcript.map(messageOf));
  atEnd();
  const last = turns.at(-1);
  newest = last?.id ?? null;
  if (running !== null || transcript.at(-1)?.role !== "assistant" || !isKept(name, last)) return;
  const answer = new Answer();
  try {
    const listener = { heard: (event) => answer.heard(event), interrupted() {} };
    await follow(name, last.id, listener, new AbortController().signal);
  } catch (error) {
    if (error instanceof api.Refusal) return; // its events are not kept: the text is there
    throw error;
  }
  if (chosen === name && reading === null && newest === last.id) byId("messages").lastChild?.replaceWith(answer.element);
}

/** Whether a turn's events can be asked for: by the session that ran it, as long as its replica lives. */
function isKept(name, turn) {
  const others = [...known.values()].filter((session) => session.id !== name);
  return turn !== undefined && replicas.has(turn.replica) && !others.some(({ turns }) => turns.some(({ id }) => id === turn.id));
}

/** With the chosen session's turns, whoever asks for them. */
async function keepUp() {
  const session = known.get(chosen);
  if (session === undefined || reading !== null) return;
  const last = session.turns.findLast((turn) => turn.status === "over")?.id ?? null;
  if (!session.running) {
    if (last !== newest && !session.stale) await showTranscript(session.id);
    return;
  }
  if (session.running === newest || session.running === left) return;
  await showTranscript(session.id);
  if (chosen === session.id && reading === null) {
    read(session.id, (listener, signal) => follow(session.id, session.running, listener, signal));
  }
}

async function send() {
  const text = byId("ask").value.trim();
  if (text === "" || reading !== null) return;
  if (chosen === null) {
    const { id } = await api.create();
    const made = performance.now();
    known.set(id, { id, replica: null, epoch: "", copies: [], turns: [], checkpoints: [], stale: true, made });
    await choose(id);
  }
  const body = { messages: [{ role: "user", content: text }], stream: true, drafting: byId("drafting").checked };
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  if (byId("max-tokens").value !== "") body.max_tokens = Number(byId("max-tokens").value);
  byId("messages").append(messageOf(body.messages[0]));
  byId("ask").value = "";
  const session = chosen;
  await read(session, (listener, signal) => ask(session, body, listener, signal));
}

/** Shows a stream until its end, over all interruptions. */
async function read(session, begin) {
  const [answer, abort] = [new Answer(), new AbortController()];
  const mine = (reading = { session, abort });
  byId("messages").append(answer.element);
  byId("send").disabled = true;
  byId("stop").hidden = false;
  byId("stream-state").textContent = "The answer is on its way.";
  atEnd();
  const listener = {
    heard(event) {
      if (reading !== mine) return;
      const wasAtEnd = isAtEnd();
      answer.heard(event);
      if (mine.interrupted) {
        mine.interrupted = false;
        tell(`Session ${session}: the stream goes on.`);
        byId("stream-state").textContent = "The answer goes on.";
      }
      if (wasAtEnd) atEnd();
    },
    interrupted(error) {
      if (reading !== mine || mine.interrupted) return;
      mine.interrupted = true;
      tell(`Session ${session}: the stream broke (${error.message}).`, true);
      byId("stream-state").textContent = "The stream broke; asking for the rest.";
    },
  };
  try {
    await begin(listener, abort.signal);
    if (reading === mine) byId("stream-state").textContent = abort.signal.aborted ? "Not read any more." : "";
  } catch (error) {
    if (reading === mine) byId("stream-state").textContent = error.message;
    tell(`Session ${session}: ${error.message}`, true);
  } finally {
    if (reading === mine) {
      reading = null;
      newest = abort.signal.aborted ? null : answer.turn;
      left = abort.signal.aborted ? answer.turn : null;
      readingEnded();
    }
    if (known.has(session)) Object.assign(known.get(session), { stale: true, running: null });
  }
}

function readingEnded() {
  byId("send").disabled = false;
  byId("stop").hidden = true;
}

const isAtEnd = () => {
  const list = byId("messages");
  return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
};
const atEnd = () => byId("messages").scrollTo(0, byId("messages").scrollHeight);

// ------------------------------------------------------------------------------------------------ buttons

async function forked(name, id, at) {
  const child = await api.fork(name, id, at);
  tell(`Session ${name} was forked at ${child.frontier}: ${child.id}.`);
  for (const session of known.values()) if (session.id === name) session.stale = true;
}

async function migrated(name) {
  const moved = await api.migrate(name, byId("migrate-to").value);
  const pause = `it stood for ${(moved.pause_seconds * 1000).toFixed(0)} ms`;
  tell(`Session ${name} moved from ${moved.from ?? "nobody"} to ${moved.to} at ${moved.frontier}; ${pause}.`);
}

async function kept(name) {
  const made = await api.checkpoint(name, byId("checkpoint-name").value);
  tell(`Checkpoint ${made.name} of ${name} is at ${made.frontier}.`);
}

async function exported(name) {
  const address = URL.createObjectURL(await api.exported(name));
  make("a", { href: address, download: `${name.replaceAll(/[^\w.-]/g, "_")}.dfs` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

async function removed(name) {
  const session = known.get(name);
  session.going = true; // nobody looks at its turns any more
  try {
    await looking;
    await api.remove(name);
  } catch (error) {
    session.going = false;
    throw error;
  }
  removedAt.set(name, performance.now());
  tell(`Session ${name} was deleted.`);
  known.delete(name);
  if (chosen === name) await choose(null);
}

/** What somebody asked for: a refusal is told, not thrown. */
async function done(work) {
  try {
    await work;
    lookAgain();
  } catch (error) {
    tell(error.message, true);
  }
}

function onSubmit(id, action, emptied) {
  byId(id).addEventListener("submit", async (event) => {
    event.preventDefault();
    await done(action());
    if (emptied) byId(emptied).value = "";
  });
}

function wire() {
  byId("key").value = api.key.get();
  onSubmit("key-form", async () => {
    api.key.set(byId("key").value.trim());
    asked += 1;
    [known, replicas, scrapes] = [new Map(), new Map(), new Scrapes()];
    await choose(null);
  });
  onSubmit("create-form", async () => {
    const { id } = await api.create(byId("create-name").value);
    tell(`Session ${id} was made.`);
  }, "create-name");
  onSubmit("fork-form", () => forked(chosen, byId("fork-name").value), "fork-name");
  onSubmit("checkpoint-form", () => kept(chosen), "checkpoint-name");
  onSubmit("migrate-form", () => migrated(chosen));
  onSubmit("ask-form", send);
  byId("export").onclick = () => done(exported(chosen));
  byId("delete").onclick = () => {
    byId("confirm-text").textContent = `Delete session ${chosen}, with its checkpoints? Nothing brings it back.`;
    byId("confirm").showModal();
  };
  byId("confirm-no").onclick = () => byId("confirm").close();
  byId("confirm-yes").onclick = () => {
    byId("confirm").close();
    done(removed(chosen));
  };
  byId("stop").onclick = () => reading?.abort.abort();
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask-form").requestSubmit();
  });
}

async function run() {
  for (;;) {
    looking = look();
    await looking;
    await new Promise((later) => {
      lookAgain = later;
      setTimeout(later, EVERY_MS);
    });
  }
}

wire();
run();
