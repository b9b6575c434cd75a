// Vercel's AI SDK, from npm: OpenAI's provider asks for the Responses API unless it is told otherwise.
// Like scenario.py, it takes the server in JSON and prints what came out in JSON.

import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const fromClient = createRequire(`${process.env.CLIENT_ENVIRONMENT}/`)
const load = (name) => import(pathToFileURL(fromClient.resolve(name)).href).then((found) => found.default ?? found)
const { generateText, streamText, generateObject, jsonSchema } = await load('ai')
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')
const { createOpenAI } = await load('@ai-sdk/openai')

const server = JSON.parse(process.argv[2])
const where = { baseURL: `${server.url}/v1`, apiKey: 'none' }
const compatible = createOpenAICompatible({ name: 'mini', includeUsage: true, ...where })
const provider = createOpenAI(where)
const ask = (model) => ({
  model, prompt: server.question, temperature: 0, maxOutputTokens: server.max_tokens, maxRetries: 0,
})

function equal(found, expected, what) {
  if (JSON.stringify(found) !== JSON.stringify(expected)) {
    throw new Error(`${what}: ${JSON.stringify(found)} is not ${JSON.stringify(expected)}`)
  }
}

async function chat(model) {
  const answer = await generateText(ask(model))
  equal(answer.text, server.chat_text, 'text')
  equal([answer.usage.inputTokens, answer.usage.outputTokens], server.chat_usage, 'usage')
  const stream = streamText(ask(model))
  let text = ''
  for await (const part of stream.textStream) text += part
  equal(text, server.chat_text, 'streamed text')
  const usage = await stream.usage
  equal([usage.inputTokens, usage.outputTokens], server.chat_usage, 'usage of the stream')
}

const tries = [
  [{ tried: '`generateText` and `streamText`, usage', with: '`@ai-sdk/openai-compatible`' },
    () => chat(compatible(server.model))],
  [{ tried: 'the same with `createOpenAI`', with: '`provider.chat("NAME")`' }, () => chat(provider.chat(server.model))],
  [{ tried: 'the same with `createOpenAI` by its defaults', refused: '/v1/responses' },
    () => generateText(ask(provider(server.model)))],
  [{ tried: '`generateObject`', refused: 'response_format is not supported: there is no structured output.' },
    () => generateObject({ ...ask(compatible(server.model)), schema: jsonSchema({ type: 'object', properties: {} }) })],
]

const found = []
for (const [{ tried, refused, ...more }, check] of tries) {
  let fault = refused === undefined ? undefined : 'it was not refused'
  let said
  try {
    await check()
  } catch (error) {
    const told = `${error.message} ${error.responseBody ?? ''}`
    fault = refused !== undefined && told.includes(refused) ? undefined : told.slice(0, 300)
    said = error.data?.error?.message ?? refused
    if (fault !== undefined) console.error(error)
  }
  if (fault !== undefined) found.push({ tried, outcome: 'fails', said: fault })
  else if (refused !== undefined) found.push({ tried, outcome: 'refused by design', said })
  else found.push({ tried, outcome: 'works with', ...more })
}
console.log(JSON.stringify(found))
