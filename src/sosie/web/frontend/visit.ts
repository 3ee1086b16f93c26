// What a view is given, and what it gives back.

import type { ZooInfo } from "./api.js";

export interface Visit {
  zoo: ZooInfo;
  parts: string[]; // of the address, after the view's name
  query: URLSearchParams;
  signal: AbortSignal; // aborted when the reader goes elsewhere
  go: (address: string) => void;
}

export interface Shown {
  title: string;
  content: Node[];
}
