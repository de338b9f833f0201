// Puts the page together: which model, whether a key is asked for, and who may see the engine.

import { Chat } from "./chat.js";
import { Client } from "./client.js";
import { Demo } from "./demo.js";
import { $, say } from "./dom.js";
import { Engine } from "./engine.js";
import { ENGINE, FLEET, Feed } from "./feed.js";
import { Fleet } from "./fleet.js";
import { TensorModels } from "./lanes.js";
import { Models } from "./models.js";
import { Policy } from "./policy.js";
import { Rush } from "./rush.js";
import { WhatIf } from "./whatif.js";

const ROUTER = "maitred-route"; // what `/version` of a router says that it is
const RETRY_MS = 3000;

const client = new Client();
const engine = new Engine();
const fleet = new Fleet(client);
const demo = new Demo(client);
let [isRouter, isDemo] = [false, false];
const chat = new Chat(client, {
  onId: (id) => engine.addMine(id),
  onNeedsKey: (words) => askForKey(words),
  onUnreachable: () => connect(), // again and again, until it is back
});
const models = new Models((name, told) => chat.useModel(name, told));
const tensorModels = new TensorModels(client);
const whatIf = new WhatIf(client);
const policy = new Policy(client, (names) => whatIf.begin(names));
const feed = new Feed(client, {
  onFrame: (frame) => {
    if (isRouter) {
      reveal("fleet");
      fleet.take(frame);
      if (isDemo) demo.take(frame);
      return;
    }
    if ($("engine").hidden) policy.begin(); // only who may watch may ask for it
    reveal("engine");
    engine.take(frame);
    policy.take(frame);
  },
  onState: (kind, words) => {
    state(kind, kind === "ok" ? words : "not live");
    (isRouter ? fleet : engine).setLive(kind === "ok");
    const trouble = $(isRouter ? "fleet-trouble" : "live-trouble");
    trouble.hidden = kind === "ok";
    say(trouble, kind === "ok" ? "" : words);
  },
  onRefused: (error) => {
    reveal(alone() ? "engine" : null);
    if (error.status === 401) askForKey(error.message);
    else state("ok", "ready"); // this key, or this server, shows no engine: the chat is what there is
  },
});
new Rush(client, () => chat.model);

function state(kind, words) {
  $("state").dataset.state = kind;
  say($("state"), words);
}

/** Beside the chat: the section of that id, or nothing. */
function reveal(shown) {
  for (const id of ["engine", "fleet"]) $(id).hidden = id !== shown;
  say($("engine-tab"), isRouter ? "Fleet" : "Engine");
  document.body.classList.toggle("watches", shown !== null);
  document.querySelector(".tabs").hidden = shown === null;
}

function alone() {
  return document.body.classList.contains("tensors-only");
}

let retry = null;

async function connect() {
  clearTimeout(retry);
  feed.end();
  try {
    const told = await client.json("version");
    [isRouter, isDemo] = [told.name === ROUTER, Boolean(told.demo)];
    await learnModel();
    chat.complain(null);
    state("wait", "connecting");
    $("key-button").hidden = !client.key;
    feed.begin(isRouter ? FLEET : ENGINE);
  } catch (error) {
    if (error.status === 401) {
      askForKey(client.key ? error.message : "");
      return;
    }
    if (error.status === 503) state("wait", "loading");
    else state("bad", "not reachable");
    chat.complain(error.message);
    clearTimeout(retry);
    retry = setTimeout(connect, RETRY_MS);
  }
}

/** A router may not know of any yet: what is sent without a model's name starts a replica. */
async function learnModel() {
  const { data: cards } = await client.json("v1/models");
  const data = cards.filter((card) => !card.alias_of);
  const isAlone = !data.length && !isRouter; // tensor models are all there is
  models.take(data, isAlone ? "tensor models" : "nothing yet");
  document.body.classList.toggle("tensors-only", isAlone);
  $("models-card").hidden = !isAlone;
  if (isAlone) {
    document.body.dataset.view = "engine";
    await tensorModels.begin();
    return;
  }
  if (!data.length) retry = setTimeout(() => learnModel().catch(connect), RETRY_MS);
}

function askForKey(words) {
  state("wait", "needs a key");
  $("key-button").hidden = false;
  say($("key-said"), words);
  $("key-forget").hidden = !client.key;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

function useKey(key) {
  client.useKey(key);
  $("key").value = "";
  $("key-dialog").close();
  chat.complain(null);
  connect();
}

$("key-button").addEventListener("click", () => askForKey(""));
$("key-use").addEventListener("click", () => useKey($("key").value.trim()));
$("key-forget").addEventListener("click", () => useKey(null));
$("key-close").addEventListener("click", () => $("key-dialog").close());
$("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") useKey($("key").value.trim());
});
for (const tab of document.querySelectorAll("[data-show]")) {
  tab.addEventListener("click", () => {
    document.body.dataset.view = tab.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) {
      other.setAttribute("aria-pressed", String(other === tab));
    }
  });
}
connect();
