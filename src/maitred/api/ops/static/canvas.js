// What all drawings share: sharp pixels, the theme's colours, requests' colours.

const styles = {};

function readStyles() {
  const computed = getComputedStyle(document.documentElement);
  for (const name of ["card", "well", "ink", "muted", "line", "brass", "wine", "cut", "leaf", "wait", "cached", "shared", "other", "cell", "request-l", "request-c", "mono", "sans"]) {
    styles[name] = computed.getPropertyValue(`--${name}`).trim();
  }
}
readStyles();
window.addEventListener("themechange", readStyles);

export const colour = (name) => styles[name];

export const font = (pixels, family = "sans") => `${pixels}px ${styles[family]}`;

/** The colour of the n-th request: hues a golden angle apart, so that neighbours differ; red is left to preemption. */
export function requestColour(number) {
  const hue = 48 + ((150 + number * 137.508 * (290 / 360)) % 290);
  return `oklch(${styles["request-l"]} ${styles["request-c"]} ${hue.toFixed(1)})`;
}

/** A context in CSS pixels, cleared, with its width and height. */
export function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.lineWidth = 1; // as the last drawing did not leave it
  return { context, width, height };
}

export function rounded(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}

/** A number for a request's pattern of stripes, made once for each colour. */
const patterns = new Map();
export function stripes(context, ink) {
  if (patterns.has(ink)) return patterns.get(ink);
  if (patterns.size > 400) patterns.clear();
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.globalAlpha = 0.4;
  pen.fillStyle = ink;
  pen.fillRect(0, 0, 8, 8);
  pen.globalAlpha = 1;
  pen.strokeStyle = ink;
  pen.lineWidth = 2.4;
  for (const shift of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  patterns.set(ink, pattern);
  return pattern;
}
