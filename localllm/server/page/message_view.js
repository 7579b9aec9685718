// One message of the conversation. A question is text; an answer is Markdown, with its thoughts folded above it.

import {copyButton, element} from "./element.js";
import {MarkdownView} from "./markdown.js";

export class MessageView {
    #message;
    #frame = 0;

    constructor(message) {
        const isQuestion = message.role === "user";
        this.body = element("div", {class: "body"});
        this.note = element("span");
        this.footer = element("footer", {}, this.note);
        if (!isQuestion) this.footer.append(copyButton(() => this.#message.content));
        this.thoughts = element("details", {hidden: true}, element("summary"), element("div", {class: "body"}));
        const label = isQuestion ? "You" : "Answer";
        this.article = element("article", {class: message.role, "aria-label": label}, this.thoughts, this.body);
        this.article.append(this.footer);
        this.view = isQuestion ? {show: (text) => { this.body.textContent = text; }} : new MarkdownView(this.body);
        this.show(message);
    }

    /** Show the message as it is now. */
    show(message) {
        this.#message = message;
        cancelAnimationFrame(this.#frame);
        const {content, reasoning_content: thought, note} = message;
        this.thoughts.hidden = !thought;
        const [summary, body] = this.thoughts.children;
        summary.textContent = content || note ? "Thoughts" : "Thinking…";
        body.textContent = thought ?? "";
        this.view.show(content);
        this.note.textContent = note ?? "";
        this.footer.hidden = !content && !note;
    }

    /** Show it at the screen's next frame: tokens may come faster than those. shown: called then. */
    showSoon(message, shown) {
        cancelAnimationFrame(this.#frame);
        this.#frame = requestAnimationFrame(() => {
            this.show(message);
            shown();
        });
    }

    /** Say what an answer waits for that has no text yet. */
    wait(text) {
        this.footer.hidden = false;
        this.note.textContent = text;
    }
}

/** Return the message for an error, with buttons for what helps. */
export function errorView(error, ...buttons) {
    return element("article", {class: "error", role: "alert"}, element("p", {}, error.message), ...buttons);
}
