// Messages of one session, and answers while they come: each event of a stream is a box, shaded by what it brought.

import { make } from "./dom.js";
import { positionOf, turnOf } from "./stream.js";

const DEEPEST = 6;

/** A message of a transcript. */
export function messageOf({ role, content, reasoning_content: thinking, tool_calls: calls }) {
  const line = entry(role);
  if (thinking) line.append(make("span", { className: "thinking" }, `${thinking}\n`));
  line.append(textOf(content));
  for (const { function: called } of calls ?? []) line.append(`\n${called.name}(${argumentsOf(called)})`);
  return line;
}

const entry = (role) => make("li", { className: role }, make("span", { className: "who" }, role));
const argumentsOf = (called) =>
  typeof called.arguments === "string" ? called.arguments : JSON.stringify(called.arguments);

function textOf(content) {
  if (typeof content === "string" || !content) return content ?? "";
  return content.map((part) => part.text ?? `[${part.type}]`).join("");
}

/** An answer that grows. `element` is its list item. */
export class Answer {
  constructor() {
    this.element = entry("assistant");
    this.text = make("span", {});
    this.note = make("span", { className: "who", "data-note": "" });
    this.element.append(this.text, this.note);
    this.turn = null;
    this.position = undefined;
    this.tokens = 0;
  }

  /** Takes an event `{id, data}` of the turn's stream. */
  heard({ id, data }) {
    const [choice] = data.choices;
    if (choice === undefined) return;
    const position = positionOf(id);
    this.turn = turnOf(id);
    const fresh = this.position === undefined ? 0 : position - this.position;
    this.position = position;
    this.tokens += fresh;
    const { reasoning_content: thinking, content, tool_calls: calls } = choice.delta;
    if (thinking) this.box(thinking, fresh, "thinking");
    if (content) this.box(content, thinking ? 0 : fresh);
    for (const { function: called } of calls ?? []) this.box(`\n${called.name}(${argumentsOf(called)})`, fresh);
    if (choice.finish_reason !== null) this.ended(choice.finish_reason, data);
    else this.note.textContent = `${this.tokens} tokens`;
  }

  box(text, fresh, kind = "") {
    const drafts = Math.max(0, fresh - 1);
    const box = make("span", { className: `round shade-${Math.min(drafts, DEEPEST)} ${kind}`.trim() }, text);
    box.title = `${fresh} ${fresh === 1 ? "token" : "tokens"}, ${drafts} of them drafts that were accepted`;
    this.text.append(box);
  }

  ended(reason, { meta_info: meta, session }) {
    const facts = [`${this.tokens} tokens`, reason];
    if (meta) {
      facts.push(`${meta.rounds.length} rounds with ${meta.rounds.join(" ") || "no"} drafts accepted`);
      facts.push(`${meta.spec_accept_length.toFixed(2)} a round`, `replica ${meta.replica}`);
    }
    if (session) {
      facts.push(`state from ${session.hit}: ${session.reused} reused, ${session.prefilled} prefilled`);
      facts.push(`epoch ${session.epoch}`);
    }
    this.note.textContent = facts.join("; ");
  }
}
