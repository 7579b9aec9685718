// What the browser keeps for this page: each chat under a key of its own, so that two tabs do not undo each other's.

const CHAT = "localllm-chat-", SETTINGS = "localllm-settings";

/** Return a chat without messages; `load` finds it once it was saved. */
export function newChat() {
    return {id: Date.now().toString(36), messages: []};
}

/** Return the chat, null where there is none. */
export function load(id) {
    return JSON.parse(localStorage.getItem(CHAT + id));
}

/** Raises QuotaExceededError where the browser keeps no more, which is after five million characters. */
export function save(chat) {
    localStorage.setItem(CHAT + chat.id, JSON.stringify({...chat, time: Date.now()}));
}

export function remove(id) {
    localStorage.removeItem(CHAT + id);
}

/** Return all chats, the last one first. */
export function chats() {
    const ids = Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map((key) => key.slice(CHAT.length));
    return ids.map(load).sort((one, other) => other.time - one.time);
}

export function titleOf(chat) {
    return chat.messages[0]?.content.slice(0, 80).replaceAll("\n", " ") ?? "New chat";
}

/** Return the settings: model, system, temperature, theme; none has to be there. */
export function settings() {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
}

export function change(changed) {
    localStorage.setItem(SETTINGS, JSON.stringify({...settings(), ...changed}));
}
