// Three charts in SVG, drawn by hand. Each has a sentence below it that says the same. Knows numbers and labels alone.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const LEFT = 34;
const RIGHT = 312;
const TOP = 10;
const FOOT = 88; // where the axis lies

function draw(name, given = {}, ...inner) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(given)) element.setAttribute(key, value);
  element.append(...inner);
  return element;
}

function rounded(number) {
  return Number(number.toFixed(1));
}

// An empty chart: ticks up the side, labels below the axis at their places.
function frame(ticks, labels, form) {
  const high = ticks.at(-1);
  const up = (value) => rounded(FOOT - (Math.min(value, high) / high) * (FOOT - TOP));
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} 104`, "aria-hidden": "true" });
  for (const tick of ticks) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: up(tick), y2: up(tick) }));
    svg.append(draw("text", { class: "tick", x: LEFT - 5, y: up(tick) + 3, "text-anchor": "end" }, form(tick)));
  }
  for (const [x, label] of labels) {
    svg.append(draw("text", { class: "tick", x: rounded(x), y: FOOT + 13, "text-anchor": "middle" }, label));
  }
  return { svg, up };
}

function put(place, svg, sentence) {
  const told = document.createElement("p");
  told.textContent = sentence;
  place.replaceChildren(svg, told);
}

// Round numbers from 0 to a little above `most`.
export function ticksTo(most) {
  const rough = Math.max(most, 1e-9) / 4;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((one) => one >= rough * (1 - 1e-9));
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, number) => number * step);
}

function shares(accepted, drafted) {
  return drafted.map((number, at) => (number ? (accepted[at] ?? 0) / number : 0));
}

// newest, all: {accepted, drafted} by position; newest may be null.
export function drawAcceptance(place, newest, all) {
  const [bars, lines] = [newest ? shares(newest.accepted, newest.drafted) : [], shares(all.accepted, all.drafted)];
  const number = Math.max(bars.length, lines.length, 1);
  const wide = (RIGHT - LEFT) / number;
  const every = Math.ceil(number / 14);
  const labels = Array.from({ length: number }, (_, at) => [LEFT + wide * (at + 0.5), String(at + 1)]);
  const { svg, up } = frame([0, 0.5, 1], labels.filter((_, at) => at % every === 0), (tick) => `${100 * tick} %`);
  bars.forEach((share, at) => {
    const [x, width] = [LEFT + wide * (at + 0.5) - Math.min(wide * 0.3, 14), Math.min(wide * 0.6, 28)];
    svg.append(draw("rect", { class: "bar", x: rounded(x), y: up(share), width: rounded(width), height: FOOT - up(share) }));
  });
  lines.forEach((share, at) => {
    const [x, half] = [LEFT + wide * (at + 0.5), Math.min(wide * 0.42, 20)];
    svg.append(draw("line", { class: "all", x1: rounded(x - half), x2: rounded(x + half), y1: up(share), y2: up(share) }));
  });
  const told = (name, one) => {
    const drafted = one.drafted.reduce((sum, each) => sum + each, 0);
    const accepted = one.accepted.reduce((sum, each) => sum + each, 0);
    return drafted ? `${name} ${Math.round((100 * accepted) / drafted)} % of ${drafted}` : `${name} no drafts`;
  };
  put(place, svg, `${newest ? `${told("Bars: newest answer,", newest)}. ` : ""}${told("Lines: all answers,", all)}.`);
}

// rounds: the tokens of each forward of the newest answer; mean: of all answers, or null.
export function drawForwards(place, rounds, mean) {
  const most = 48;
  const from = Math.max(0, rounds.length - most);
  const shown = rounds.slice(from);
  const wide = (RIGHT - LEFT) / Math.max(shown.length, 16);
  const labels = shown.map((_, at) => [LEFT + wide * (at + 0.5), String(from + at + 1)]);
  const every = Math.ceil(shown.length / 8) || 1;
  const top = ticksTo(Math.max(2, ...shown)).filter((tick) => Number.isInteger(tick));
  const { svg, up } = frame(top, labels.filter((_, at) => at % every === 0), String);
  shown.forEach((tokens, at) => {
    const [x, width] = [LEFT + wide * (at + 0.15), wide * 0.7];
    svg.append(draw("rect", { class: "bar", x: rounded(x), y: up(tokens), width: rounded(width), height: FOOT - up(tokens) }));
  });
  const own = rounds.length ? rounds.reduce((sum, tokens) => sum + tokens, 0) / rounds.length : null;
  if (own !== null) svg.append(draw("line", { class: "mark", x1: LEFT, x2: RIGHT, y1: up(own), y2: up(own) }));
  const told = own === null ? "" : `Newest answer: ${own.toFixed(2)} on average (dashed), ${rounds.length} forwards. `;
  put(place, svg, told + (mean === null ? "No answers yet." : `All answers: ${mean.toFixed(2)}.`));
}

// points: measured multiples of plain speed, oldest first; all: since the start, or null; newest: {rate, multiple} of
// the newest answer, or null.
export function drawSpeed(place, points, all, newest) {
  const most = 60;
  const shown = points.slice(-most);
  const x = (at) => rounded(LEFT + ((RIGHT - LEFT) * at) / Math.max(shown.length - 1, 1));
  const { svg, up } = frame(ticksTo(Math.max(2, ...shown)), [], (tick) => `${Number(tick.toFixed(2))}×`);
  svg.append(draw("line", { class: "mark", x1: LEFT, x2: RIGHT, y1: up(1), y2: up(1) }));
  if (shown.length > 1) {
    const path = shown.map((value, at) => `${at ? "L" : "M"}${x(at)} ${up(value)}`).join("");
    svg.append(draw("path", { class: "line", d: path }));
  }
  if (shown.length) svg.append(draw("circle", { class: "dot", cx: x(shown.length - 1), cy: up(shown.at(-1)), r: 3 }));
  svg.append(draw("text", { class: "tick", x: LEFT + 3, y: FOOT + 13 }, "time at work"));
  const parts = [];
  if (newest) {
    const plain = (newest.rate / newest.multiple).toFixed(1);
    parts.push(`Newest answer ${newest.multiple.toFixed(2)}×: ${newest.rate.toFixed(1)} tokens/s, plain about ${plain}.`);
  }
  if (all) parts.push(`All answers ${all.toFixed(2)}×. Dashed: plain.`);
  put(place, svg, parts.join(" ") || "No answers yet.");
}
