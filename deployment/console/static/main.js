// The page: it looks every second, and its buttons do what the routes of the interface do.

import * as api from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, make, show } from "./dom.js";
import { Known } from "./known.js";
import { parse } from "./metrics.js";
import { Scrapes, showDecoding, showReplicas } from "./panels.js";
import * as tree from "./tree.js";

const EVERY_MS = 1000;
const MOST_SHOWN = 200; // sessions
const LOG_LINES = 200;

const known = new Known(tell);
const conversation = new Conversation(known, tell);
let scrapes = new Scrapes();
let keys = 0; // how many were used: what was asked for under another one is not shown
let looking = Promise.resolve();
let lookAgain = () => {};

function tell(text, bad = false) {
  const list = byId("log");
  list.prepend(make("p", { className: bad ? "bad" : "" }, `${new Date().toLocaleTimeString()} ${text}`));
  while (list.childElementCount > LOG_LINES) list.lastChild.remove();
}

function state(text, bad = false) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}

// ------------------------------------------------------------------------------------------------ looking

async function look() {
  const [mine, began] = [keys, performance.now()];
  const isCurrent = () => mine === keys;
  try {
    const [replicas, sessions, text] = await Promise.all([api.replicas(), api.sessions(), api.metrics()]);
    if (!isCurrent()) return;
    const samples = parse(text);
    scrapes.add(samples);
    known.noteReplicas(replicas);
    known.noteSessions(sessions, began);
    const { session } = conversation;
    if (session !== null && !known.sessions.has(session)) await conversation.choose(null);
    showReplicas(replicas, samples);
    showDecoding(scrapes);
    await known.look(conversation.session, isCurrent);
    if (!isCurrent()) return;
    state(`${count(replicas, "replica")}, ${count(sessions, "session")}`);
    showSessions();
    await conversation.keepUp();
  } catch (error) {
    const text = error instanceof api.Refusal ? error.message : "the server does not answer; trying again";
    if (isCurrent()) state(text, true);
  }
}

const count = ({ length }, what) => `${length} ${what}${length === 1 ? "" : "s"}`;

function showSessions() {
  const [all, chosen] = [[...known.sessions.values()], conversation.session];
  const some = all.filter(({ id }, index) => index < MOST_SHOWN || id === chosen);
  const more = all.length > some.length ? make("p", { className: "quiet" }, `${all.length - some.length} more`) : null;
  const actions = { choose: (name) => done(choose(name)), fork: (name, at) => done(fork(name, null, at)) };
  show(byId("tree"), tree.shown(some, chosen, actions), more);
  const session = known.sessions.get(chosen);
  if (session !== undefined) byId("placement").textContent = tree.placeOf(session);
  const others = [...known.replicas.keys()].filter((id) => id !== session?.replica);
  const select = byId("migrate-to");
  const before = select.value;
  show(select, ...others.map((id) => make("option", { value: id }, id)));
  if (others.includes(before)) select.value = before;
}

// ------------------------------------------------------------------------------------------------ buttons

async function choose(name) {
  const chosen = conversation.choose(name);
  showSessions();
  await chosen;
}

async function useKey() {
  const key = byId("key").value.trim();
  if (/[^!-~]/.test(key)) throw new Error("An API key has visible ASCII characters only.");
  api.key.set(key);
  keys += 1;
  known.forget();
  scrapes = new Scrapes();
  await choose(null);
}

async function create() {
  const { id } = await api.create(byId("create-name").value);
  tell(`Session ${id} was made.`);
}

async function fork(name, id, at) {
  const child = await api.fork(name, id, at);
  tell(`Session ${name} was forked at ${child.frontier}: ${child.id}.`);
}

async function keep(name) {
  const made = await api.checkpoint(name, byId("checkpoint-name").value);
  tell(`Checkpoint ${made.name} of ${name} is at ${made.frontier}.`);
}

async function migrate(name) {
  const moved = await api.migrate(name, byId("migrate-to").value);
  const pause = `it stood for ${(moved.pause_seconds * 1000).toFixed(0)} ms`;
  tell(`Session ${name} moved from ${moved.from ?? "nobody"} to ${moved.to} at ${moved.frontier}; ${pause}.`);
}

async function download(name) {
  const address = URL.createObjectURL(await api.exported(name));
  make("a", { href: address, download: `${name.replaceAll(/[^\w.-]/g, "_")}.dfs` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

async function remove(name) {
  known.leave(name, true);
  try {
    await looking;
    await api.remove(name);
  } catch (error) {
    known.leave(name, false);
    throw error;
  }
  tell(`Session ${name} was deleted.`);
  known.removed(name);
  if (conversation.session === name) await choose(null);
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

function confirmRemoval() {
  const name = conversation.session;
  byId("confirm-text").textContent = `Delete session ${name}, with its checkpoints? Nothing brings it back.`;
  byId("confirm-yes").onclick = () => {
    byId("confirm").close();
    done(remove(name));
  };
  byId("confirm").showModal();
}

function wire() {
  byId("key").value = api.key.get();
  onSubmit("key-form", useKey);
  onSubmit("create-form", create, "create-name");
  onSubmit("fork-form", () => fork(conversation.session, byId("fork-name").value), "fork-name");
  onSubmit("checkpoint-form", () => keep(conversation.session), "checkpoint-name");
  onSubmit("migrate-form", () => migrate(conversation.session));
  onSubmit("ask-form", () => conversation.send());
  byId("export").onclick = () => done(download(conversation.session));
  byId("delete").onclick = confirmRemoval;
  byId("confirm-no").onclick = () => byId("confirm").close();
  byId("stop").onclick = () => conversation.stop();
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
