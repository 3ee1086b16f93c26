// What the server answers, and how it is asked.

export interface Choice { name: string; count: number }
export interface Model { id: number; name: string; architecture: string; task: string | null; tags: string[]; parent: string | null }
export interface Listed extends Model { parameters: number; added: string }
export interface Page { total: number; offset: number; rows: Listed[] }
export type Kind = "cka" | "weights" | "atoms";
export interface ZooInfo {
  name: string; models: number; failed: number; probe: string; n: number; size: number; kinds: Kind[];
  what: Record<Kind, string>; version: string; ramp: string[]; most_bytes: number;
  choices: { tags: Choice[]; architectures: Choice[]; tasks: Choice[] };
}
export interface Named { id: number; name: string }
export interface Details extends Listed {
  source: string | null; digest: string; kinds: Partial<Record<Kind, string[]>>; absent: Record<string, string>;
  notes: string[]; parents: Named[]; children: Named[]; same_weights: Named[];
}
export interface Near extends Model {
  site_a: string | null; site_b: string | null; value: number; estimated: number | null; exact: boolean;
}
export interface Nearest { kind: Kind; what: string; by: "model" | "layer"; rows: Near[] }
export interface Place { x: number; y: number; models: number; stress: number }
export interface Sent extends Nearest {
  sent: { architecture: string; parameters: string; model: string; sites: string[] }; place?: Place | null;
}
export interface Relative extends Model {
  recorded: "parent" | "child" | "sibling" | null; score: number; above: number | null; early: number | null;
  cka: number | null; weights: number | null; atoms: number | null;
}
export interface Family { parent: { name: string; id: number | null } | null; candidates: number; total: number; rows: Relative[] }
export interface ClusterGroup {
  cluster: number; count: number; centre: Named; similarity: number | null; architecture: Choice;
}
export interface Clusters {
  kind: Kind; what: string; total: number; silhouette: number | null; chosen: boolean; groups: ClusterGroup[];
  ids: number[]; clusters: number[]; similarities: (number | null)[];
}
export interface Member extends Model { similarity: number | null }
export interface Members { group: ClusterGroup; total: number; offset: number; rows: Member[] }
export interface Duplicate extends Model { same_as: string; same_id: number; why: string; value: number; exact: boolean }
export interface Duplicates {
  kind: Kind; what: string; threshold: number; models: number; same_weights: number; alike: number; total: number;
  offset: number; rows: Duplicate[];
}
export interface Point extends Model { x: number; y: number }
export interface Points { kind: Kind; what: string; total: number; landmarks: number | null; points: Point[]; stress: number | null }
export interface Side extends Named { sites: string[] }
export interface Pair {
  kind: Kind; what: string; exact: boolean; kinds: Kind[]; a: Side; b: Side; value: (number | null)[][];
}
export interface RunMeasure {
  name: string; value: (number | null)[][][]; closer: "up" | "down"; ends: [far: number, alike: number];
  threshold: number; settled: (number | null)[]; caveats: string[];
}
export interface Run {
  name: string; names: [string, string]; two_runs: boolean; what: string; sites: string[]; steps_a: number[];
  steps_b: number[]; measures: RunMeasure[];
}

export type Parameters = Record<string, string | number | boolean | null | undefined>;

export async function ask<T>(path: string, parameters: Parameters = {}, options: RequestInit = {}): Promise<T> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  let answer: Response;
  try {
    answer = await fetch(`api/${path}${text ? `?${text}` : ""}`, options);
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `sosie serve` still running?");
  }
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => null);
  throw new Error(said?.error ?? `The server answered ${answer.status}.`);
}

// The number of a model that an address names by its number or by its name.
export async function numberOf(part: string, signal: AbortSignal): Promise<number> {
  if (/^\d+$/.test(part)) return Number(part);
  let name = part;
  try {
    name = decodeURIComponent(part);
  } catch { /* a % that is part of the name */ }
  return (await ask<Named>("named", { name }, { signal })).id;
}
