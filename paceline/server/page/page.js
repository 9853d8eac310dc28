// The page: a conversation, its settings, and the figures beside it.

import { Answer, Tip, count, figure, legend, make } from "./answer.js";
import { drawAcceptance, drawForwards, drawSpeed } from "./charts.js";
import { Refusal, ask, get } from "./stream.js";

const POLL_MS = 1000;
const ALTERNATIVES = 5;
const MOST_POINTS = 60;
const NEAR_PIXELS = 160;

const at = (id) => document.getElementById(id);
const [log, prompt, settings] = [at("log"), at("prompt"), at("settings")];
const tip = new Tip(at("tip"));

let messages = []; // the conversation as the server is sent it
let running = null; // an AbortController while an answer comes
let newest = null; // the answer that the figures are of
let stats = null; // the server's, as last heard
let points = []; // multiples of plain speed

// Figures

async function poll() {
  const [heard, trouble] = await hear();
  if (heard && stats && heard.spent_seconds > stats.spent_seconds && heard.plain_seconds > stats.plain_seconds) {
    points.push((heard.plain_seconds - stats.plain_seconds) / (heard.spent_seconds - stats.spent_seconds));
    points = points.slice(-MOST_POINTS);
  }
  stats = heard ?? stats;
  tellServer(trouble);
  drawFigures();
}

// The server's figures, or null; and what is wrong with it, or null.
async function hear() {
  try {
    const heard = await get("stats");
    if (heard.ready) return [heard, null];
    return [heard, await get("health").then(() => null, (error) => error.message)];
  } catch (error) {
    return [null, error.message];
  }
}

function tellServer(trouble) {
  const health = at("health");
  const told = trouble ?? "ready";
  if (health.textContent !== told) health.textContent = told;
  health.className = `health ${trouble === null ? "good" : "bad"}`;
  if (!stats) return;
  const drafter = stats.drafter ? `drafter ${stats.drafter}` : "no drafter: every answer is plain";
  if (trouble === null) at("serving").textContent = `${stats.model} · ${drafter}`;
  at("notice").hidden = stats.chat;
}

function drawFigures() {
  const all = { accepted: stats?.accepted_by_position ?? [], drafted: stats?.drafted_by_position ?? [] };
  const told = newest?.usage?.speculation;
  const own = told ? { accepted: told.accepted_by_position, drafted: told.drafted_by_position } : null;
  drawAcceptance(at("acceptance"), own, all);
  const rounds = newest ? newest.rounds.map((round) => round.tokens) : [];
  drawForwards(at("forwards"), rounds, stats?.forwards ? stats.tokens / stats.forwards : null);
  const multiple = stats?.spent_seconds ? stats.plain_seconds / stats.spent_seconds : null;
  drawSpeed(at("speed"), points, multiple, newest?.speed ?? null);
  at("legend").replaceChildren(...legend(newest));
}

// Requests

function bodyOf(conversation, given, seed) {
  const body = { model: stats?.model, stream: true, stream_options: { include_usage: true }, return_provenance: true };
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (given[name] !== "") body[name] = Number(given[name]);
  }
  if (seed !== null) body.seed = seed;
  if (stats && !stats.chat) return { ...body, prompt: conversation.at(-1).content };
  const system = given.system.trim() ? [{ role: "system", content: given.system }] : [];
  return { ...body, messages: [...system, ...conversation] };
}

function withProbabilities(body) {
  return body.prompt === undefined
    ? { ...body, logprobs: true, top_logprobs: ALTERNATIVES }
    : { ...body, logprobs: ALTERNATIVES };
}

async function run(answer, body, key, signal) {
  const before = stats;
  newest = answer;
  const route = body.prompt === undefined ? "v1/chat/completions" : "v1/completions";
  try {
    for await (const part of ask(route, body, key, signal)) {
      answer.take(part, performance.now());
      showSoon(answer);
    }
    answer.tell();
  } catch (error) {
    if (!signal.aborted) throw error;
    answer.ended = "stopped";
    answer.tell();
    throw error;
  } finally {
    await poll();
  }
  const since = (name) => (stats?.[name] ?? 0) - (before?.[name] ?? 0);
  const [spent, plain] = [since("spent_seconds"), since("plain_seconds")];
  if (answer.rate !== null && spent > 0 && plain > 0) answer.speed = { rate: answer.rate, multiple: plain / spent };
  drawFigures();
}

async function single(turn, given, signal) {
  const answer = new Answer();
  turn.append(answer.element);
  const seed = given.seed === "" ? null : Number(given.seed);
  const body = { ...bodyOf(messages, given, seed), ...(given.speculation ? {} : { speculation: { enabled: false } }) };
  try {
    await run(answer, given.probabilities ? withProbabilities(body) : body, given.key, signal);
  } finally {
    keep(answer);
  }
}

// One after the other, so that neither slows the other; without probabilities, which cost time of their own.
async function sideBySide(turn, given, signal) {
  const [drafted, plain] = [new Answer("With speculation"), new Answer("Without")];
  const verdict = make("p", { className: "verdict" });
  turn.append(make("div", { className: "pair" }, drafted.element, plain.element), verdict);
  plain.foot.textContent = "begins when the other has ended";
  const drawn = given.seed === "" && Number(given.temperature) > 0;
  const seed = drawn ? Math.floor(Math.random() * 2 ** 31) : given.seed === "" ? null : Number(given.seed);
  const body = bodyOf(messages, given, seed);
  try {
    await run(drafted, body, given.key, signal);
    await run(plain, { ...body, speculation: { enabled: false } }, given.key, signal);
    newest = drafted;
    drawFigures();
    verdict.textContent = judge(drafted, plain) + (drawn ? ` Both were drawn with seed ${seed}.` : "");
    verdict.classList.add(equal(drafted, plain) ? "good" : "bad");
  } catch (error) {
    verdict.textContent = "There is nothing to compare.";
    throw error;
  } finally {
    keep(drafted);
  }
}

function equal(one, other) {
  return firstDifference(one, other) === null && one.text === other.text;
}

function firstDifference(one, other) {
  const longest = Math.max(one.tokens.length, other.tokens.length);
  for (let place = 0; place < longest; place++) {
    if (one.tokens[place]?.id !== other.tokens[place]?.id) return place + 1;
  }
  return null;
}

function judge(drafted, plain) {
  const place = firstDifference(drafted, plain);
  if (!equal(drafted, plain)) return `The texts differ${place === null ? "" : ` from token ${place} on`}.`;
  const same = `Equal texts, token for token (${count(plain.tokens.length, "token")}).`;
  if (drafted.rate === null || plain.rate === null) return same;
  const times = (drafted.rate / plain.rate).toFixed(2);
  return `${same} ${figure(drafted.rate)} against ${figure(plain.rate)} tokens/s: ${times} times the speed.`;
}

// The conversation

function keep(answer) {
  if (answer.text) messages.push({ role: "assistant", content: answer.text });
  else messages.pop(); // a question nobody answered is not part of it
}

// Keep the newest words in sight, unless the reader has scrolled away from them and not come back.
let left = 0; // where that left off: text alone scrolls nothing; behind everything while the reader is away
function follow(always = false) {
  const scrolled = log.scrollHeight > log.clientHeight ? log : document.scrollingElement;
  const below = scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight;
  if (!always && below >= NEAR_PIXELS && scrolled.scrollTop < left) {
    left = Infinity;
    return;
  }
  log.lastElementChild?.scrollIntoView({ block: "end" });
  left = scrolled.scrollTop;
}

// Once a frame, however fast tokens come: laying out a long answer for each of them would leave no time for a click.
let showing = false;
function showSoon(answer) {
  if (showing) return;
  showing = true;
  requestAnimationFrame(() => {
    showing = false;
    answer.tell();
    follow();
    drawFigures();
  });
}

async function send() {
  const text = prompt.value.trim();
  if (!text || running || !settings.reportValidity()) return;
  const given = Object.fromEntries(new FormData(settings));
  at("empty")?.remove();
  const turn = make("div", { className: "turn" }, make("p", { className: "said" }, text));
  log.append(turn);
  messages.push({ role: "user", content: text });
  prompt.value = "";
  running = new AbortController();
  showRunning();
  follow(true);
  try {
    await poll(); // so that the figures of this answer begin here
    await (at("compare").checked ? sideBySide : single)(turn, given, running.signal);
    at("status").textContent = `Answered: ${newest.foot.textContent}`;
  } catch (error) {
    if (running.signal.aborted) at("status").textContent = "Stopped.";
    else refuse(turn, error);
  } finally {
    running = null;
    showRunning();
    follow();
  }
}

function refuse(turn, error) {
  const sentence = error instanceof Refusal ? error.message : `the page failed: ${error.message}`;
  turn.append(make("p", { className: "error", role: "alert" }, sentence));
  if (error.status === 401) {
    at("settings-box").open = true;
    settings.elements.key.focus();
  }
}

function showRunning() {
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
  at("clear").disabled = Boolean(running);
  document.body.dataset.state = running ? "running" : "idle";
}

function clear() {
  messages = [];
  newest = null;
  log.replaceChildren();
  drawFigures();
  prompt.focus();
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
settings.addEventListener("submit", (event) => event.preventDefault());
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tip.hide();
  running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);

showRunning();
await poll();
prompt.focus();
setInterval(() => document.hidden || poll(), POLL_MS);
