// What a model, a client or a tenant wrote, made harmless to look at.

// Control characters (so no escape sequences), and marks that reorder text (bidi overrides and isolates).
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ufff9-\ufffb]/g;

export function inert(text) {
  return String(text).replace(STEERING, "");
}

/** On one line, and no longer than `limit`. */
export function inertLine(text, limit = 80) {
  const line = inert(text).replace(/\s+/g, " ");
  return line.length > limit ? `${line.slice(0, limit - 1)}…` : line;
}
