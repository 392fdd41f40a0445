// What is known of replicas and sessions, and how it is kept up to date.

import * as api from "./api.js";

const AT_ONCE = 20; // sessions whose turns are asked for together
const REFRESHED = 4; // the longest not looked at, which may have changed: the list of sessions does not say

export class Known {
  /** `tell(text, bad)` says what happens. */
  constructor(tell) {
    this.tell = tell;
    this.forget();
    this.removedAt = new Map(); // by name: a list that was asked for before does not count
  }

  /** Everything, as for another key. */
  forget() {
    this.replicas = new Map();
    this.sessions = new Map(); // what the list says of each, its turns and checkpoints, and whether these are stale
  }

  noteReplicas(listed) {
    const now = new Map(listed.map((replica) => [replica.id, replica]));
    if (this.replicas.size > 0) {
      for (const id of now.keys()) if (!this.replicas.has(id)) this.tell(`Replica ${id} is there.`);
      for (const id of this.replicas.keys()) if (!now.has(id)) this.tell(`Replica ${id} is gone.`, true);
    }
    this.replicas = now;
  }

  /** `began`: when the list was asked for, which cannot have what was made since. Of each session it is kept who owned
   *  it last: one whose owner dies has none until somebody takes it over. */
  noteSessions(found, began) {
    const now = new Map([...this.sessions].filter(([, session]) => session.made > began));
    for (const session of found) {
      if (this.removedAt.get(session.id) > began) continue;
      const before = this.sessions.get(session.id);
      const first = before === undefined || before.made !== undefined;
      const { replica, epoch } = session;
      const owned = first || replica !== null ? { replica, epoch } : before.owned;
      if (!first && owned.epoch !== before.owned.epoch) {
        const owners = `${before.owned.replica ?? "nobody"} to ${replica}`;
        this.tell(`Session ${session.id}: owner ${owners}, epoch ${before.owned.epoch} to ${epoch}.`);
      }
      const stale = first || before.stale || before.epoch !== epoch;
      const more = { owned, made: undefined, stale };
      now.set(session.id, { turns: [], checkpoints: [], looked: 0, ...before, ...session, ...more });
    }
    this.sessions = now;
  }

  /** Asks for turns and checkpoints of `chosen`, of sessions that changed, and of some others. One without a living
   *  owner is left alone: to look closer would give it one. */
  async look(chosen, isCurrent) {
    const alive = [...this.sessions.values()].filter(({ replica, going }) => this.replicas.has(replica) && !going);
    const oldest = alive.sort((one, other) => one.looked - other.looked);
    const urgent = oldest.filter((session) => session.stale || session.id === chosen);
    const wanted = new Set([...urgent.slice(0, AT_ONCE), ...oldest.slice(0, REFRESHED)]);
    const tasks = [...wanted].map(async (session) => {
      session.looked = performance.now();
      const [turns, checkpoints] = await Promise.all([api.turns(session.id), api.checkpoints(session.id)]);
      if (!isCurrent()) return;
      const running = turns.find((turn) => turn.status === "running")?.id ?? null;
      Object.assign(session, { turns, checkpoints, running, stale: running !== null });
    });
    for (const { reason } of await Promise.allSettled(tasks)) {
      if (reason !== undefined && !(reason instanceof api.Refusal)) throw reason;
    }
  }

  /** A session that was made just now. */
  made(id) {
    const nothing = { turns: [], checkpoints: [], copies: [], replica: null, epoch: "", looked: 0, stale: true };
    this.sessions.set(id, { id, ...nothing, made: performance.now() });
  }

  /** A session that has done something. */
  changed(name) {
    if (this.sessions.has(name)) Object.assign(this.sessions.get(name), { stale: true, running: null });
  }

  /** Whether nobody is to look at its turns any more, since it is about to be deleted. */
  leave(name, going) {
    if (this.sessions.has(name)) this.sessions.get(name).going = going;
  }

  removed(name) {
    this.removedAt.set(name, performance.now());
    this.sessions.delete(name);
  }

  /** Whether a turn's events can be asked for: by the session that ran it, as long as its replica lives. */
  keepsEvents(name, turn) {
    const others = [...this.sessions.values()].filter((session) => session.id !== name);
    const shared = others.some(({ turns }) => turns.some(({ id }) => id === turn?.id));
    return turn !== undefined && this.replicas.has(turn.replica) && !shared;
  }
}
