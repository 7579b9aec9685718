// Checks of the AI SDK's providers for OpenAI's dialect and Anthropic's: `node with_ai_sdk.mjs URL`, beside node_modules.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Its packages are in the environment that it is run in, not beside this file.
const require = createRequire(`${process.cwd()}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, isStepCount, Output, streamText, tool } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const URL = process.argv[2];
const USER = "A tale about an owl, please.";
const SYSTEM = "You tell short tales.";
const TOO_LONG = "owl ".repeat(3000);
const LENGTH = 48; // tokens: of six, a busy machine sends more than three in one piece
const ROOM = 120; // tokens, for a call

const openai = createOpenAICompatible({ name: "localllm", baseURL: `${URL}/v1`, supportsStructuredOutputs: true, includeUsage: true });
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" });
const chat = openai.chatModel("tiny");
const message = anthropic("tiny");

const checks = new Map();

// Marks a function as a check, which throws where the client and the server do not understand each other. What it says
// of them is read from this text.
const supports = (client, path, what, check) => checks.set(check.name, check);

const asked = { prompt: USER, temperature: 0, maxRetries: 0, maxOutputTokens: LENGTH };
const weather = tool({
  description: "The weather of today.",
  inputSchema: z.object({ unit: z.enum(["C", "F"]) }),
  execute: async ({ unit }) => `21 ${unit}`,
});
const told = { ...asked, maxOutputTokens: ROOM, tools: { weather }, stopWhen: isStepCount(2) };

// A greedy answer, asked for by hand.
const chatText = async () => {
  const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: USER }];
  const body = JSON.stringify({ messages, temperature: 0, max_tokens: LENGTH });
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch(`${URL}/v1/chat/completions`, { method: "POST", headers, body });
  return (await reply.json()).choices[0].message.content;
};

const requireAnswer = async (model) => {
  const reply = await generateText({ ...asked, model, instructions: SYSTEM });
  assert.equal(reply.text, await chatText());
  assert.equal(reply.finishReason, "length");
  assert.equal(reply.usage.outputTokens, LENGTH);
  assert.ok(reply.usage.inputTokens > 0);
};

const requireStreamedAnswer = async (model) => {
  const reply = streamText({ ...asked, model, instructions: SYSTEM });
  const pieces = [];
  for await (const piece of reply.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), await chatText());
  assert.ok(pieces.length > 3);
  assert.equal((await reply.usage).outputTokens, LENGTH);
};

// The tool that the model chooses to call is run, and the model says something to what comes of it.
const requireCall = async (reply) => {
  const steps = await reply.steps;
  assert.equal(steps.length, 2);
  assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [{ unit: "C" }]);
  assert.deepEqual(steps[0].toolResults.map((result) => result.output), ["21 C"]);
  assert.ok(steps[1].text);
};

const requireStreamedCall = async (model) => {
  const reply = streamText({ ...told, model });
  await reply.consumeStream();
  await requireCall(reply);
};

const requireNamedCall = async (model) => {
  for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
    const reply = await generateText({ ...told, model, toolChoice, stopWhen: isStepCount(1) });
    assert.deepEqual(reply.toolCalls.map((call) => call.toolName), ["weather"]);
  }
};

const requireStructuredOutput = async (model) => {
  const output = Output.object({ schema: z.object({ unit: z.enum(["C", "F"]) }) });
  const reply = await generateText({ ...asked, model, maxOutputTokens: ROOM, output });
  assert.ok(["C", "F"].includes(reply.output.unit));
};

const requireRefusals = async (model, unknown) => {
  const tooLong = { statusCode: 400, message: /1024/ };
  await assert.rejects(generateText({ ...asked, model, prompt: TOO_LONG }), tooLong);
  await assert.rejects(generateText({ ...asked, model: unknown }), { statusCode: 404 });
};

async function checkAWholeAnswer() {
  await requireAnswer(chat);
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "answer", checkAWholeAnswer);
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "system prompt", checkAWholeAnswer);
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "token usage", checkAWholeAnswer);

async function checkAStreamedAnswer() {
  await requireStreamedAnswer(chat);
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "answer, streamed", checkAStreamedAnswer);
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "token usage, streamed", checkAStreamedAnswer);

async function checkACall() {
  await requireCall(await generateText({ ...told, model: chat }));
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "tools: optional calls", checkACall);
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "tools: result sent back", checkACall);

async function checkAStreamedCall() {
  await requireStreamedCall(chat);
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "tools: call, streamed", checkAStreamedCall);

async function checkACallThatIsRequired() {
  await requireNamedCall(chat);
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "tools: required call", checkACallThatIsRequired);
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "tools: named tool", checkACallThatIsRequired);

async function checkStructuredOutput() {
  await requireStructuredOutput(chat);
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "structured output: parsed", checkStructuredOutput);

async function checkRefusals() {
  await requireRefusals(chat, openai.chatModel("tinny"));
}
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "refused: prompt too long", checkRefusals);
supports("@ai-sdk/openai-compatible", "/v1/chat/completions", "refused: unknown model", checkRefusals);

async function checkAMessage() {
  await requireAnswer(message);
}
supports("@ai-sdk/anthropic", "/v1/messages", "answer", checkAMessage);
supports("@ai-sdk/anthropic", "/v1/messages", "system prompt", checkAMessage);
supports("@ai-sdk/anthropic", "/v1/messages", "token usage", checkAMessage);

async function checkAStreamedMessage() {
  await requireStreamedAnswer(message);
}
supports("@ai-sdk/anthropic", "/v1/messages", "answer, streamed", checkAStreamedMessage);

async function checkACallOfAMessage() {
  await requireCall(await generateText({ ...told, model: message }));
}
supports("@ai-sdk/anthropic", "/v1/messages", "tools: optional calls", checkACallOfAMessage);
supports("@ai-sdk/anthropic", "/v1/messages", "tools: result sent back", checkACallOfAMessage);

async function checkAStreamedCallOfAMessage() {
  await requireStreamedCall(message);
}
supports("@ai-sdk/anthropic", "/v1/messages", "tools: call, streamed", checkAStreamedCallOfAMessage);

async function checkACallOfAMessageThatIsRequired() {
  await requireNamedCall(message);
}
supports("@ai-sdk/anthropic", "/v1/messages", "tools: required call", checkACallOfAMessageThatIsRequired);
supports("@ai-sdk/anthropic", "/v1/messages", "tools: named tool", checkACallOfAMessageThatIsRequired);

async function checkStructuredOutputOfAMessage() {
  await requireStructuredOutput(message);
}
supports("@ai-sdk/anthropic", "/v1/messages", "structured output: parsed", checkStructuredOutputOfAMessage);

async function checkRefusalsOfMessages() {
  await requireRefusals(message, anthropic("tinny"));
}
supports("@ai-sdk/anthropic", "/v1/messages", "refused: prompt too long", checkRefusalsOfMessages);
supports("@ai-sdk/anthropic", "/v1/messages", "refused: unknown model", checkRefusalsOfMessages);

// An object of JSON: of each check, what it threw; "" where all is well.
const became = {};
for (const [name, check] of checks) {
  became[name] = await check().then(() => "", (error) => String(error?.stack ?? error) || "thrown");
}
console.log(JSON.stringify(became));
