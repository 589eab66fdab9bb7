// Prints the events of one stream of AI SDK, as JSON, without ids and times. node ai_sdk.cjs FOLDER URL KIND MODEL
const { createRequire } = require('node:module');
const [folder, url, kind, model] = process.argv.slice(2);
const load = createRequire(`${folder}/`);
const options = { baseURL: `${url}/v1`, apiKey: 'k' };
const models = {
  chat: () => load('@ai-sdk/openai').createOpenAI(options).chat(model),
  responses: () => load('@ai-sdk/openai').createOpenAI(options).responses(model),
  messages: () => load('@ai-sdk/anthropic').createAnthropic(options)(model),
  compatible: () => load('@ai-sdk/openai-compatible').createOpenAICompatible({ name: 'w', includeUsage: true, ...options })(model),
};
const changing = ['timestamp', 'headers', 'id', 'responseId', 'request', 'response', 'messageId', 'itemId', 'raw'];
globalThis.AI_SDK_LOG_WARNINGS = false;

async function main() {
  const events = [];
  const result = load('ai').streamText({ model: models[kind](), prompt: 'hello', maxRetries: 2, onError: () => {} });
  for await (const event of result.fullStream) {
    const bare = JSON.parse(JSON.stringify(event, (name, value) => (changing.includes(name) ? undefined : value)));
    events.push(event.type === 'error' ? { type: 'error', said: event.error?.message } : bare);
  }
  console.log(JSON.stringify(events));
}
main();
