// The page: its parts, and what each control does.

import { Refused, Server } from "./api.js";
import { Chat } from "./chat.js";
import { button, byId, el, isSend } from "./dom.js";
import { reason } from "./figures.js";
import { readFiles, view } from "./files.js";
import { ConversationList } from "./list.js";
import { Messages } from "./messages.js";
import { Settings } from "./settings.js";
import { Store, newConversation } from "./store.js";
import { asJson, asMarkdown, download, fileName, fromJson } from "./transfer.js";

const READ_OUT = 2000; // characters of an answer that a screen reader announces automatically
const server = new Server();
const store = new Store();
let attached = [];

const settings = new Settings(() => {
  messages.drafts = settings.showDrafts;
  for (const message of chat.messages) messages.refresh(message, chat.running && message === chat.messages.at(-1));
});

const chat = new Chat(server, store, settings, {
  started(message) {
    messages.refresh(message, true);
    say("The model is answering");
    showRunning();
  },
  grown: throttled((message) => messages.refresh(message, chat.running)),
  ended(message) {
    messages.refresh(message);
    byId("reason").textContent = reason(message.how);
    if (!message.problem) byId("models-hint").textContent = "";
    say(message.problem || message.text.slice(0, READ_OUT) || "The answer is empty");
    showRunning();
  },
  changed() {
    messages.show(chat.messages);
    showList();
  },
  kept: () => showList(),
  key: () => askForKey(),
});

const messages = new Messages(byId("log"), byId("messages"), {
  messages: () => chat.messages,
  edit: (message, text) => ask(() => chat.edit(message, text)),
  regenerate: (message) => ask(() => chat.regenerate(message)),
  goOn: (message) => ask(() => chat.goOn(message)),
  goesOn: (message) => chat.goesOn(message),
  turn: (message, by) => chat.turn(message, by),
});
messages.drafts = settings.showDrafts;

// -- asking ---------------------------------------------------------------------------------------------------------------

const question = byId("question");

async function ask(action) {
  warn("");
  question.focus();
  await action();
}

function send() {
  const [text, files] = [question.value, attached];
  const goesOn = !settings.chat && chat.messages.length; // a text can be continued without new input
  if (!text.trim() && !files.length && !goesOn) return;
  question.value = "";
  attached = [];
  showFiles();
  ask(() => chat.send(text, files));
}

byId("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
question.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  if (!chat.running) send();
});
byId("stop").addEventListener("click", () => chat.stop());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || byId("key-dialog").open) return;
  if (!closePanel() && chat.running) chat.stop();
});

function showRunning() {
  const [away, here] = chat.running ? ["send", "stop"] : ["stop", "send"];
  const focused = document.activeElement === byId(away);
  byId(here).hidden = false;
  byId(away).hidden = true;
  if (focused) (chat.running ? byId(here) : question).focus();
}

// -- attachments ----------------------------------------------------------------------------------------------------------

async function attach(files) {
  try {
    const found = await readFiles(files, attached, settings.sees);
    attached = [...attached, ...found];
    warn("");
  } catch (error) {
    warn(error.message);
  }
  showFiles();
}

function showFiles() {
  const drop = (file) => {
    attached = attached.filter((one) => one !== file);
    showFiles();
    question.focus();
  };
  const named = attached.map((file) => el("li", {}, file.picture ? view(file) : "", button(`${file.name} ×`, () => drop(file), { "aria-label": `Remove ${file.name}` })));
  byId("files").replaceChildren(...named);
}

byId("attach").addEventListener("click", () => byId("attach-files").click());
byId("attach-files").addEventListener("change", async (event) => {
  await attach([...event.target.files]);
  event.target.value = "";
});
for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  byId("compose").addEventListener(name, (event) => {
    event.preventDefault();
    byId("compose").classList.toggle("over", over);
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}
question.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || (types.includes("text/plain") && !settings.sees)) return; // an office program copies both
  event.preventDefault();
  attach([...event.clipboardData.files]);
});

// -- conversations --------------------------------------------------------------------------------------------------------

const list = new ConversationList(store, {
  current: () => chat.conversation,
  open: openConversation,
  remove,
  async rename(conversation, title) {
    const named = conversation.id === chat.conversation.id ? chat.conversation : conversation;
    await store.put(Object.assign(named, { title, named: true }));
  },
});

async function showList() {
  for (const id of ["export-markdown", "export-json"]) byId(id).disabled = !chat.messages.length;
  await list.show();
}

async function openConversation(conversation) {
  if (conversation.id !== chat.conversation.id) await chat.open(conversation);
  if (narrow.matches) closePanel();
}

async function startNew() {
  await chat.open(newConversation());
  if (narrow.matches) closePanel();
  question.focus();
}

async function remove(conversation) {
  if (!confirm(`Delete "${conversation.title}"?`)) return;
  const current = conversation.id === chat.conversation.id;
  if (current) await chat.stop();
  await store.delete(conversation.id);
  if (current) await chat.open(newConversation());
  else await showList();
}

byId("new").addEventListener("click", startNew);
byId("delete-all").addEventListener("click", async () => {
  if (!confirm("Delete all conversations?")) return;
  await chat.stop();
  await store.clear();
  await chat.open(newConversation());
});
byId("export-markdown").addEventListener("click", () =>
  download(fileName(chat.conversation, "md"), "text/markdown", asMarkdown(chat.conversation)),
);
byId("export-json").addEventListener("click", () =>
  download(fileName(chat.conversation, "json"), "application/json", asJson(chat.conversation)),
);
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  try {
    const conversation = { ...newConversation(), ...fromJson(await event.target.files[0].text()) };
    await store.put(conversation);
    await chat.open(conversation);
  } catch (error) {
    warn(`Not imported: ${error.message}`);
  }
  event.target.value = "";
});

// -- panels ---------------------------------------------------------------------------------------------------------------

const narrow = matchMedia("(max-width: 52rem)");
const PANELS = ["conversations", "settings"];

function setPanel(name, open) {
  byId(name).hidden = !open;
  byId(`open-${name}`).setAttribute("aria-expanded", String(open));
}

// Closes the panel that covers the page, or holds the focus; returns whether there was one.
function closePanel() {
  const open = PANELS.find((name) => !byId(name).hidden && (narrow.matches || byId(name).contains(document.activeElement)));
  if (!open) return false;
  setPanel(open, false);
  byId(`open-${open}`).focus();
  return true;
}

for (const name of PANELS) {
  byId(`open-${name}`).addEventListener("click", () => {
    const open = byId(name).hidden;
    if (narrow.matches) for (const other of PANELS) setPanel(other, false);
    setPanel(name, open);
  });
}

function arrange() {
  setPanel("conversations", !narrow.matches);
  setPanel("settings", matchMedia("(min-width: 75rem)").matches);
}

narrow.addEventListener("change", arrange);

// -- the key --------------------------------------------------------------------------------------------------------------

function askForKey() {
  server.key = "";
  byId("key").value = "";
  byId("key-wrong").textContent = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  server.key = byId("key").value.trim();
  try {
    await meet();
    byId("key-dialog").close();
    question.focus();
  } catch (error) {
    server.key = "";
    byId("key-wrong").textContent = error.message;
  }
});
byId("forget-key").addEventListener("click", () => askForKey());

// -- beginning ------------------------------------------------------------------------------------------------------------

// Asks the server what it has, and takes the model that was chosen last; throws where it does not say.
async function meet() {
  const models = await server.models();
  byId("models").replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
  byId("models-part").hidden = models.length < 2;
  use(models.find(({ id }) => id === settings.model) ?? models[0]);
  byId("forget-key").hidden = !server.key;
}

byId("models").addEventListener("change", async () => {
  try {
    await meet();
    say(`${chat.model} answers from now on. ${byId("models-hint").textContent}`);
  } catch (error) {
    warn(error.message);
  }
});

const CHATS = {
  true: ["Message", "Ask something"],
  false: ["Text to continue", "Begin a text"],
  picture: ["What to draw", "Name what is to be drawn"],
  speech: ["What to say", "Write what is to be spoken"],
};

// Selects the model for the next answers.
function use(model) {
  chat.model = model.id;
  byId("models").value = model.id;
  byId("models-hint").textContent = model.edgespec.loaded ? "" : "It is loaded when it is asked first.";
  byId("model").textContent = model.id;
  document.title = `${model.id} · edgespec`;
  settings.offer(model.edgespec);
  const { chat: chats } = model.edgespec;
  const [label, hint] = CHATS[settings.makes || chats];
  byId("attach").textContent = settings.sees ? "Attach files" : "Attach text files";
  byId("attach-files").ariaLabel = settings.sees ? "Pictures and text files to attach" : "Text files to attach";
  byId("question-label").textContent = label;
  question.placeholder = hint;
  byId("empty").textContent = chats || settings.makes ? "" : "This model was not made for chats: it continues your text, and whatever you add to it.";
}

function warn(text) {
  byId("alert").textContent = text;
}

function say(text) {
  byId("status").textContent = text;
}

// Calls a function with the last argument, at most once a frame, and for a tenth of the time: what takes longer, as the text grows, is
// called less often, so that the whole takes time in proportion to the text.
function throttled(action) {
  let last = null;
  let free = 0; // when it may be called again
  const call = () => {
    const [taken] = last;
    last = null;
    const began = performance.now();
    action(taken);
    free = began + 10 * (performance.now() - began);
  };
  return (argument) => {
    if (last === null) setTimeout(() => requestAnimationFrame(call), free - performance.now());
    last = [argument];
  };
}

async function begin() {
  arrange();
  if (!(await store.open())) warn("This browser keeps nothing here: conversations are lost with this page.");
  const [latest] = await store.all();
  if (latest) await chat.open(latest);
  else await showList();
  try {
    await meet();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askForKey();
    else warn(error.message);
  }
  question.focus();
}

await begin();
