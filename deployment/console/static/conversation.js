// The chosen session: what was said in it, and the answer that comes, whoever asked for it.

import * as api from "./api.js";
import { Answer, messageOf } from "./chat.js";
import { byId } from "./dom.js";
import { ask, follow } from "./stream.js";

export class Conversation {
  /** `known`: what is known of sessions and replicas; `tell(text, bad)` says what happens. */
  constructor(known, tell) {
    this.known = known;
    this.tell = tell;
    this.session = null; // its name
    this.newest = null; // the turn that the shown messages end with
    this.left = null; // the turn that somebody did not want to read to its end
    this.reading = null; // the stream that is read
  }

  async choose(name) {
    this.reading?.abort.abort();
    Object.assign(this, { session: name, newest: null, left: null, reading: null });
    byId("chat-title").textContent = name ?? "No session chosen";
    byId("placement").textContent = name === null ? "Choose a session, or write: that makes a new one." : "";
    byId("actions").hidden = name === null;
    byId("messages").replaceChildren();
    this.ended("");
    if (name !== null) await this.showTranscript();
  }

  /** Everything that was said; the newest answer again as its stream told it, as long as that is kept. */
  async showTranscript() {
    const name = this.session;
    const { transcript, turns, running } = await api.session(name);
    if (this.session !== name || this.reading !== null) return;
    byId("messages").replaceChildren(...transcript.map(messageOf));
    toEnd();
    const last = turns.at(-1);
    this.newest = last?.id ?? null;
    if (running !== null || transcript.at(-1)?.role !== "assistant" || !this.known.keepsEvents(name, last)) return;
    const answer = new Answer();
    try {
      const listener = { heard: (event) => answer.heard(event), interrupted() {} };
      await follow(name, last.id, listener, new AbortController().signal);
    } catch (error) {
      if (error instanceof api.Refusal) return; // the text is there
      throw error;
    }
    const still = this.session === name && this.reading === null && this.newest === last.id;
    if (still) byId("messages").lastChild?.replaceWith(answer.element);
  }

  /** With turns that others asked for. */
  async keepUp() {
    const session = this.known.sessions.get(this.session);
    if (session === undefined || this.reading !== null) return;
    const last = session.turns.findLast((turn) => turn.status === "over")?.id ?? null;
    if (!session.running) {
      if (last !== this.newest && !session.stale) await this.showTranscript();
      return;
    }
    if (session.running === this.newest || session.running === this.left) return;
    await this.showTranscript();
    if (this.session === session.id && this.reading === null) {
      this.read((listener, signal) => follow(session.id, session.running, listener, signal));
    }
  }

  /** Sends what is in the form, in a new session if none is chosen. */
  async send() {
    const text = byId("ask").value.trim();
    if (text === "" || this.reading !== null) return;
    if (this.session === null) {
      const { id } = await api.create();
      this.known.made(id);
      await this.choose(id);
    }
    const body = { messages: [{ role: "user", content: text }], stream: true, drafting: byId("drafting").checked };
    if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
    if (byId("max-tokens").value !== "") body.max_tokens = Number(byId("max-tokens").value);
    byId("messages").append(messageOf(body.messages[0]));
    byId("ask").value = "";
    const session = this.session;
    await this.read((listener, signal) => ask(session, body, listener, signal));
  }

  stop() {
    this.reading?.abort.abort();
  }

  /** Shows a stream until its end, over all interruptions. */
  async read(begin) {
    const [session, answer, abort] = [this.session, new Answer(), new AbortController()];
    const mine = (this.reading = { abort, interrupted: false });
    byId("messages").append(answer.element);
    byId("send").disabled = true;
    byId("stop").hidden = false;
    byId("stream-state").textContent = "The answer is on its way.";
    toEnd();
    let end = "";
    try {
      await begin(this.listener(mine, session, answer), abort.signal);
      if (abort.signal.aborted) end = "Not read any more.";
    } catch (error) {
      end = error.message;
      this.tell(`Session ${session}: ${end}`, true);
    }
    this.known.changed(session);
    if (this.reading !== mine) return;
    this.reading = null;
    [this.newest, this.left] = abort.signal.aborted ? [null, answer.turn] : [answer.turn, null];
    this.ended(end);
  }

  listener(mine, session, answer) {
    return {
      heard: (event) => {
        if (this.reading !== mine) return;
        const follows = isAtEnd();
        answer.heard(event);
        if (mine.interrupted) {
          mine.interrupted = false;
          this.tell(`Session ${session}: the stream goes on.`);
          byId("stream-state").textContent = "The answer goes on.";
        }
        if (follows) toEnd();
      },
      interrupted: (error) => {
        if (this.reading !== mine || mine.interrupted) return;
        mine.interrupted = true;
        const what = answer.turn === null ? "the answer has not begun" : "the stream broke";
        this.tell(`Session ${session}: ${what} (${error.message}).`, true);
        byId("stream-state").textContent = `${error.message}; asking again.`;
      },
    };
  }

  ended(state) {
    byId("stream-state").textContent = state;
    byId("send").disabled = false;
    byId("stop").hidden = true;
  }
}

function isAtEnd() {
  const list = byId("messages");
  return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
}

const toEnd = () => byId("messages").scrollTo(0, byId("messages").scrollHeight);
