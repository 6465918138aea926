// Run by `check_openai.py` with npm's `openai`: streams, whole answers, errors, tools, a stream that is given up.
import assert from "node:assert";
import OpenAI from "openai";

const messages = [{ role: "user", content: "Count, please." }];
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object", properties: {} } } }];
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const chat = (fields, options) => client.chat.completions.create({ model: "m", messages, ...fields }, options);

// 1. In events, with the usage at the end, and with tools, which the server may use or not
let text = "";
let usage;
for await (const chunk of await chat({ max_tokens: 5, stream: true, stream_options: { include_usage: true }, tools })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, " 0 1 2 3 4");
assert.equal(usage.completion_tokens, 5);

// 2. Whole
const whole = await client.completions.create({ model: "m", prompt: "Count", max_tokens: 3 });
assert.deepEqual([whole.choices[0].text, whole.choices[0].finish_reason], [" 0 1 2", "length"]);

// 3. Refused while another one has the engine; that one is given up then, and the engine is free
const long = await chat({ max_tokens: 9000, stream: true });
await long[Symbol.asyncIterator]().next();
await assert.rejects(chat({}), (error) => error instanceof OpenAI.RateLimitError && error.code === "ttft");
long.controller.abort();
assert.equal((await chat({ max_tokens: 2 }, { maxRetries: 5 })).usage.completion_tokens, 2);

// 4. The server's own errors
await assert.rejects(chat({ max_tokens: 20000 }), (error) => error instanceof OpenAI.BadRequestError && error.code === "length");
