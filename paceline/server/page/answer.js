// An answer on the page: its tokens, marked by origin, what is told of one, and its figures. Must not know requests.

// As paceline/pieces.py says them.
export const MEANINGS = {
  accepted: "drafted and accepted",
  corrected: "the target's own, where the draft was wrong",
  bonus: "the target's own, after a draft accepted whole",
  plain: "no draft",
};
const MARKS = 4; // marks for drafters; further ones begin again
const drafters = []; // in the order in which they first gave a token

export function make(name, settings = {}, ...inner) {
  const element = Object.assign(document.createElement(name), settings);
  element.append(...inner);
  return element;
}

// The classes of a token's origin: its kind, and for an accepted draft its drafter's mark.
export function marks(kind, drafter) {
  if (kind !== "accepted") return kind;
  if (!drafters.includes(drafter)) drafters.push(drafter);
  return `accepted d${drafters.indexOf(drafter) % MARKS}`;
}

export function meaning(kind, drafter) {
  return kind === "accepted" ? `drafted by ${drafter} and accepted` : MEANINGS[kind];
}

export class Answer {
  constructor(title) {
    this.words = make("div", { className: "words" });
    this.words.setAttribute("role", "group");
    this.words.setAttribute("aria-label", "Answer; the arrow keys go from token to token");
    this.foot = make("p", { className: "foot" });
    this.element = make("div", { className: "answer" }, ...(title ? [make("h3", {}, title)] : []), this.words, this.foot);
    this.text = "";
    this.tokens = [];
    this.rounds = []; // tokens of each
    this.usage = null;
    this.begun = this.first = this.last = null; // milliseconds: asked, first and newest part with tokens
    this.behind = 0; // tokens behind those of the first part
    this.ended = ""; // why, where that is worth a word
    this.speed = null; // {rate, multiple of the plain estimate}, once it has ended
    this.words.addEventListener("keydown", (event) => this.#walk(event));
  }

  take(part, now) {
    this.text += part.text;
    this.usage = part.usage ?? this.usage;
    if (part.finish === "length") this.ended = "cut at max tokens";
    if (!part.tokens.length) return;
    if (this.first === null) this.first = now;
    else this.behind += part.tokens.length;
    this.last = now;
    for (const token of part.tokens) this.#add(token);
  }

  #add(token) {
    this.tokens.push(token);
    if (this.rounds.at(-1)?.round !== token.round) this.rounds.push({ round: token.round, tokens: 0 });
    this.rounds.at(-1).tokens += 1;
    const span = make("span", { className: `token ${marks(token.kind, token.drafter)}`, textContent: token.text });
    span.tabIndex = this.words.firstChild ? -1 : 0;
    span.token = token;
    this.words.append(span);
  }

  // Only one token is a tab stop; the arrow keys move it.
  #walk(event) {
    const here = event.target;
    const next = {
      ArrowRight: here.nextElementSibling,
      ArrowLeft: here.previousElementSibling,
      Home: this.words.firstElementChild,
      End: this.words.lastElementChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  // Of the tokens behind the first part: the prompt's time is not theirs.
  get rate() {
    return this.behind && this.last > this.first ? (1000 * this.behind) / (this.last - this.first) : null;
  }

  get perForward() {
    return this.rounds.length ? this.tokens.length / this.rounds.length : null;
  }

  tell() {
    const told = [count(this.tokens.length, "token")];
    if (this.rate !== null) told.push(`${figure(this.rate)} tokens/s`);
    if (this.perForward !== null) told.push(`${this.perForward.toFixed(2)} per forward`);
    const speculation = this.usage?.speculation;
    if (speculation?.drafted_tokens) {
      told.push(`${speculation.accepted_tokens} of ${count(speculation.drafted_tokens, "draft")} accepted`);
    }
    if (this.ended) told.push(this.ended);
    this.foot.textContent = told.join(" · ");
  }
}

export function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

export function figure(number) {
  return number >= 100 ? number.toFixed(0) : number.toFixed(1);
}

// The origins of an answer's tokens, counted; all kinds are shown, so that the marks can be looked up.
export function legend(answer) {
  const counts = new Map(drafters.map((name) => [`accepted/${name}`, 0]));
  if (!drafters.length) counts.set("accepted/a drafter", 0);
  for (const kind of ["corrected", "bonus", "plain"]) counts.set(`${kind}/`, 0);
  for (const token of answer?.tokens ?? []) {
    const name = `${token.kind}/${token.drafter ?? ""}`;
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].map(([name, number]) => {
    const [kind, drafter] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
    const known = drafters.includes(drafter);
    const look = kind === "accepted" && !known ? "accepted d0" : marks(kind, drafter);
    return make(
      "li",
      {},
      make("span", { className: `token ${look}` }, kind === "accepted" && known ? drafter : kind),
      make("span", { className: "meaning" }, meaning(kind, drafter)),
      make("span", { className: "number" }, answer ? String(number) : ""),
    );
  });
}

// What is told of one token, beside it.
export class Tip {
  constructor(element) {
    this.element = element;
    for (const name of ["mouseover", "focusin"]) document.addEventListener(name, (event) => this.#look(event.target));
    for (const name of ["mouseout", "focusout"]) document.addEventListener(name, () => this.hide());
    document.addEventListener("scroll", () => this.hide(), true);
  }

  hide() {
    this.element.hidden = true;
  }

  #look(target) {
    if (target.token) this.#show(target, target.token);
  }

  #show(span, token) {
    this.element.replaceChildren(...this.#lines(token));
    this.element.hidden = false;
    span.setAttribute("aria-describedby", this.element.id);
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const below = at.bottom + 6 + height < innerHeight;
    this.element.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
    this.element.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
  }

  #lines(token) {
    const lines = [
      make("p", {}, make("span", { className: `token ${marks(token.kind, token.drafter)}` }, shown(token.text))),
      make("p", {}, meaning(token.kind, token.drafter)),
      make("p", { className: "quiet" }, `token ${token.position} of forward ${token.round + 1}, id ${token.id}`),
    ];
    if (token.probability === undefined) return [...lines, make("p", { className: "quiet" }, "no probability was asked for")];
    lines.push(make("p", {}, `probability ${percent(token.probability)}`));
    const rows = token.alternatives.map((one) => {
      const bar = make("span", { className: "bar" });
      bar.style.width = `${(100 * one.probability).toFixed(1)}%`;
      return make("li", {}, make("code", {}, shown(one.text)), make("span", { className: "rail" }, bar), percent(one.probability));
    });
    return [...lines, make("ul", {}, ...rows)];
  }
}

function percent(share) {
  return share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
}

// White space and control codes are shown by signs.
function shown(text) {
  const signs = { " ": "␣", "\n": "↵", "\t": "⇥" };
  const sign = (one) => signs[one] ?? String.fromCharCode(0x2400 + one.charCodeAt(0));
  return text === "" ? "(no text of its own)" : text.replace(/[\x00-\x20]/g, sign);
}
