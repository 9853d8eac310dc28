// One request, streamed. Knows the routes and the shapes of their answers; must not know the page.

// What the server, or the browser, says against a request.
export class Refusal extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

// The answer's parts as they come: {text, tokens, finish, usage}. A token: {id, text, kind, drafter, round, position,
// probability, alternatives}; the last two are undefined where probabilities were not asked for.
export async function* ask(route, body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await reach(route, { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const content of events(response, signal)) {
    if (content.error) throw new Refusal(content.error.message);
    yield part(content);
  }
}

// What a route tells, as JSON.
export async function get(route) {
  return (await reach(route, {})).json();
}

async function reach(route, given) {
  let response;
  try {
    response = await fetch(route, given);
  } catch (error) {
    if (given.signal?.aborted) throw error;
    throw new Refusal("the server cannot be reached");
  }
  if (!response.ok) throw new Refusal(await sentenceOf(response), response.status);
  return response;
}

async function sentenceOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      read = { done: true };
    }
    if (read.done) throw new Refusal("the connection was lost before the answer ended");
    const lines = (held + read.value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

function part(content) {
  const choice = content.choices[0];
  if (!choice) return { text: "", tokens: [], finish: null, usage: content.usage };
  const origins = choice.provenance ?? [];
  const told = probabilities(choice.logprobs);
  const tokens = origins.map((one, at) => ({ ...one, id: one.token_id, text: one.text ?? "", ...told[at] }));
  return { text: choice.delta?.content ?? choice.text ?? "", tokens, finish: choice.finish_reason, usage: content.usage };
}

// Chats and completions tell them differently.
function probabilities(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      probability: Math.exp(one.logprob),
      alternatives: one.top_logprobs.map((other) => ({ text: other.token, probability: Math.exp(other.logprob) })),
    }));
  }
  return logprobs.tokens.map((_, at) => ({
    probability: Math.exp(logprobs.token_logprobs[at]),
    alternatives: Object.entries(logprobs.top_logprobs[at])
      .map(([text, logprob]) => ({ text, probability: Math.exp(logprob) }))
      .sort((one, other) => other.probability - one.probability),
  }));
}
