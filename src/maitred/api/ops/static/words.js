// Numbers as people read them.

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function short(value) {
  if (value < 1000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e4 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(1)}M`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function percent(part, whole) {
  return whole > 0 ? (100 * part) / whole : 0;
}

/** 1536 is "1.5 KiB". */
export function bytes(value) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(value || 1) / 10)));
  return `${(value / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
