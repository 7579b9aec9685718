// Elements are made here, of text and of each other: nothing in this page is parsed as HTML.

/** Return a new element. A function counts as a listener: {onclick: stop}; false leaves an attribute out. */
export function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
        if (typeof value === "function") made.addEventListener(name.slice(2), value);
        else if (value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
}

/** Return a button that copies what text() returns. */
export function copyButton(text) {
    const copy = async () => {
        button.textContent = (await isCopied(text())) ? "Copied" : "Not copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    const button = element("button", {type: "button", class: "quiet", onclick: copy}, "Copy");
    return button;
}

async function isCopied(text) {
    // Browsers give the clipboard to pages of this machine or with TLS. Others have the selection alone.
    if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
    const box = element("textarea", {class: "unseen"});
    box.value = text;
    document.body.append(box);
    box.select();
    const isDone = document.execCommand("copy");
    box.remove();
    return isDone;
}
