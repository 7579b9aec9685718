// Markdown as models write it, as elements. The text is not trusted: what is no Markdown stays text, HTML too, nothing
// is fetched, and every line is read a few times at most, so that no text takes much longer than another.

import {copyButton, element} from "./element.js";

const FENCE = /^[ \t]*(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TASK = /^\[([ xX])\](?:\s|$)/;
const DEEPEST = 12; // levels of lists and quotes; what is deeper stays text
const MOST_OPEN = 64; // marks of emphasis that wait for their ends; each new one looks through them
const TAB = 4;

/** Shows a text that grows: only the blocks that have changed are made anew. */
export class MarkdownView {
    #shown = [];

    constructor(parent) {
        this.parent = parent;
    }

    show(text) {
        const blocks = blocksOf(text.split("\n"), 0);
        const shown = blocks.map((block) => JSON.stringify(block));
        let same = 0;
        while (same < shown.length && shown[same] === this.#shown[same]) same++;
        while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
        for (const block of blocks.slice(same)) this.parent.append(made(block));
        this.#shown = shown;
    }
}

// Blocks. A reader returns [block, index of the line behind it], or null where another kind begins.

function blocksOf(lines, depth) {
    const readers = depth > DEEPEST ? [paragraph] : [code, heading, rule, table, quote, list, paragraph];
    const blocks = [];
    let at = nextText(lines, 0);
    while (at < lines.length) {
        let found = null;
        for (const read of readers) found ??= read(lines, at, depth);
        blocks.push(found[0]);
        at = nextText(lines, found[1]);
    }
    return blocks;
}

function nextText(lines, at) {
    while (at < lines.length && !lines[at].trim()) at++;
    return at;
}

function code(lines, at) {
    const [, fence, words] = FENCE.exec(lines[at]) ?? [];
    if (!fence || (fence[0] === "`" && words.includes("`"))) return null;
    const isEnd = (line) => line.length >= fence.length && line === fence[0].repeat(line.length);
    const indent = columns(lines[at]), text = [];
    for (at++; at < lines.length && !isEnd(lines[at].trim()); at++) text.push(dedented(lines[at], indent));
    return [{kind: "code", language: words.trim().split(/\s/)[0], text: text.join("\n")}, at + 1];
}

function heading(lines, at) {
    const found = HEADING.exec(lines[at]);
    if (!found) return null;
    const text = lines[at].slice(found[0].length).trim().replace(/(?:^|\s)#+$/, "");
    return [{kind: "heading", level: found[1].length, text}, at + 1];
}

function rule(lines, at) {
    return RULE.test(lines[at]) ? [{kind: "rule"}, at + 1] : null;
}

function table(lines, at) {
    if (!isTable(lines, at)) return null;
    const head = cellsOf(lines[at]), aligns = cellsOf(lines[at + 1]).map(alignment), rows = [];
    for (at += 2; lines[at]?.includes("|"); at++) rows.push(cellsOf(lines[at]).slice(0, head.length));
    return [{kind: "table", head, aligns, rows}, at];
}

function isTable(lines, at) {
    const [head, delimiters] = [lines[at], lines[at + 1] ?? ""];
    if (!head.includes("|") || !delimiters.includes("|")) return false;
    const cells = cellsOf(delimiters);
    return cells.length === cellsOf(head).length && cells.every((cell) => /^:?-+:?$/.test(cell));
}

function cellsOf(line) {
    const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
    return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(delimiter) {
    return delimiter.endsWith(":") ? (delimiter.startsWith(":") ? "center" : "end") : "start";
}

function quote(lines, at, depth) {
    const inner = [];
    for (; at < lines.length && QUOTE.test(lines[at]); at++) inner.push(lines[at].replace(QUOTE, ""));
    return inner.length ? [{kind: "quote", blocks: blocksOf(inner, depth + 1)}, at] : null;
}

function list(lines, at, depth) {
    const first = ITEM.exec(lines[at]), items = [];
    const isNext = (marker) => marker?.[2].at(-1) === first[2].at(-1); // the bullet, or what stands behind the number
    for (let marker = first; first && isNext(marker) && !RULE.test(lines[at]); marker = ITEM.exec(lines[at] ?? "")) {
        const indent = columns(marker[1]), inner = [lines[at].slice(marker[0].length)];
        for (at++; isOfItem(lines, at, indent); at++) inner.push(dedented(lines[at], marker[0].length));
        const task = TASK.exec(inner[0]);
        if (task) inner[0] = inner[0].slice(task[0].length);
        items.push({blocks: blocksOf(inner, depth + 1), isDone: task && task[1] !== " "});
        at = nextText(lines, at);
    }
    return first && [{kind: "list", start: parseInt(first[2], 10), items}, at];
}

/** Return whether the line belongs to the item above it: it is indented, by two at least, or goes on with its text. */
function isOfItem(lines, at, indent) {
    const next = nextText(lines, at);
    if (next >= lines.length) return false;
    if (columns(lines[next]) >= indent + 2) return true;
    return next === at && lines[at - 1].trim() !== "" && !ITEM.test(lines[at]) && !beginsBlock(lines, at);
}

function paragraph(lines, at) {
    const text = [lines[at++]];
    while (lines[at]?.trim() && !beginsBlock(lines, at)) text.push(lines[at++].trimEnd());
    return [{kind: "paragraph", text: text.join("\n").trim()}, at];
}

/** Return whether the line ends the paragraph above it. "in the year\n1984. It was" is no list. */
function beginsBlock(lines, at) {
    const isItem = parseInt(ITEM.exec(lines[at])?.[2] ?? "2", 10) > 1 ? false : ITEM.test(lines[at]);
    return isItem || [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(lines[at])) || isTable(lines, at);
}

function columns(line) {
    let count = 0;
    for (const each of /^[ \t]*/.exec(line)[0]) count += each === "\t" ? TAB : 1;
    return count;
}

function dedented(line, width) {
    let at = 0;
    for (; width > 0 && (line[at] === " " || line[at] === "\t"); at++) width -= line[at] === "\t" ? TAB : 1;
    return line.slice(at);
}

// Elements of blocks.

const MAKERS = {
    code: ({language, text}) => {
        const head = element("figcaption", {}, language || "text", copyButton(() => text));
        return element("figure", {}, head, element("pre", {tabindex: 0}, element("code", {}, text)));
    },
    heading: ({level, text}) => element(`h${Math.min(6, level + 1)}`, {}, inline(text)),
    rule: () => element("hr"),
    table: ({head, aligns, rows}) => {
        const cell = (tag) => (text, index) => element(tag, {class: aligns[index]}, inline(text));
        const body = element("tbody");
        for (const cells of rows) body.append(element("tr", {}, ...cells.map(cell("td"))));
        const top = element("thead", {}, element("tr", {}, ...head.map(cell("th"))));
        return element("div", {class: "table", tabindex: 0}, element("table", {}, top, body));
    },
    quote: ({blocks}) => filled(element("blockquote"), blocks),
    list: ({start, items}) => {
        const whole = Number.isNaN(start) ? element("ul") : element("ol", {start});
        for (const item of items) whole.append(listItem(item));
        return whole;
    },
    paragraph: ({text}) => element("p", {}, inline(text)),
};

function made(block) {
    return MAKERS[block.kind](block);
}

function filled(parent, blocks) {
    for (const block of blocks) parent.append(made(block));
    return parent;
}

function listItem({blocks, isDone}) {
    if (isDone === null) return filled(element("li"), blocks);
    const label = isDone ? "done" : "to do";
    const box = element("input", {type: "checkbox", disabled: true, checked: isDone, "aria-label": label});
    return filled(element("li", {class: "task"}, box), blocks);
}

// Text within a block: what is escaped, code, [a link](address), an address, a break, and marks of emphasis.

const SPAN = new RegExp(
    [
        /\\([\\`*_{}#+.!|~<>-])/,
        /(`+)/,
        /!?\[((?:[^[\]\\]|\\.)*)\]\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:[ \t]+"[^"]*")?\)/,
        /<?(https?:\/\/[^\s<>]*[^\s<>.,:;!?'")\]}*_~`|])>?/,
        /(<br *\/?>)/,
        /(\*{1,3}|_{1,2}|~~)/,
    ].map((part) => part.source).join("|"),
    "g",
);
const TAGS = {"*": ["em"], _: ["em"], "**": ["strong"], __: ["strong"], "***": ["strong", "em"], "~~": ["del"]};

function inline(text, isLink = false) {
    // What a mark has opened is gathered in a fragment of its own, until another closes it.
    const open = [{mark: "", content: new DocumentFragment()}];
    const add = (node) => open.at(-1).content.append(node);
    const endless = new Set();
    for (let at = 0; ; ) {
        SPAN.lastIndex = at;
        const found = SPAN.exec(text);
        add(text.slice(at, found?.index));
        if (!found) return flattened(open, 1);
        const [all, escaped, ticks, label, target, address, lineBreak, mark] = found;
        const before = text[found.index - 1] ?? " ", href = target ?? address;
        at = SPAN.lastIndex;
        if (escaped) add(escaped);
        else if (ticks) {
            const end = codeEnd(text, at, ticks, endless);
            add(end < 0 ? ticks : element("code", {}, unpadded(text.slice(at, end))));
            at = end < 0 ? at : end + ticks.length;
        } else if (lineBreak) add(element("br"));
        else if (mark) emphasize(open, mark, before, text[at] ?? " ");
        else if (isLink || !/^(https?|mailto):/i.test(href)) add(all);
        else add(link(href, label));
    }
}

function link(href, label) {
    return element("a", {href, title: href, target: "_blank", rel: "noopener noreferrer"}, inline(label || href, true));
}

/** Return where the code ends that so many ticks have begun, or -1. endless: numbers of ticks that were looked for. */
function codeEnd(text, from, ticks, endless) {
    if (endless.has(ticks)) return -1;
    for (const run of text.slice(from).matchAll(/`+/g)) if (run[0] === ticks) return from + run.index;
    endless.add(ticks);
    return -1;
}

/** Return the code without the blank on each side that keeps ticks of its own apart from the marks. */
function unpadded(text) {
    return text.startsWith(" ") && text.endsWith(" ") && text.trim() ? text.slice(1, -1) : text;
}

/** Close what the mark has opened, or open something by it; else it is text. before, after: the characters around. */
function emphasize(open, mark, before, after) {
    const isWithinWord = mark[0] === "_" && [before, after].every((each) => /[\p{L}\p{N}]/u.test(each));
    const closes = before.trim() && !isWithinWord, opens = after.trim() && !isWithinWord;
    const index = open.findLastIndex((each) => each.mark === mark);
    if (closes && index > 0) {
        const content = flattened(open, index + 1);
        open.length = index;
        open.at(-1).content.append(TAGS[mark].reduceRight((inner, tag) => element(tag, {}, inner), content));
    } else if (closes && mark === "***" && open.length > 2) {
        for (const part of open.at(-1).mark === "*" ? ["*", "**"] : ["**", "*"]) emphasize(open, part, before, after);
    } else if (opens && open.length < MOST_OPEN) open.push({mark, content: new DocumentFragment()});
    else open.at(-1).content.append(mark);
}

/** Return the content before the index with that of all marks from there on, which have turned out to be text. */
function flattened(open, from) {
    const {content} = open[from - 1];
    for (const each of open.slice(from)) content.append(each.mark, each.content);
    return content;
}
