// Run by `check_tools.py` with npm's `openai`: tools, logprobs, errors, repeats, a stream that is given up.
import assert from "node:assert";
import OpenAI from "openai";

const [url, engine] = process.argv.slice(2);
const messages = [{ role: "user", content: "Look and add, please." }];
const tools = ["look", "add"].map((name) => ({
  type: "function",
  function: { name, parameters: { type: "object", properties: {} } },
}));
const expected = [["look", { at: "here", text: 'é "\n' }], ["add", { first: 1, second: 2 }]];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = (fields, options) => client.chat.completions.create({ model: "m", messages, ...fields }, options);
const seen = async () => (await fetch(`${engine}/seen`)).json();
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// 1. Tools: two calls whose arguments come in pieces, put together by the client; and whole
const final = await client.chat.completions.stream({ model: "m", messages, tools }).finalChatCompletion();
for (const { choices } of [final, await chat({ tools })]) {
  const calls = choices[0].message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  assert.deepEqual([calls, choices[0].finish_reason], [expected, "tool_calls"]);
}

// 2. Logprobs, in a stream and whole
const asked = { logprobs: true, top_logprobs: 1 };
const streamed = [];
for await (const chunk of await chat({ ...asked, stream: true })) {
  streamed.push(...(chunk.choices[0]?.logprobs?.content ?? []));
}
for (const found of [streamed, (await chat(asked)).choices[0].logprobs.content]) {
  assert.deepEqual(found.map((one) => [one.token, one.logprob]), [[" é", -0.25], ["!", -1.5]]);
}

// 3. The engine's own errors
await assert.rejects(
  chat({ max_tokens: 20000 }, { maxRetries: 3 }),
  (error) => error instanceof OpenAI.BadRequestError && error.code === "length" && error.param === "max_tokens",
);

// 4. A refusal by the gate is repeated after `Retry-After`, while another request has the engine
const long = await chat({ max_tokens: 9000, stream: true });
await long[Symbol.asyncIterator]().next();
const { left } = await seen();
setTimeout(() => long.controller.abort(), 1500);
assert.equal((await chat({}, { maxRetries: 10 })).choices[0].message.content, " é!");
assert.ok((await seen()).repeated.at(-1) > 0);

// 5. The stream that was given up ended at the engine, too
const until = Date.now() + 30000;
while ((await seen()).left !== left + 1) {
  assert.ok(Date.now() < until, "the engine goes on");
  await sleep(50);
}
