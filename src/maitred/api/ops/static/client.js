// The server, with the reader's key; every failure becomes one sentence.

import { inertLine } from "./inert.js";

const KEPT = "maitred.key";

export class ServerError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status; // null: no answer at all
    this.retryAfter = retryAfter; // s
  }
}

export class Client {
  constructor() {
    this.key = null;
    try {
      this.key = sessionStorage.getItem(KEPT);
    } catch { /* without storage the key lives in this object */ }
    const told = new URLSearchParams(location.hash.slice(1)).get("key"); // a fragment is sent to no server
    if (!told) return;
    this.useKey(told);
    history.replaceState(null, "", location.pathname + location.search);
  }

  useKey(key) {
    this.key = key || null;
    try {
      if (this.key) sessionStorage.setItem(KEPT, this.key);
      else sessionStorage.removeItem(KEPT);
    } catch { /* as above */ }
  }

  /** A fetch whose answer is good; raises ServerError, or AbortError when `signal` said so. */
  async ask(path, { body, signal } = {}) {
    const headers = {};
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(null, "The server cannot be reached.");
    }
    if (!response.ok) throw await asError(response);
    return response;
  }

  async json(path, options) {
    return (await this.ask(path, options)).json();
  }
}

async function asError(response) {
  let message = `The server answered ${response.status}.`;
  try {
    const told = (await response.json()).error;
    if (told && told.message) message = sentence(told.message);
  } catch { /* not our shape; the number has to do */ }
  const retry = Number(response.headers.get("Retry-After"));
  return new ServerError(response.status, message, retry > 0 ? retry : null);
}

export function sentence(text) {
  const line = inertLine(text, 400);
  return line.charAt(0).toUpperCase() + line.slice(1) + (/[.!?]$/.test(line) ? "" : ".");
}
