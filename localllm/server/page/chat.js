// The page: a chat with a model of this server, kept in the browser.

import {element} from "./element.js";
import {MessageView, errorView} from "./message_view.js";
import {Server} from "./server.js";
import * as storage from "./storage.js";

const NEAR_END_PX = 40; // from the end of the conversation, where what is new is scrolled to
const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((each) => [each.id, each]));
const server = new Server(askKey);
const again = element("button", {type: "button", class: "quiet", onclick: regenerate});
const edit = element("button", {type: "button", class: "quiet", onclick: editQuestion}, "Edit question");

let chat = storage.newChat();
let models = []; // as the server listed them last
let answering = null; // the AbortController of the running answer
let isAtEnd = true;

// Asking.

function ask(question) {
    chat.messages.push({role: "user", content: question});
    history.replaceState(null, "", `#${chat.id}`);
    show();
    answer();
}

function regenerate() {
    if (chat.messages.at(-1).role === "assistant") chat.messages.pop();
    show();
    answer();
    page.question.focus(); // which the button had that is gone now
}

/** Take the last question back, to be asked in other words. */
function editQuestion() {
    if (chat.messages.at(-1).role === "assistant") chat.messages.pop();
    page.question.value = chat.messages.pop().content;
    show();
    showState();
    page.question.focus();
}

function stop() {
    answering?.abort();
    answering = null;
}

/** Have the last question of the chat answered. */
async function answer() {
    const running = (answering = new AbortController()), asked = chat, request = requestOf(asked);
    const message = {role: "assistant", content: "", reasoning_content: ""}, view = new MessageView(message);
    const model = page.model.value;
    let failure = null, began = 0;
    keep(asked);
    asked.messages.push(message);
    page.messages.append(view.article);
    refreshModels();
    const waiting = tellWaiting(view, model);
    showState("Answering");
    try {
        for await (const chunk of server.answer(request, running.signal)) {
            if (!began && !contextOf(model)) refreshModels(); // it has been loaded
            began ||= performance.now();
            clearInterval(waiting);
            add(chunk, message, contextOf(model), (performance.now() - began) / 1000);
            view.showSoon(message, follow);
        }
    } catch (error) {
        if (running.signal.aborted) message.note = [message.note, "stopped"].filter(Boolean).join(" · ");
        else failure = error;
    }
    clearInterval(waiting);
    if (answering === running) answering = null;
    if (message.content || message.reasoning_content) view.show(message);
    else drop(message, asked, view);
    keep(asked);
    if (asked !== chat) return;
    if (failure) showError(failure);
    showState(failure ? "" : view.body.textContent);
}

function requestOf({messages}) {
    const {system, temperature} = storage.settings();
    const told = system ? [{role: "system", content: system}] : [];
    return {
        model: page.model.value || undefined,
        messages: [...told, ...messages.map(({note, ...sent}) => sent)],
        temperature: temperature ? Number(temperature) : undefined,
    };
}

/** Add a chunk to the message, and note what it has cost so far. ctx: in tokens, where it is known. */
function add({choices: [choice], usage, timings, numEvicted}, message, ctx, seconds) {
    message.content += choice.delta.content ?? "";
    message.reasoning_content += choice.delta.reasoning_content ?? "";
    const tokens = timings?.predicted_n ?? usage.completion_tokens;
    const rate = timings ? timings.predicted_per_second : seconds && (tokens - 1) / seconds;
    message.note = [
        tokens === 1 ? "1 token" : `${tokens} tokens`,
        rate > 0 && `${rate.toFixed(1)} tok/s`,
        ctx && `context ${Math.ceil((100 * usage.total_tokens) / ctx)} % full`,
        numEvicted > 0 && `oldest turns left out: ${numEvicted}`,
        choice.finish_reason === "length" && "cut at the maximum length",
    ].filter(Boolean).join(" · ");
}

/** Say each second what the answer waits for. Return the timer. */
function tellWaiting(view, model) {
    const began = performance.now();
    const tell = () => {
        const seconds = Math.round((performance.now() - began) / 1000);
        view.wait(`${contextOf(model) ? "reading" : `loading ${model || "the model"}`} … ${seconds} s`);
    };
    tell();
    return setInterval(tell, 1000);
}

/** Return the length of a model's context, nothing where it is not loaded. */
function contextOf(model) {
    return models.find(({name}) => name === model)?.ctx;
}

function drop(message, asked, view) {
    asked.messages = asked.messages.filter((each) => each !== message);
    view.article.remove();
}

// The conversation.

function open(opened) {
    stop();
    chat = opened;
    show();
    showState();
    page.question.focus();
}

function show() {
    document.title = storage.titleOf(chat);
    page.messages.replaceChildren(...chat.messages.map((message) => new MessageView(message).article));
    isAtEnd = true;
    follow();
}

/** Show whether an answer is running, and what can be done. said: for screen readers. */
function showState(said = "") {
    page.said.textContent = said;
    page.send.textContent = answering ? "Stop" : "Send";
    offerAgain();
}

function offerAgain() {
    again.remove();
    edit.remove();
    const last = chat.messages.at(-1);
    if (last && !answering) {
        again.textContent = last.role === "user" ? "Ask again" : "Regenerate";
        const place = page.messages.querySelector(".error") ?? page.messages.lastElementChild.querySelector("footer");
        place.append(again, edit);
    }
    follow();
}

/** Show the error, with what helps, in place of the one before. */
function showError(error) {
    const restart = element("button", {type: "button", class: "quiet", onclick: openNew}, "New chat");
    page.messages.querySelector(".error")?.remove();
    page.messages.append(errorView(error, ...(error.code === "context_length_exceeded" ? [restart] : [])));
    offerAgain();
}

function follow() {
    if (isAtEnd) page.messages.scrollTop = page.messages.scrollHeight;
}

function keep(kept) {
    try {
        if (kept.messages.length) storage.save(kept);
    } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
        showError(new Error("The browser has no room for more: this chat is not kept. Delete others under Chats."));
    }
}

// Chats.

function openNew() {
    history.pushState(null, "", location.pathname);
    open(storage.newChat());
}

function openNamed() {
    open(storage.load(location.hash.slice(1)) ?? storage.newChat());
}

function showChats() {
    const row = (each) => {
        const title = storage.titleOf(each), isOpen = each.id === chat.id;
        const link = element("a", {href: `#${each.id}`, "aria-current": isOpen && "page"}, title);
        const onclick = () => confirm(`Delete “${title}”?`) && remove(each.id);
        const bin = {type: "button", class: "quiet", "aria-label": `Delete ${title}`, onclick};
        return element("li", {}, link, element("button", bin, "Delete"));
    };
    const rows = storage.chats().map(row);
    const none = element("p", {}, "None yet. Chats are kept in this browser.");
    page.chats.replaceChildren(element("h2", {}, "Chats"), rows.length ? element("ul", {}, ...rows) : none);
}

function remove(id) {
    if (id === chat.id) {
        chat.messages = []; // so that an answer which is being stopped does not keep it
        openNew();
    }
    storage.remove(id);
    showChats();
}

// The server's models, its key, and settings.

async function refreshModels() {
    try {
        models = await server.models();
    } catch {
        return; // a question fails for the same reason, and tells it
    }
    const {model} = storage.settings(), chosen = models.some(({name}) => name === model) ? model : models[0].name;
    const label = ({name, ctx}) => (ctx ? name : `${name} (not loaded)`);
    const option = (each) => element("option", {value: each.name, selected: each.name === chosen}, label(each));
    page.model.replaceChildren(...models.map(option));
}

function askKey(isWrong) {
    const {"asking-key": dialog, "key-words": words, key} = page;
    words.textContent = isWrong ? "This API key is wrong." : "This server needs its API key.";
    key.value = dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => {
        dialog.addEventListener("close", () => resolve(dialog.returnValue && key.value), {once: true});
    });
}

function showTheme() {
    document.documentElement.dataset.theme = storage.settings().theme ?? "";
}

function changeTheme() {
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches, now = storage.settings().theme;
    storage.change({theme: (now ?? (isDark ? "dark" : "light")) === "dark" ? "light" : "dark"});
    showTheme();
}

// What the user does.

function send() {
    const question = page.question.value.trim();
    if (!question || answering) return;
    page.question.value = "";
    ask(question);
}

const isFree = () => !document.querySelector(":popover-open, dialog[open]");
const KEYS = [
    [(event) => event.key === "Escape" && answering && isFree(), stop],
    [(event) => event.code === "KeyO" && event.shiftKey && (event.ctrlKey || event.metaKey), openNew],
    [(event) => event.key === "Enter" && event.target === page.question && !event.shiftKey && !event.isComposing, send],
];
document.addEventListener("keydown", (event) => {
    for (const [isPressed, act] of KEYS) {
        if (!isPressed(event)) continue;
        event.preventDefault();
        act();
    }
});
page.composer.addEventListener("submit", (event) => {
    event.preventDefault();
    (answering ? stop : send)();
});
page.new.addEventListener("click", openNew);
page.theme.addEventListener("click", changeTheme);
page.model.addEventListener("change", () => storage.change({model: page.model.value}));
page.settings.addEventListener("input", ({target}) => storage.change({[target.id]: target.value}));
page.chats.addEventListener("beforetoggle", showChats);
page.chats.addEventListener("click", ({target}) => target.matches("a") && page.chats.hidePopover());
page.messages.addEventListener("scroll", () => {
    const {scrollHeight, scrollTop, clientHeight} = page.messages;
    isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
});
addEventListener("hashchange", openNamed);
addEventListener("focus", refreshModels);
addEventListener("pagehide", () => answering && keep(chat));
addEventListener("error", ({message}) => showError(new Error(message)));
addEventListener("unhandledrejection", ({reason}) => showError(reason));

showTheme();
for (const name of ["system", "temperature"]) page[name].value = storage.settings()[name] ?? "";
openNamed();
refreshModels();
