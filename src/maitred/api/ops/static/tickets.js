// What became of each request over the last minute, out of frames that each show one moment.

export const KEEP_S = 70;
const GAP_S = 3; // longer between two frames, and nobody knows what happened meanwhile

export class Tickets {
  constructor() {
    this.clear();
  }

  clear() {
    this.byId = new Map();
    this.number = 0;
    this.freeAt = new Map(); // seat -> when its last stay ended
    this.now = -Infinity;
  }

  /** A ticket: {id, number, tenant, arrivedAt, stints: [{seat, from, decodeFrom, to, end}], waiting, latest}. Times in
   * seconds of the engine's clock; `to` is null while it lasts; `waiting` is {since, state, place} or null. */
  take(frame) {
    const engine = frame.engine;
    if (engine.now < this.now) this.clear(); // another engine, with another clock
    this.leftAt = engine.now - this.now > GAP_S ? Math.max(this.now, engine.now - KEEP_S) : engine.now;
    this.now = engine.now;
    const seated = new Set();
    engine.running.forEach((request, index) => {
      seated.add(request.id);
      this.sits(this.ticket(request), request, frame.seats[index]);
    });
    const preempted = new Set(engine.waiting.filter((w) => w.state === "preempted").map((w) => w.id));
    for (const ticket of this.byId.values()) {
      if (!seated.has(ticket.id)) this.left(ticket, preempted.has(ticket.id));
      ticket.waiting = null;
    }
    engine.waiting.forEach((request, place) => this.waits(this.ticket(request), request, place));
    this.forget();
  }

  ticket(request) {
    let ticket = this.byId.get(request.id);
    if (!ticket) {
      ticket = { id: request.id, number: (this.number += 1), tenant: request.tenant, arrivedAt: request.arrived_at, stints: [], waiting: null, latest: request };
      this.byId.set(request.id, ticket);
    }
    ticket.latest = request;
    return ticket;
  }

  sits(ticket, request, seat) {
    const isFirst = !ticket.stints.length;
    if (ticket.stints.at(-1)?.seat !== seat) this.left(ticket, false); // who watches anew, after a failover, seats anew
    let stint = ticket.stints.at(-1);
    if (!stint || stint.to !== null) {
      // Its own times are exact; only a later stay, after a preemption, is as exact as the frames.
      const exact = isFirst && request.num_preemptions === 0 ? request.started_at ?? this.now : this.now;
      const from = Math.max(exact, this.freeAt.get(seat) ?? exact); // it may have sat elsewhere while nobody looked
      stint = { seat, from, decodeFrom: null, to: null, end: null };
      ticket.stints.push(stint);
    }
    if (request.phase === "decode" && stint.decodeFrom === null) {
      const exact = ticket.stints.length === 1 && request.num_preemptions === 0 ? request.first_token_at : null;
      stint.decodeFrom = Math.max(stint.from, exact ?? this.now);
    }
  }

  left(ticket, wasPreempted) {
    const stint = ticket.stints.at(-1);
    if (stint && stint.to === null) {
      stint.to = Math.max(stint.from, this.leftAt);
      stint.end = wasPreempted ? "preempted" : "done";
      this.freeAt.set(stint.seat, stint.to);
    }
  }

  waits(ticket, request, place) {
    const last = ticket.stints.at(-1);
    ticket.waiting = { since: last?.to ?? request.arrived_at, state: request.state, place };
  }

  forget() {
    for (const [id, ticket] of this.byId) {
      const last = ticket.stints.at(-1);
      const gone = last ? last.to !== null && last.to < this.now - KEEP_S : true;
      if (gone && !ticket.waiting) this.byId.delete(id);
    }
  }
}
