"use strict";
// The page: what its keys and buttons do, and the list of conversations.

const jsonStore = (area, name) => new JsonStore(area, `jaxserve.${name}`);
const announcer = new Announcer(at("spoken"));
const likeliest = new Likeliest(at("likeliest"), announcer);
const conversations = new Conversations(jsonStore(() => localStorage, "conversation."));
const settings = new Settings(jsonStore(() => localStorage, ""), jsonStore(() => sessionStorage, ""));
const chat = new Chat({ settings, conversations, announcer, likeliest, changed: showState });
new Status(settings);

/** Leads to a setting that can't be sent. */
function showWrong(error) {
  if (!(error instanceof SettingError)) throw error;
  error.element.closest("details")?.setAttribute("open", "");
  error.element.focus();
  error.element.reportValidity();
  announcer.say(error.message);
}

function showState() {
  at("send").textContent = chat.isRunning ? "Stop" : "Send";
  at("chat").ariaBusy = String(chat.isRunning);
  at("kept").hidden = chat.isKept;
  at("kept").textContent = chat.isKept ? "" : "This browser keeps no more: the conversation is lost when the page is closed.";
  const isSaved = conversations.get(chat.conversation.id) !== undefined;
  history.replaceState(null, "", isSaved ? "#" + chat.conversation.id : location.pathname + location.search);
  showList();
}

/** The list of conversations; made anew only where it changes, so that the focus stays. */
function showList() {
  const rows = conversations.all().map(one => [one.id, Conversations.title(one), one.id === chat.conversation.id]);
  const list = at("list"), shown = JSON.stringify(rows);
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  const [id, kind] = [focused?.closest("li").dataset.id, focused?.className];
  list.replaceChildren(...rows.map(row => listItem(...row)));
  if (focused) (list.querySelector(`li[data-id="${id}"] .${kind}`) ?? at("new")).focus();
  at("export").disabled = at("delete_all").disabled = !rows.length;
}

function listItem(id, title, isOpen) {
  const open = make("button", { type: "button", className: "open", textContent: title, title });
  open.addEventListener("click", () => chat.conversation.id === id || chat.open(conversations.get(id)));
  if (isOpen) open.setAttribute("aria-current", "true");
  const remove = make("button", { type: "button", className: "delete", textContent: "×", "aria-label": `Delete: ${title}` });
  remove.addEventListener("click", () => confirm(`Delete "${title}"?`) && forget([id]));
  const item = make("li", {}, open, remove);
  item.dataset.id = id;
  return item;
}

function forget(ids) {
  for (const id of ids) conversations.remove(id);
  if (ids.includes(chat.conversation.id)) chat.open(conversations.begin());
  else showList();
}

function exportAll() {
  const url = URL.createObjectURL(new Blob([conversations.exported()], { type: "application/json" }));
  make("a", { href: url, download: "conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

at("form").addEventListener("submit", event => {
  event.preventDefault();
  if (chat.isRunning) return chat.stop();
  const text = at("input").value.trim();
  if (!text) return;
  try {
    chat.send(text);
    at("input").value = "";
  } catch (error) {
    showWrong(error);
  }
});
at("input").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.isRunning) at("form").requestSubmit();  // Escape stops: who types the next message does not mean to
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || event.isComposing) return;
  likeliest.hide();
  chat.stop();
});
document.querySelector(".skip").addEventListener("click", event => {
  event.preventDefault();  // the address tells which conversation is open
  at("input").focus();
});
at("new").addEventListener("click", () => {
  chat.open(conversations.begin());
  at("input").focus();
});
at("export").addEventListener("click", exportAll);
at("delete_all").addEventListener("click", () => {
  const ids = conversations.all().map(one => one.id);
  if (confirm(`Delete all conversations (${ids.length})?`)) forget(ids);
});
addEventListener("hashchange", () => {
  const found = conversations.get(location.hash.slice(1));
  if (found && found.id !== chat.conversation.id) chat.open(found);
});
addEventListener("storage", event => {  // another tab's
  const id = event.key?.split("jaxserve.conversation.")[1];
  if (!id) return;
  if (event.newValue === null) conversations.remove(id);  // again, if an answer that grows was saved meanwhile
  else conversations.refresh(id);
  const changed = conversations.get(id);
  if (id !== chat.conversation.id) showList();
  else if (!changed) chat.open(conversations.begin());  // it was deleted
  else if (!chat.isRunning) chat.open(changed);
  else showList();
});
addEventListener("pagehide", () => chat.save());
chat.open(conversations.get(location.hash.slice(1)) ?? conversations.begin());
