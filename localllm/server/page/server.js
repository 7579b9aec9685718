// What the page asks the server, in OpenAI's dialect. Every failure is a ServerError that can be shown as it is.

const KEY = "localllm-key"; // in sessionStorage: forgotten with the tab

export class ServerError extends Error {
    constructor(message, code) {
        super(message);
        this.code = code;
    }
}

/** askKey(isWrong): asks the user for the API key; "" where it is not given. */
export class Server {
    #asked = null;

    constructor(askKey) {
        this.askKey = askKey;
    }

    /** Return the models on its disk: {name, ctx}. ctx: tokens, null where the model is not loaded. */
    async models() {
        const {data} = await (await this.#reply("/v1/models")).json();
        return data.map((model) => ({name: model.id, ctx: model.meta.n_ctx}));
    }

    /** Yield the chunks of an answer, each with the usage so far. signal: aborts it, in the server too.
     *  numEvicted, of each chunk: turns that have left the context. */
    async *answer(request, signal) {
        const body = JSON.stringify({...request, stream: true, stream_options: {continuous_usage_stats: true}});
        const reply = await this.#reply("/v1/chat/completions", {method: "POST", body, signal});
        const numEvicted = Number(reply.headers.get("x-localllm-evicted-turns"));
        for await (const data of events(reply.body, signal)) {
            if (data.error) throw new ServerError(data.error.message, data.error.code);
            yield {...data, numEvicted};
        }
    }

    /** Return the reply. Asks for the key, waits for a model that is being loaded, throws every other refusal. */
    async #reply(path, options = {}) {
        for (;;) {
            const key = sessionStorage.getItem(KEY);
            const headers = {"content-type": "application/json", ...(key && {authorization: `Bearer ${key}`})};
            const reply = await fetch(path, {...options, headers}).catch((error) => gone(error, options.signal));
            if (reply.ok) return reply;
            const error = await errorOf(reply);
            if (reply.status === 401 && (await this.#hasNewKey(key))) continue;
            if (error.code !== "loading") throw error;
            await pause(Number(reply.headers.get("retry-after") ?? 1), options.signal);
        }
    }

    /** Return whether there is another key than the one that was refused. Several requests ask once. */
    async #hasNewKey(refused) {
        if (sessionStorage.getItem(KEY) === refused) {
            this.#asked ??= this.askKey(refused !== null).finally(() => { this.#asked = null; });
            const key = await this.#asked;
            if (key) sessionStorage.setItem(KEY, key);
        }
        return sessionStorage.getItem(KEY) !== refused;
    }
}

function gone(error, signal) {
    if (signal?.aborted) throw error;
    throw new ServerError(`The server at ${location.host} does not answer. Is localllm serve running?`, "gone");
}

async function errorOf(reply) {
    const {error} = await reply.json().catch(() => ({error: null}));
    return new ServerError(error?.message ?? `The server answers with the status ${reply.status}.`, error?.code);
}

function pause(seconds, signal) {
    return new Promise((resolve, reject) => {
        setTimeout(resolve, 1000 * seconds);
        signal?.addEventListener("abort", () => reject(signal.reason));
    });
}

/** Yield the data of server-sent events, up to the mark of their end. */
async function* events(stream, signal) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
        const {value, done} = await reader.read().catch((error) => gone(error, signal));
        if (done) throw new ServerError("The connection ended before the answer did.", "gone");
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
            if (part === "data: [DONE]") return;
            if (part.startsWith("data: ")) yield JSON.parse(part.slice(6)); // else it is a sign of life
        }
    }
}
