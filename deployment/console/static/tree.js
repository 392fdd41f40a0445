// Sessions as a tree: those that share turns share a past, and part where their turns do.

import { make } from "./dom.js";

/** Nodes `{turns, heads, branches, owner}` of known sessions `{id, turns, ...}`: the turns that all of a node's sessions
 *  have in common, the sessions that end with them, and those that go on, apart. */
export function forest(sessions) {
  const roots = Map.groupBy(sessions, (session) => session.turns[0]?.id ?? session);
  return [...roots.values()].map((members) => node(members, 0));
}

function node(members, from) {
  const [first] = members;
  let end = from;
  while (first.turns[end] && members.every((member) => member.turns[end]?.id === first.turns[end].id)) end += 1;
  const longer = members.filter((member) => member.turns.length > end);
  const apart = Map.groupBy(longer, (member) => member.turns[end].id);
  return {
    turns: first.turns.slice(from, end).map((turn, index) => ({ ...turn, number: from + index + 1 })),
    heads: members.filter((member) => member.turns.length === end),
    branches: [...apart.values()].map((branch) => node(branch, end)),
    owner: first,
  };
}

/** The tree as nested lists. `chosen`: a session's name; `choose(name)`, `fork(name, at)`: what its buttons do. */
export function shown(sessions, chosen, actions) {
  if (sessions.length === 0) return make("p", { className: "quiet" }, "There are none yet.");
  return make("ul", {}, ...forest(sessions).map((root) => branchOf(root, chosen, actions)));
}

function branchOf({ turns, heads, branches, owner }, chosen, actions) {
  const item = make("li", {});
  for (const turn of turns) item.append(turnOf(turn, owner, actions));
  for (const head of heads) item.append(headOf(head, chosen, actions));
  if (branches.length > 0) {
    item.append(make("ul", {}, ...branches.map((branch) => branchOf(branch, chosen, actions))));
  }
  return item;
}

function turnOf(turn, owner, { fork }) {
  const line = make("div", { className: "turn", "data-turn": turn.id }, `turn ${turn.number}`);
  if (turn.status === "running") {
    line.append(make("span", { className: "mark running" }, "running"));
    return line;
  }
  const about = `${turn.completion_tokens} tokens, ${turn.finish_reason}, ${turn.acceptance_length.toFixed(2)} a round`;
  const state = `state from ${turn.hit}`;
  line.append(make("span", { className: "quiet" }, about), make("span", { className: "mark" }, state));
  const name = `Fork after turn ${turn.number} of ${owner.id}`;
  const button = make("button", { type: "button", "aria-label": name, "data-key": `fork ${turn.id}` }, "fork");
  button.onclick = () => fork(owner.id, { turn: turn.id });
  line.append(button);
  return line;
}

function headOf(session, chosen, { choose, fork }) {
  const button = make("button", {
    type: "button", className: "head", "aria-current": String(session.id === chosen), "data-key": `head ${session.id}`,
  });
  button.append(make("strong", {}, session.id), make("span", { className: "quiet" }, ` ${placeOf(session)}`));
  button.onclick = () => choose(session.id);
  const line = make("div", { "data-session": session.id }, button);
  for (const point of session.checkpoints) line.append(checkpointOf(point, session, fork));
  return line;
}

/** Who owns a session, under which epoch, and where copies of its log lie. */
export function placeOf(session) {
  const nodes = session.copies.map((copy) => copy.node.slice(0, 8)).join(", ");
  return `owner ${session.replica ?? "none"}, epoch ${session.epoch}, copies on ${nodes || "no node"}`;
}

function checkpointOf(point, session, fork) {
  const explicit = point.kind === "explicit";
  const what = explicit ? `◆ ${point.name}` : `◇ ${point.kind.replaceAll("_", " ")}`;
  const lies = point.places.length > 0 ? point.places.join(", ") : "tokens only";
  const line = make("div", { className: "turn" }, make("span", { className: "mark" }, `${what} at ${point.frontier}: ${lies}`));
  if (!explicit) return line;
  const name = `Fork ${session.id} from checkpoint ${point.name}`;
  const key = `point ${session.id} ${point.name}`;
  const button = make("button", { type: "button", "aria-label": name, "data-key": key }, "fork");
  button.onclick = () => fork(session.id, { checkpoint: point.name });
  line.append(button);
  return line;
}
