// Colours before the first paint: the system's, unless the reader chose. Classic script, so that it runs at once.
"use strict";
(() => {
  const CHOICES = ["auto", "light", "dark"];
  const WORDS = { auto: "as the system has them", light: "light", dark: "dark" };
  const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let choice = "auto";
  try {
    const kept = localStorage.getItem("maitred.theme");
    if (CHOICES.includes(kept)) choice = kept;
  } catch { /* storage may be forbidden; then the choice lasts as long as the page */ }

  function apply() {
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme-button");
    if (button) {
      button.textContent = SIGNS[choice];
      button.setAttribute("aria-label", `Colours: ${WORDS[choice]}`);
      button.title = `Colours: ${WORDS[choice]}`;
    }
    window.dispatchEvent(new Event("themechange"));
  }

  function turn() {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try {
      localStorage.setItem("maitred.theme", choice);
    } catch { /* as above */ }
    apply();
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme-button").addEventListener("click", turn);
  });
})();
