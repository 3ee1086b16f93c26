// Chance: the values that it could have given, the calibrated score, and both in words.

const KINDS = ["value", "low", "high", "null", "null_spread", "p", "p_search"];
const NOT_CLEAR = "not distinguishable from chance";

// Numbers are in base64, four bytes each, or eight if four are not enough.
function unpacked(text, count) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbers = bytes.length === 4 * count ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
  return Array.from(numbers, (value) => (Number.isFinite(value) ? value : null));
}

function unpack(measure, count) {
  for (const kind of KINDS) {
    if (typeof measure[kind] === "string") measure[kind] = unpacked(measure[kind], count);
  }
  if (measure.calibrated) measure.score ??= measure.value.map((value, k) => scoreOf(measure, value, k));
  return measure;
}

// The position of a cell's number between chance (0) and a model compared with itself (1).
function scoreOf(measure, number, k) {
  if (number === null || measure.null[k] === null) return null;
  const score = (number - measure.null[k]) / (measure.same - measure.null[k]);
  return Number.isFinite(score) ? score : null;
}

// A number on the scale that is drawn: as measured, or calibrated.
function drawnAt(found, kind, i, j) {
  const number = found.at(kind, i, j);
  if (!found.calibrated || number === null) return number;
  const k = i * found.b.sites.length + j;
  if (kind !== "null_spread") return scoreOf(found.measure, number, k);
  const chance = found.measure.null[k];
  return chance === null ? null : Math.abs(number / (found.measure.same - chance));
}

// The p-value that decides: corrected for the search if known.
function decisiveP(found, i, j) {
  return found.at("p_search", i, j) ?? found.at("p", i, j);
}

function isByChance(found, i, j) {
  const p = decisiveP(found, i, j);
  return p !== null && p > DATA.level && found.at("value", i, j) !== null;
}

// Three decimals, or four if three would not show on which side of the level it lies.
// At the smallest that the draws can give it is an upper bound; numbers of four bytes are rounded.
function writtenP(p, floor = null) {
  if (p < 0.001) return "< 0.001";
  if (floor !== null && p <= floor * (1 + 1e-6)) return `≤ ${writtenP(p)}`;
  return p.toFixed(3) === DATA.level.toFixed(3) ? p.toFixed(4) : p.toFixed(3);
}

function chanceAt(found, i, j, digits = 4) {
  const [chance, spread] = [found.at("null", i, j), found.at("null_spread", i, j)];
  if (chance === null) return "";
  return written(chance, digits) + (spread === null ? "" : ` ± ${written(spread, digits)}`);
}

// The facts about chance for one pair of layers, as [term, text].
function chanceFacts(found, i, j) {
  const [p, search, score] = ["p", "p_search", "score"].map((kind) => found.at(kind, i, j));
  return [
    ["Chance gives", chanceAt(found, i, j)],
    ["p", p === null ? "" : writtenP(p, found.measure.pFloor)],
    ["p, corrected for search", search === null ? "" : writtenP(search, found.measure.pFloor)],
    ["Score", score === null ? "" : written(score)],
  ].filter(([, text]) => text);
}

// The facts as parts of a sentence.
function chanceInWords(found, i, j) {
  const said = chanceFacts(found, i, j).map(([term, text]) => `${term[0].toLowerCase()}${term.slice(1)} ${text}`);
  return isByChance(found, i, j) ? [...said, NOT_CLEAR] : said;
}

function chanceCount(found) {
  const columns = found.b.sites.length;
  return found.measure.value.filter((_, k) => isByChance(found, Math.floor(k / columns), k % columns)).length;
}

// The meaning and the number of faded cells.
function chanceKey(found) {
  const { measure, a, b } = found;
  if (!measure.correction) return null;
  if (!measure.value.some((value, k) => value !== null && (measure.p_search ?? measure.p)[k] !== null)) return null;
  const count = chanceCount(found);
  const rule = `p > ${DATA.level}, ${measure.correction}`;
  if (!count) return `Every value with a p-value is distinguishable from chance (none has ${rule}).`;
  return `Faded, striped cells are ${NOT_CLEAR}: ${count} of ${a.sites.length * b.sites.length} pairs (${rule}).`;
}
